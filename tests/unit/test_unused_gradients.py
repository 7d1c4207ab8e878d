"""Gradients that backward has not come by: what is owed stays owed, and nothing moves where nobody uses them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from edgc.compressors import Channel, Compressor, Gradient
from edgc.compressors.powersgd.algorithm import PowerSGD
from edgc.runtime.device import masked_path
from tests import examples
from tests.lockstep import reduce_together
from tests.workers import run_workers

METHODS = [name for name in examples.FOUND if name != "edgc"]  # that is powersgd
SHAPES = {"a": (48, 40), "b": (40,), "c": (33, 64), "d": (48, 40)}


def fresh(method: str, **changes: Any) -> Compressor:
    return examples.config_of(method, min_compression_elements=16, **changes).build()


def gradients(seed: int, scale: float = 1.0) -> list[Gradient]:
    generator = torch.Generator().manual_seed(seed)
    return [Gradient(name, scale * torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


KEEPING = [name for name in METHODS if name not in {*examples.DENSE, *examples.UNBIASED}]


def _own(compressor: Compressor) -> Any:
    """What this replica alone has in its state."""
    return {key: part for key, part in compressor.state_dict().items() if key in ("errors", "velocities")}


def _errors(compressor: Compressor) -> dict[str, Tensor]:
    errors = _own(compressor)["errors"]
    return {name: errors.get(name, torch.zeros(shape)).double() for name, shape in SHAPES.items()}


@pytest.mark.parametrize("on", [False, True], ids=["host", "masked"])
@pytest.mark.parametrize("method", KEEPING)
def test_an_unused_gradient_keeps_what_is_owed(method: str, on: bool) -> None:
    """Whoever does not use a parameter: sent + kept stays what came in, and if nobody does, nothing moves."""
    rounded = 3e-2 if "bf16" in method else 2e-5
    workers = [fresh(method) for _ in range(3)]
    for compressor in workers:
        compressor.deferred = True

    def step(seed: int, rank: int | None, unused: Sequence[int], left: float = 0.0) -> list[list[Gradient]]:
        """``left`` is what gradients of before are multiplied by where this step has none."""
        mine = [gradients(10 * seed + worker) for worker in range(3)]
        came = [[examples.came_in(c, g) for g in own] for c, own in zip(workers, mine, strict=True)]
        for worker in unused:
            mine[worker] = [replace(g, tensor=g.tensor * left, unused=True) for g in mine[worker]]
            came[worker] = [gradient.tensor.double() for gradient in mine[worker]]
        owed = [_errors(compressor) for compressor in workers]
        with masked_path(on):
            reduce_together(workers, mine, rank)
        for compressor in workers:
            compressor.settle(True)
        for i, name in enumerate(SHAPES):
            each = zip(workers, owed, came, strict=True)
            sent: Any = sum(o[name] + c[i] - _errors(compressor)[name] for compressor, o, c in each) / 3
            for own in mine:
                assert float((own[i].tensor - sent).abs().max()) < rounded, (seed, name)
        return mine

    for seed in range(3):
        step(seed, 4, ())
    before = [_own(compressor) for compressor in workers]
    for seed, rank in ((3, 4), (4, None)):
        mine = step(seed, rank, (0, 1, 2))
        assert not any(gradient.tensor.any() for own in mine for gradient in own)
        assert all(same(_own(compressor), own) for compressor, own in zip(workers, before, strict=True))
    # What nobody has sent is taken back, since it is still where it was.
    left = [[g.tensor / 2 for g in gradients(50 + worker)] for worker in range(3)]
    step(5, 4, (0, 1, 2), left=0.5)
    for compressor, own, known in zip(workers, left, before, strict=True):
        for name, tensor in zip(SHAPES, own, strict=True):
            compressor.take_back(name, tensor)
            compressor.take_back(name, tensor)  # once
        for name, error in known["errors"].items():
            assert torch.allclose(_errors(compressor)[name], error.double(), atol=rounded), name
    before = [_own(compressor) for compressor in workers]
    step(6, 4, (1,))
    if method in ("powersgd", "powersgd one-sided", "topk", "topk_dgc", "randomk", "randomk_dgc"):
        assert same(_own(workers[1]), before[1]), "other methods' owners of shards keep what rounding the mean cost"
    step(7, 4, (1, 2), left=0.5)
    step(8, 12, ())
    step(9, None, (0,))


# ------------------------------------------------------------------ two ranks

NEEDED = {"a": ((0, 900), (900, 1920)), "c": ((0, 64), (64, 2112)), "d": ((0, 0), (0, 1920))}


def _partly(method: str) -> bool:
    """Rows that a rank needs are those of the whole reconstruction; what it keeps does not depend on them."""
    rank = torch.distributed.get_rank()
    part, whole = fresh(method), fresh(method)
    for step in range(4):
        full = gradients(10 * step + rank)
        some = [Gradient(g.name, g.tensor.clone(), NEEDED[g.name][rank] if g.name in NEEDED else None) for g in full]
        part.reduce(some, Channel(None), 4)
        whole.reduce(full, Channel(None), 4)
        for s, f in zip(some, full, strict=True):
            low, high = s.needed or (0, f.tensor.numel())
            if not torch.equal(s.tensor.view(-1)[low:high], f.tensor.view(-1)[low:high]):
                return False
    return same(part.state_dict(), whole.state_dict())


def _scattered(method: str) -> tuple[bool, bool, float]:
    """Whether this rank's part holds the mean of what was owed, whether nothing is owed any more, and bytes."""
    rank, compressor = torch.distributed.get_rank(), fresh(method)
    buffer = torch.zeros(sum(math.prod(shape) for shape in SHAPES.values()) + 7 & ~1)

    def laid_out(seed: int) -> list[Gradient]:
        place, views = 0, []
        for gradient in gradients(seed):
            size = gradient.tensor.numel()
            view = buffer[place : place + size].view(gradient.tensor.shape)
            views.append(Gradient(gradient.name, view.copy_(gradient.tensor)))
            place += size
        return views

    compressor.reduce(laid_out(rank), Channel(None), 4)
    errors = compressor.state_dict().get("errors", {})
    mine = laid_out(100 + rank)
    owed = buffer.clone()
    for gradient in mine:
        place = gradient.tensor.storage_offset()
        part = owed[place : place + gradient.tensor.numel()]
        part.copy_(examples.came_in(compressor, gradient).reshape(-1))
        if gradient.name in errors:
            part += errors[gradient.name].float().reshape(-1)
    torch.distributed.all_reduce(owed)
    channel = Channel(None, [buffer])
    statistics = compressor.reduce(mine, channel, None)
    half = len(buffer) // 2
    own = slice(rank * half, (rank + 1) * half)
    right = torch.allclose(buffer[own], owed[own] / 2, atol=1e-6)
    drained = not compressor.state_dict().get("errors")
    return right, drained, statistics.bytes / (2 * len(buffer))


def _afterwards(method: str) -> bool:
    """Whether compression goes on after a scattered mean as after an all-reduced one."""
    rank, results = torch.distributed.get_rank(), []
    for shards in (True, False):
        compressor, sent = fresh(method), []
        for step, level in enumerate((4, 4, None, 4, 4)):
            buffer = torch.zeros(48 * 40)
            gradient = Gradient("a", buffer.view(48, 40).copy_(gradients(10 * step + rank)[0].tensor))
            compressor.reduce([gradient], Channel(None, [buffer] if shards else []), level)
            sent.append(Channel(None).own_part(buffer))
        results.append((sent, compressor.state_dict()))
    (one, state), (other, reference) = results
    return all(map(torch.equal, one, other)) and same(state, reference)


def _two_ranks() -> dict[str, Any]:
    low_rank = [method for method in METHODS if isinstance(fresh(method), PowerSGD)]
    return {
        "partly": {method: _partly(method) for method in low_rank},
        "scattered": {method: _scattered(method) for method in METHODS},
        "afterwards": {method: _afterwards(method) for method in METHODS},
    }


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    work: Callable[[], dict[str, Any]] = _two_ranks
    return run_workers(2, work)


def test_only_needed_rows_are_reconstructed_and_nothing_else_changes(both: list[dict[str, Any]]) -> None:
    for rank in both:
        assert rank["partly"] and all(rank["partly"].values()), rank["partly"]


def test_a_dense_reduction_into_shards_scatters_all_that_is_owed(both: list[dict[str, Any]]) -> None:
    for rank in both:
        for method, (right, drained, bytes_per_entry) in rank["scattered"].items():
            assert right and drained, method
            # (W - 1) / W of 4 bytes an entry, with two ranks: 2.
            assert bytes_per_entry == pytest.approx(1.0), method


def test_nothing_of_what_was_scattered_is_sent_again(both: list[dict[str, Any]]) -> None:
    for rank in both:
        assert all(rank["afterwards"].values()), rank["afterwards"]
