"""What sets this PowerSGD apart, each claim against what it is better than.

Errors that do not drift apart, no memory allocated from step to step, and yet the same training as torch's hook.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.profiler import ProfilerActivity, profile

from edgc.compressors import Channel, Gradient
from edgc.compressors.base import compressible
from edgc.compressors.powersgd import saves_bytes
from edgc.compressors.powersgd.passes import RowBlocks
from edgc.compressors.powersgd.state import random_factor
from tests.lockstep import reduce_together
from tests.low_rank import power_sgd
from tests.workers import run_workers

# --------------------------------------------------------------------- drift

WORLD, SHAPE, RANK = 4, (16, 24), 2


def gradients_of(step: int) -> Tensor:
    """Of all workers: something in common, and noise of each worker's own, [W, m, n]."""
    generator = torch.Generator().manual_seed(step)
    common = torch.randn(SHAPE[0], 3, generator=generator) @ torch.randn(3, SHAPE[1], generator=generator)
    return 0.5 * common + torch.randn(WORLD, *SHAPE, generator=generator)


def own_form(steps: int, **options: Any) -> list[float]:
    workers = [power_sgd(min_elements=1, **options) for _ in range(WORLD)]
    ratios = []
    for step in range(steps):
        statistics = reduce_together(workers, [[Gradient("w", gradient)] for gradient in gradients_of(step)], RANK)
        error_sq, gradient_sq = (sum(float(getattr(s, key)) for s in statistics) for key in ("error_sq", "gradient_sq"))
        ratios.append(error_sq / gradient_sq)
    return ratios


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"error_dtype": "bf16"}, {"factor_dtype": "int4"}], ids=str)
def test_the_own_form_stays_within_a_constant_of_the_gradient(options: dict[str, Any]) -> None:
    ratios = own_form(1000, **options)
    early, late = fmean(ratios[250:500]), fmean(ratios[750:])
    assert late == pytest.approx(early, rel=0.1)
    # A direction waits for its turn: about min(m, n) / r steps.
    assert max(ratios) < 4 * min(SHAPE) / RANK


# --------------------------------------------------------------------- memory


class Pretended(Channel):
    """Two workers that send the same; collectives without memory of their own."""

    def __init__(self) -> None:
        super().__init__(None)
        self.world = 2

    def mean_(self, tensor: Tensor) -> None:
        pass

    def all_to_all(self, output: Tensor, source: Tensor) -> None:
        output.copy_(source)

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        output.copy_(source.expand_as(output))

    def finish(self) -> None:
        pass


def largest_allocation(folder: Path, step: Callable[[], Any]) -> int:
    """Bytes of the largest single allocation while ``step`` runs, as the allocator reports it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    seen.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    sizes = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
    assert sizes, "the profiler saw no allocation at all"
    return max(sizes)


ROWS, COLUMNS, SMALL = 384, 512, 8


def steady_state(dtype: torch.dtype, options: dict[str, Any]) -> Callable[[], Any]:
    """A reduction that has been done often enough, on gradients that are there."""
    compressor, channel = power_sgd(min_elements=64, **options), Pretended()
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, COLUMNS), (ROWS, COLUMNS), (COLUMNS, ROWS), (64, 3000), (777,), (5, 7)]
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    gradients = [Gradient(f"p{i}", tensor.clone()) for i, tensor in enumerate(drawn)]

    def step() -> None:
        for gradient, tensor in zip(gradients, drawn, strict=True):
            gradient.tensor.copy_(tensor)
        compressor.reduce(gradients, channel, SMALL)

    for _ in range(4):
        step()
    return step


# Matrices of r x r in LAPACK, and whatever counts single numbers.
ALLOWED = 8 * SMALL * SMALL + 4096


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({}, torch.bfloat16),
        ({"error_dtype": "bf16"}, torch.bfloat16),
        ({"factor_dtype": "bf16"}, torch.float32),
        ({"factor_dtype": "int8"}, torch.float32),
        ({"factor_dtype": "int5"}, torch.bfloat16),
        ({"one_sided": True}, torch.float32),
    ],
    ids=str,
)
def test_steady_state_allocates_nothing(tmp_path: Path, options: dict[str, Any], dtype: torch.dtype) -> None:
    assert largest_allocation(tmp_path, steady_state(dtype, options)) <= ALLOWED


def test_an_allocation_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = steady_state(torch.float32, {})
    original = RowBlocks.right_factor

    def wasteful(self: RowBlocks, x: Any, left: Tensor, out: Tensor) -> None:
        original(self, x, left, out.clone())

    monkeypatch.setattr(RowBlocks, "right_factor", wasteful)
    assert largest_allocation(tmp_path, step) > ALLOWED


# --------------------------------------------------------------------- torch's hook


class Bucket:
    """What torch's hook asks of a DDP bucket."""

    def __init__(self, flat: Tensor, shapes: Sequence[Sequence[int]]) -> None:
        self.flat = flat
        parts = flat.split([math.prod(shape) for shape in shapes])
        self.views = [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]

    def buffer(self) -> Tensor:
        return self.flat

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def gradients(self) -> list[Tensor]:
        return self.views


def torch_hook(shapes: Sequence[Sequence[int]], rank: int) -> Callable[[Bucket], None]:
    """torch's PowerSGD, beginning with the same random Q as ours."""
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=2,
        min_compression_rate=1,
        orthogonalization_epsilon=0,
    )
    state.iter = 2
    factored = [(i, tuple(s)) for i, s in enumerate(shapes) if compressible(s, 1) and saves_bytes(s, rank)]
    # The hook goes through its matrices by shape, in the order in which the shapes come up.
    by_shape = list(dict.fromkeys(shape for _, shape in factored))
    factored.sort(key=lambda item: by_shape.index(item[1]))
    qs = [random_factor(0, 1, f"p{i}", s[1], rank) for i, s in factored]
    state.q_memory_dict[0] = torch.cat([q.reshape(-1) for q in qs])
    state.p_memory_dict[0] = torch.empty(sum(s[0] * rank for _, s in factored))

    def reduce(bucket: Bucket) -> None:
        powerSGD_hook.powerSGD_hook(state, bucket).wait()  # type: ignore[arg-type]

    return reduce


def our_hook(rank: int) -> Callable[[Bucket], None]:
    compressor, channel = power_sgd(min_elements=1), Channel(None)

    def reduce(bucket: Bucket) -> None:
        gradients = [Gradient(f"p{i}", view) for i, view in enumerate(bucket.views)]
        compressor.reduce(gradients, channel, rank)

    return reduce


def descend(
    parameters: list[Tensor], loss: Callable[[int], Tensor], rate: float, hook: Callable[[Bucket], None]
) -> list[float]:
    """The mean loss of all workers over 50 steps of gradient descent with momentum."""
    bucket = Bucket(torch.zeros(sum(p.numel() for p in parameters)), [p.shape for p in parameters])
    for parameter, view in zip(parameters, bucket.views, strict=True):
        parameter.grad = view
    optimizer = torch.optim.SGD(parameters, lr=rate, momentum=0.9)
    curve = []
    for step in range(50):
        bucket.flat.zero_()
        value = loss(step)
        value.backward()
        hook(bucket)
        optimizer.step()
        mean_loss = value.detach().clone()
        dist.all_reduce(mean_loss)
        curve.append(float(mean_loss) / dist.get_world_size())
    return curve


def quadratic(hook: str) -> list[float]:
    """Each worker has a least-squares problem of its own in two matrices and a vector."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    a, b = torch.randn(64, 30, generator=generator), torch.randn(20, 64, generator=generator)
    target = torch.randn(64, 40, generator=generator)
    shapes = [(30, 40), (40, 20), (64,)]
    start = torch.Generator().manual_seed(7)
    x, y, c = (torch.nn.Parameter(0.1 * torch.randn(s, generator=start)) for s in shapes)

    def loss(step: int) -> Tensor:
        return 0.5 * (a @ x / 5 + (y @ b).T / 4 + c[:, None] - target).square().mean()

    return descend([x, y, c], loss, 0.5, our_hook(4) if hook == "ours" else torch_hook(shapes, 4))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, width: int, length: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def small_gpt(hook: str) -> list[float]:
    """Next-token loss on sequences that count up modulo the vocabulary."""
    torch.manual_seed(0)
    model, rank = GPT(vocabulary=48, width=32, length=16, layers=2), 4
    batches = torch.Generator().manual_seed(dist.get_rank())

    def loss(step: int) -> Tensor:
        first, stride = torch.randint(48, (2, 8, 1), generator=batches)
        tokens = (first + (stride % 5 + 1) * torch.arange(17)) % 48
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    parameters: list[Any] = list(model.parameters())
    shapes = [p.shape for p in parameters]
    return descend(parameters, loss, 0.02, our_hook(rank) if hook == "ours" else torch_hook(shapes, rank))


def curves() -> dict[str, list[list[float]]]:
    return {
        "quadratic": [quadratic("ours"), quadratic("torch")],
        "small GPT": [small_gpt("ours"), small_gpt("torch")],
    }


def test_trains_like_torchs_hook() -> None:
    """Same first Q, same rank: by algebra the mean of the two forms of error feedback is the same."""
    for found in run_workers(2, curves):
        for name, (ours, theirs) in found.items():
            assert ours[-1] < 0.9 * ours[0], f"{name} must learn something: {ours[0]}, {ours[-1]}"
            assert max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True)) < 1e-4, name
