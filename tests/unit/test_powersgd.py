"""The compressor's contract, on real gloo groups of 1, 2 and 4 workers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from edgc.compressors import Channel, Gradient, NoCompression, PowerSGD
from edgc.compressors.powersgd import saves_bytes
from tests.workers import run_workers

SHAPES = [(96, 64), (64, 96), (40, 40), (7, 300), (33,), (3, 5), (1, 50), (2, 3, 4)]


def draw(worker: int, step: int, scale: float = 1.0, shapes: Any = SHAPES) -> list[Gradient]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return [Gradient(f"p{i}", scale * torch.randn(s, generator=generator)) for i, s in enumerate(shapes)]


def total(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.double().reshape(-1) for tensor in tensors])


# --------------------------------------------------------------------- what each worker does in a launch


def conservation(ranks: list[int | None], scale: float) -> list[dict[str, Any]]:
    """Steps with changing ranks; returns what came in, what the buffers hold and what is kept, per step."""
    me = dist.get_rank()
    compressor, channel = PowerSGD(min_elements=64), Channel(None)
    records = []
    for step, rank in enumerate(ranks):
        gradients = draw(me, step, scale)
        before = {name: error.clone() for name, error in compressor.errors.items()}
        inputs = [g.tensor.double() + before.get(g.name, torch.zeros(())).double() for g in gradients]
        statistics = compressor.reduce(gradients, channel, rank)
        kept = [compressor.errors.get(g.name, torch.zeros_like(g.tensor)) for g in gradients]
        records.append(
            {
                "input": total(inputs),
                "output": total(g.tensor for g in gradients),
                "kept": total(kept),
                "bytes": statistics.bytes,
                "relative_error": statistics.relative_error,
            }
        )
    return records


def recorded_bytes(rank: int | None) -> tuple[int, int]:
    """Bytes the compressor counted and bytes that went through torch.distributed."""
    seen = 0
    original = dist.all_reduce

    def recording(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        # A ring all-reduce between two ranks sends the tensor once.
        seen += tensor.numel() * tensor.element_size()
        return original(tensor, *args, **kwargs)

    dist.all_reduce = recording
    try:
        channel = Channel(None)
        statistics = PowerSGD(min_elements=64).reduce(draw(dist.get_rank(), 0), channel, rank)
    finally:
        dist.all_reduce = original
    assert channel.bytes == statistics.bytes
    return statistics.bytes, seen


def against_dense(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Full-rank factors against the exact mean, summed over steps."""
    me = dist.get_rank()
    shapes = [(24, 40), (40, 24), (32, 32)]
    compressor, channel = PowerSGD(min_elements=1, always_factor=True), Channel(None)
    low, exact = [], []
    for step in range(steps):
        compressed, dense = draw(me, step, shapes=shapes), draw(me, step, shapes=shapes)
        compressor.reduce(compressed, channel, 40)
        NoCompression().reduce(dense, channel, None)
        low.append(total(g.tensor for g in compressed))
        exact.append(total(g.tensor for g in dense))
    return torch.stack(low), torch.stack(exact)


def reference_steps(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours against the same algorithm written in float64 for all workers in one place."""
    me, world, shape, rank = dist.get_rank(), dist.get_world_size(), (30, 50), 4
    compressor, channel = PowerSGD(min_elements=1), Channel(None)
    q: torch.Tensor | None = None
    errors = [torch.zeros(shape, dtype=torch.float64) for _ in range(world)]
    ours, theirs = [], []
    for step in range(steps):
        gradients = draw(me, step, shapes=[shape])
        if q is None:
            probe = PowerSGD(min_elements=1)
            q = probe._start("p0", gradients[0].tensor, rank).double()
        compressor.reduce(gradients, channel, rank)
        ours.append(gradients[0].tensor.double())
        inputs = [draw(w, step, shapes=[shape])[0].tensor.double() + errors[w] for w in range(world)]
        p = torch.linalg.qr(sum(m @ q for m in inputs) / world).Q
        own = [m.T @ p for m in inputs]
        q = sum(own) / world
        errors = [m - p @ f.T for m, f in zip(inputs, own, strict=True)]
        theirs.append(p @ q.T)
    return torch.stack(ours), torch.stack(theirs)


def resumed(cut: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last output of an undisturbed run, and of one that was saved and loaded at ``cut``."""
    me, channel = dist.get_rank(), Channel(None)
    ranks = [4, 4, 8, 8, 4, 12, 12, None, 8, 8]

    def run(compressor: PowerSGD, start: int, stop: int) -> torch.Tensor:
        output = torch.zeros(())
        for step in range(start, stop):
            gradients = draw(me, step)
            compressor.reduce(gradients, channel, ranks[step % len(ranks)])
            output = total(g.tensor for g in gradients)
        return output

    undisturbed = run(PowerSGD(min_elements=64, seed=3), 0, steps)
    first = PowerSGD(min_elements=64, seed=3)
    run(first, 0, cut)
    second = PowerSGD(min_elements=64, seed=3)
    second.load_state_dict(first.state_dict())
    return undisturbed, run(second, cut, steps)


# --------------------------------------------------------------------- tests


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e15])
def test_sent_plus_kept_is_what_came_in(world: int, scale: float) -> None:
    results = run_workers(world, conservation, [8, 8, 4, 12, None, 6, 6], scale)
    for step in range(7):
        records = [result[step] for result in results]
        for record in records[1:]:
            assert torch.equal(record["output"], records[0]["output"]), "replicas differ"
        came_in = sum(record["input"] for record in records) / world
        kept = sum(record["kept"] for record in records) / world
        gap = (records[0]["output"] + kept - came_in).norm() / came_in.norm()
        assert gap < 1e-6, f"step {step}: {gap}"
        assert all(torch.isfinite(record["output"]).all() for record in records)
    assert (results[0][4]["kept"] == 0).all(), "an uncompressed step must drain the error feedback"


@pytest.mark.parametrize("rank", [None, 1, 4, 16])
def test_counted_bytes_are_the_bytes_that_were_sent(rank: int | None) -> None:
    for counted, seen in run_workers(2, recorded_bytes, rank):
        assert counted == seen
        elements = sum(
            rank * sum(shape)
            if rank is not None
            and len(shape) == 2
            and math.prod(shape) >= 64
            and min(shape) > 1
            and saves_bytes(shape, rank)
            else math.prod(shape)
            for shape in SHAPES
        )
        assert counted == 4 * elements


@pytest.mark.parametrize("world", [2, 4])
def test_full_rank_equals_no_compression(world: int) -> None:
    for low, exact in run_workers(world, against_dense, 5):
        assert ((low - exact).norm(dim=1) / exact.norm(dim=1)).max() < 1e-5


@pytest.mark.parametrize("world", [2, 3])
def test_agrees_with_a_float64_reference(world: int) -> None:
    for ours, theirs in run_workers(world, reference_steps, 10):
        assert ((ours - theirs).flatten(1).norm(dim=1) / theirs.flatten(1).norm(dim=1)).max() < 1e-4


@pytest.mark.parametrize("cut", [3, 7])
def test_resume_equals_never_stopped(cut: int) -> None:
    for undisturbed, continued in run_workers(2, resumed, cut, 10):
        assert torch.equal(undisturbed, continued)


def alone(compressor: PowerSGD, matrix: torch.Tensor, rank: int | None) -> float:
    """One step on a single worker; returns the relative error of M."""
    statistics = compressor.reduce([Gradient("w", matrix.clone())], Channel(None), rank)
    return statistics.relative_error or 0.0


def spectrum(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    u = torch.linalg.qr(torch.randn(rows, len(values), generator=generator)).Q
    v = torch.linalg.qr(torch.randn(columns, len(values), generator=generator)).Q
    return u * values @ v.T


def test_a_rank_change_keeps_the_warm_start() -> None:
    values = 2.0 ** -torch.arange(16.0)
    matrix = spectrum(values, 64, 80)
    compressor = PowerSGD(error_feedback=False)
    for _ in range(10):
        alone(compressor, matrix, 8)
    best_4 = float(values[4:].norm() / values.norm())
    best_8 = float(values[8:].norm() / values.norm())
    assert alone(compressor, matrix, 4) == pytest.approx(best_4, rel=1e-3)
    assert alone(PowerSGD(error_feedback=False), matrix, 4) > 1.2 * best_4, (
        "the bound above must be out of reach cold"
    )
    for _ in range(10):
        alone(compressor, matrix, 8)
    assert alone(compressor, matrix, 12) < 1.05 * best_8, "growing must not lose what was known"


def test_a_zero_gradient_does_not_end_the_warm_start() -> None:
    matrix = spectrum(torch.tensor([1.0, 0.5, 0.25]), 40, 60)
    compressor = PowerSGD(error_feedback=False)
    for _ in range(5):
        alone(compressor, matrix, 4)
    alone(compressor, torch.zeros(40, 60), 4)
    assert alone(compressor, matrix, 4) < 1e-3


def test_without_warm_start_or_error_feedback_nothing_is_kept() -> None:
    compressor = PowerSGD(error_feedback=False, warm_start=False)
    alone(compressor, torch.randn(40, 60), 4)
    assert compressor.state_dict()["errors"] == {} and compressor.state_dict()["factors"] == {}


def test_rank_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        alone(PowerSGD(), torch.randn(40, 60), 0)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    rank=st.integers(1, 80),
    exponent=st.integers(-30, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    transposed=st.booleans(),
)
def test_any_matrix(
    rows: int, columns: int, rank: int, exponent: int, dtype: torch.dtype, transposed: bool
) -> None:
    generator = torch.Generator().manual_seed(rows * 71 + columns)
    matrix = (torch.randn(rows, columns, generator=generator) * 10.0**exponent).to(dtype)
    view = matrix.T if transposed else matrix
    came_in = view.float().clone()
    compressor = PowerSGD(min_elements=1, always_factor=True)
    compressor.reduce([Gradient("w", view)], Channel(None), rank)
    kept = compressor.errors.get("w", torch.zeros_like(came_in))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert torch.isfinite(view.float()).all()
    assert (view.float() + kept - came_in).double().norm() <= tolerance * came_in.double().norm()
