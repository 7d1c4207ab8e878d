"""Steps that count or do not: deferred changes of state, loss scales, and means of which a rank needs only a part."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edgc import EDGCConfig
from edgc.compressors import Channel, Compressor, Gradient
from edgc.compressors.powersgd.algorithm import PowerSGD
from edgc.entropy.meter import EntropyMeter
from edgc.sections import EntropyConfig
from tests import examples
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


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.sampled_from([None, 4, 4, 4, 12]), st.booleans()), min_size=1, max_size=6
    )
)
def test_dropped_steps_never_were(method: str, steps: list[tuple[bool, int | None, bool]]) -> None:
    """Steps are (kept, rank, poisoned): with drops and NaN, state and results are those of the kept ones alone."""
    deferred, plain = fresh(method), fresh(method)
    deferred.deferred = True
    for seed, (kept, rank, poisoned) in enumerate(steps):
        before, mine = deferred.state_dict(), gradients(seed)
        if poisoned and not kept:
            mine[0].tensor[1, 1] = math.nan
        deferred.reduce(mine, Channel(None), rank)
        assert same(deferred.state_dict(), before), "a reduction changes nothing before it is settled"
        deferred.settle(kept)
        if kept:
            reference = gradients(seed)
            plain.reduce(reference, Channel(None), rank)
            assert all(torch.equal(m.tensor, r.tensor) for m, r in zip(mine, reference, strict=True))
        assert same(deferred.state_dict(), plain.state_dict())


@pytest.mark.parametrize("method", [name for name in METHODS if name not in examples.DENSE])
def test_error_feedback_follows_a_loss_scale(method: str) -> None:
    scaled, plain, scale = fresh(method), fresh(method), 2.0**16
    scaled.rescale(scale)
    for seed in range(6):
        mine, reference = gradients(seed, scale), gradients(seed)
        scaled.reduce(mine, Channel(None), 4)
        plain.reduce(reference, Channel(None), 4)
        for m, r in zip(mine, reference, strict=True):
            # Powers of two change no other bit, but for what looks at absolute sizes.
            assert torch.allclose(m.tensor / scale, r.tensor, rtol=1e-5, atol=1e-6), (seed, m.name)
        scaled.rescale(0.25)
        scale *= 0.25


@pytest.mark.parametrize("estimator", ["gaussian", "histogram", "vasicek", "released"])
def test_entropy_is_that_of_the_gradient_without_its_loss_scale(estimator: str) -> None:
    def measured(scale: float) -> float:
        entropy = EntropyConfig(estimator=estimator, iteration_rate=1.0, entry_rate=1.0)
        meter = EntropyMeter(EDGCConfig(method="edgc", r_max=8, entropy=entropy))
        meter.scale = scale
        meter.add(1, gradients(3, scale))
        return meter.close().sampled

    assert measured(2.0**12) == pytest.approx(measured(1.0), abs=1e-4)
    assert math.isfinite(measured(1.0))


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
