"""Switches of gradient compressors against references in fp64, written from the papers: all workers in one process.

Each reference has one matrix [m, n], W workers and no tricks. Rounding to the nearest may fall to the other side in
fp32, for a block of 64 at a time. So a few entries may differ, and a step of a quantiser begins with the error feedback
that the library has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from edgc.compressors import Gradient
from edgc.config import EDGCConfig
from tests.lockstep import reduce_together, room

ROWS, COLUMNS, STEPS = 48, 40, 20


class Reference(Protocol):
    """Every worker's gradient [m, n] to what all of them then have.

    Attributes:
        errors: of every worker, [W, m, n]: what it keeps.
        follows: whether a step begins with the error feedback of the library's last one.
    """

    errors: Tensor
    follows: bool

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor: ...


def gradient(step: int, worker: int, shape: tuple[int, int] = (ROWS, COLUMNS)) -> Tensor:
    """Something of low rank in common that stays for some steps, and noise of each worker's own; fp64."""
    common = torch.Generator().manual_seed(step // 5)
    own = torch.Generator().manual_seed(1000 + 10 * step + worker)
    left, right = (torch.randn(side, 3, generator=common, dtype=torch.float64) for side in shape)
    return left @ right.mT + 0.3 * torch.randn(shape, generator=own, dtype=torch.float64)


# --------------------------------------------------------------- quantisers


def step_of(amax: Tensor, *factors: float) -> Tensor:
    """The step as it is sent, in bf16: a product in fp32, for which of two it is, half way between, decides a block."""
    step = amax.float()
    for factor in factors:
        step = step * factor
    return step.bfloat16().double()


E4M3 = torch.tensor(
    sorted({sign * m / 8 * 2.0**-6 for sign in (-1, 1) for m in range(8)}
           | {sign * (1 + m / 8) * 2.0 ** (e - 7) for sign in (-1, 1) for e in range(1, 16) for m in range(8)
              if (e, m) != (15, 7)}),
    dtype=torch.float64,
)  # fmt: skip


def to_e4m3(blocks: Tensor) -> Tensor:
    step = step_of(blocks.abs().amax(1, keepdim=True), 1 / 448)
    nearest = (blocks / step)[..., None].sub(E4M3).abs().argmin(-1)
    return E4M3[nearest] * step


def to_int4(blocks: Tensor) -> Tensor:
    """Of the steps f amax / 7 that with the least squared error."""
    best, least = torch.zeros_like(blocks), torch.full((len(blocks), 1), torch.inf, dtype=torch.float64)
    for f in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5):
        exact = f * blocks.abs().amax(1, keepdim=True) / 7
        error = ((blocks / exact).round().clamp(-7, 7) * exact - blocks).square().sum(1, keepdim=True)
        step = step_of(blocks.abs().amax(1, keepdim=True), f, 1 / 7)
        best = torch.where(error < least, (blocks / step).round().clamp(-7, 7) * step, best)
        least = torch.minimum(error, least)
    return best


def hadamard(order: int) -> Tensor:
    """Sylvester's, by the parity of the bits that both indices have."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(order)] for i in range(order)]
    return torch.tensor(signs, dtype=torch.float64) / order**0.5


class Rounded:
    """Rounded by every worker, averaged by the owner of each shard, rounded again; error feedback filtered as LoCo's.

    Args:
        round: [blocks, 64] to what is left of them.
        group: entries that are not cut between owners.
    """

    follows = True

    def __init__(
        self, world: int, round: Callable[[Tensor], Tensor], group: int, order: int = 1, beta: float = 0, reset: int = 0
    ) -> None:
        self.round, self.beta, self.reset, self.step = round, beta, reset, 0
        self.turn = torch.block_diag(*[hadamard(order)] * (64 // order))
        self.shard = -(-ROWS * COLUMNS // (world * group)) * group
        self.errors = torch.zeros(world, ROWS, COLUMNS, dtype=torch.float64)

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        world, entries = len(gradients), ROWS * COLUMNS
        flat = (torch.stack(list(gradients)) + self.errors).view(world, -1)
        flat = torch.nn.functional.pad(flat, (0, world * self.shard - entries))
        turned = flat.view(world, world, -1, 64) @ self.turn  # worker, owner, block
        sent = torch.stack([torch.stack([self.round(part) for part in own]) for own in turned])
        mean = sent.mean(0)
        result = torch.stack([self.round(part) for part in mean])
        unsent = turned - sent
        for owner in range(world):
            unsent[owner, owner] += world * (mean[owner] - result[owner])
        kept = (unsent @ self.turn.mT).view(world, -1)[:, :entries].view_as(self.errors)
        self.errors = self.beta * self.errors + (1 - self.beta) * kept
        self.step += 1
        if self.reset and self.step % self.reset == 0:
            self.errors.zero_()
        return (result @ self.turn.mT).reshape(-1)[:entries].view(ROWS, COLUMNS)


REFERENCES: dict[str, tuple[dict[str, Any], Callable[[int], Reference]]] = {
    "e4m3": ({"method": "quantize", "format": "e4m3"}, lambda world: Rounded(world, to_e4m3, 64)),
    "hadamard": (
        {"method": "quantize", "bits": 4, "hadamard": True},
        lambda world: Rounded(world, to_int4, 128, order=32),
    ),
    "loco": (
        {"method": "quantize", "bits": 4, "error_decay": 0.8, "error_reset_every": 7},
        lambda world: Rounded(world, to_int4, 128, beta=0.8, reset=7),
    ),
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", REFERENCES)
def test_twenty_steps_are_those_of_the_paper(name: str, world: int) -> None:
    settings, reference = REFERENCES[name]
    workers = [EDGCConfig.from_dict(settings).build() for _ in range(world)]
    expected_of = reference(world)
    for step in range(STEPS):
        every = [gradient(step, worker) for worker in range(world)]
        given = [[Gradient("p", each.float())] for each in every]
        reduce_together(workers, given, 4)
        result = expected_of(every)
        kept = torch.stack([worker.kept["p"].double() for worker in workers])
        for found, expected in ((given[0][0].tensor.double(), result), (kept, expected_of.errors)):
            off = (found - expected).abs() > 1e-4 * result.abs().amax()
            assert int(off.sum()) <= 0.05 * off.numel(), (step, int(off.sum()))
        if expected_of.follows:
            expected_of.errors = kept


# Bytes that a rank of W sends for an fp32 matrix of n entries: shares of those of methods.md's table.
BYTES: dict[str, Callable[[int, int, int], float]] = {
    "e4m3": lambda world, m, n: 2 * (world - 1) / world * m * n * (1 + 2 / 64),
    "hadamard": lambda world, m, n: 2 * (world - 1) / world * m * n * (1 / 2 + 2 / 64),
    "loco": lambda world, m, n: 2 * (world - 1) / world * m * n * (1 / 2 + 2 / 64),
}


@pytest.mark.parametrize("world", [2, 4, 8])
def test_bytes_are_those_of_the_formula(world: int) -> None:
    shape = (64, 128)
    for name, formula in BYTES.items():
        workers = [EDGCConfig.from_dict(REFERENCES[name][0]).build() for _ in range(world)]
        given = [[Gradient("p", gradient(0, worker, shape).float())] for worker in range(world)]
        before = [sum(sent.values()) for sent in room(world).sent]
        said = [statistics.bytes for statistics in reduce_together(workers, given, 4)]
        counted = [sum(sent.values()) - was for sent, was in zip(room(world).sent, before, strict=True)]
        assert said == counted == [formula(world, *shape)] * world, name
