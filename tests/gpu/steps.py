"""Steps of several simulated workers with one compressor each, on any device, with everything that a test may ask."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from edgc.compressors import Compressor, Gradient, Statistics
from edgc.compressors.sizes import FACTOR_BITS
from edgc.config import EDGCConfig
from edgc.runtime.device import masked_path
from tests import examples
from tests.lockstep import reduce_together

CPU = torch.device("cpu")
SMALLEST = 64
# Two of one shape lie beside each other, as they are batched on a GPU; a wide one, a tall one, one whose rank is
# limited by its columns; what goes dense lies between and behind them.
SHAPES: tuple[tuple[int, ...], ...] = ((40, 24), (40, 24), (17,), (24, 96), (130, 9), (3, 5), (31,))
# Growing, shrinking, above the smaller side of a matrix, uncompressed for a step, and back.
RANKS: tuple[int | None, ...] = (4, 4, 8, 12, 3, None, 4, 4)

FACTORED = {
    f"powersgd {factors}{' one-sided' if one_sided else ''}": {
        "method": "powersgd",
        "rank": 4,
        "factor_dtype": factors,
        "one_sided": one_sided,
    }
    for factors in FACTOR_BITS
    for one_sided in (False, True)
}
ENTRYWISE = {name: examples.settings_of(name) for name in examples.ENTRYWISE}
CASES: dict[str, dict[str, Any]] = {
    **{name: examples.settings_of(name) for name in examples.DENSE},
    **FACTORED,
    "powersgd, errors in bf16": {"method": "powersgd", "rank": 4, "error_dtype": "bf16"},
    "powersgd int8, errors in bf16": {
        "method": "powersgd",
        "rank": 4,
        "factor_dtype": "int8",
        "error_dtype": "bf16",
    },
    "powersgd, cold start": {"method": "powersgd", "rank": 4, "warm_start": False},
    "edgc": {"method": "edgc", "policy": "fixed", "rank": 4},
    **ENTRYWISE,
}
STATELESS = (*examples.DENSE, *examples.UNBIASED)
COUNTING = examples.COUNTING


def compressors(name: str, world: int, deferred: bool = False) -> list[Compressor]:
    """One for each worker."""
    config = EDGCConfig.from_dict({**CASES[name], "min_compression_elements": SMALLEST, "seed": 3})
    made = [config.build() for _ in range(world)]
    for compressor in made:
        compressor.deferred = deferred
    return made


def gradients(
    step: int, worker: int, device: torch.device, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> list[Gradient]:
    """Views of one flat buffer: what the workers have in common, of low rank, and noise of each its own.

    The same numbers on every device.
    """
    common, own = (
        torch.Generator().manual_seed(step),
        torch.Generator().manual_seed(1000 + 10 * step + worker),
    )
    parts = []
    for shape in SHAPES:
        part = 0.3 * torch.randn(shape, generator=own)
        if len(shape) == 2:
            left, right = (torch.randn(side, 4, generator=common) for side in shape)
            part += left @ right.mT
        parts.append(scale * part)
    flat = torch.cat([part.reshape(-1) for part in parts]).to(device, dtype)
    views = flat.split([part.numel() for part in parts])
    return [Gradient(f"p{i}", view.view(shape)) for i, (view, shape) in enumerate(zip(views, SHAPES, strict=True))]


def tensors(of: Sequence[Gradient]) -> list[Tensor]:
    """Copies on the CPU, in fp64."""
    return [gradient.tensor.detach().to(CPU, torch.float64, copy=True) for gradient in of]


def kept(compressor: Compressor) -> dict[str, Tensor]:
    """Error feedback by name, on the CPU, in fp64."""
    errors: dict[str, Tensor] = compressor.state_dict().get("errors", {})
    return {name: tensor.to(CPU, torch.float64) for name, tensor in errors.items()}


def kept_mean(workers: Sequence[Compressor]) -> list[Tensor]:
    """Mean error feedback over the workers, for every gradient; zeros where there is none."""
    each = [kept(worker) for worker in workers]
    return [
        sum((errors[f"p{i}"] for errors in each if f"p{i}" in errors), torch.zeros(shape, dtype=torch.float64))
        / len(workers)
        for i, shape in enumerate(SHAPES)
    ]


def norm(parts: Sequence[Tensor]) -> float:
    return float(torch.stack([part.norm() for part in parts]).norm())


@dataclass
class Course:
    """What several steps did.

    Attributes:
        sent: what is in the buffers of worker 0 after every step.
        replicas_equal: whether those of all workers were the same, bit for bit, after every step.
        lost: norm of mean(before) - mean(after), error feedback included, over that of the gradients, by step.
        error: what the mean lacks by step, as a share of the mean of what came in.
        statistics: of worker 0, by step.
    """

    sent: list[list[Tensor]] = field(default_factory=list)
    replicas_equal: bool = True
    lost: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    statistics: list[Statistics] = field(default_factory=list)


def step_of(
    workers: Sequence[Compressor], given: Sequence[Sequence[Gradient]], rank: int | None, course: Course
) -> None:
    """One reduction; ``given`` is overwritten."""
    came_in = [[examples.came_in(worker, g) for g in own] for worker, own in zip(workers, given, strict=True)]
    before = [sum(parts) / len(workers) for parts in zip(*came_in, strict=True)]
    # What a bf16 buffer rounds is measured against what came in.
    size = max(norm(tensors(own)) for own in given)
    owed = [mean + error for mean, error in zip(before, kept_mean(workers), strict=True)]
    statistics = reduce_together(workers, given, rank)
    for worker in workers:
        worker.settle(True)
    after, *others = (tensors(own) for own in given)
    same = all(torch.equal(a, b) for other in others for a, b in zip(after, other, strict=True))
    course.replicas_equal &= same
    paid = [got + error for got, error in zip(after, kept_mean(workers), strict=True)]
    course.lost.append(norm([a - b for a, b in zip(owed, paid, strict=True)]) / max(size, 1e-300))
    course.error.append(norm([a - b for a, b in zip(owed, after, strict=True)]) / max(norm(owed), 1e-300))
    course.sent.append(after)
    course.statistics.append(statistics[0])


def run(
    workers: Sequence[Compressor],
    device: torch.device,
    ranks: Sequence[int | None] = RANKS,
    first: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Course:
    """Steps ``first``, ``first + 1``, ... with these ranks."""
    course = Course()
    for step, rank in enumerate(ranks, first):
        step_of(workers, [gradients(step, w, device, dtype) for w in range(len(workers))], rank, course)
    return course


def on_cpu(name: str, world: int, **options: Any) -> Course:
    """The same steps where the host decides."""
    with masked_path(False):
        return run(compressors(name, world), CPU, **options)


def as_saved(state: dict[str, Any], to: torch.device | None) -> dict[str, Any]:
    """A state after a way through a file; ``to``: where its tensors are put, None where they were."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, map_location=to, weights_only=False)
    return loaded
