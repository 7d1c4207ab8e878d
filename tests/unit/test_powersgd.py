"""PowerSGD beside the contract of all methods: the paper's algorithm, one-sided turns, warm start, spectra,
any matrix, memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from edgc.compressors import Channel, Gradient
from edgc.compressors.powersgd import passes
from edgc.compressors.powersgd.algorithm import PowerSGD
from edgc.compressors.powersgd.simple import SimpleOneSided, SimplePowerSGD
from edgc.compressors.powersgd.state import cut, leading, random_factor
from edgc.errors import UserError
from edgc.runtime.device import masked_path
from tests.lockstep import Twin, reduce_together
from tests.low_rank import power_sgd
from tests.workers import same

SHAPES = [(96, 64), (64, 96), (40, 40), (7, 300), (40, 40), (33,), (3, 5), (1, 50), (2, 3, 4), (0, 4)]
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    **{name: {"factor_dtype": name} for name in ("bf16", "int7", "int6", "int5", "int4")},
    "one-sided": {"one_sided": True},
    "one-sided int4": {"one_sided": True, "factor_dtype": "int4"},
    "bf16 errors": {"error_dtype": "bf16"},
}
both_paths = pytest.mark.parametrize("on_gpu", [False, True])
# What a step may lose of ||M||: rounding of fp32, of sums and means of bf16 factors, of E to bf16.
LOST = {"bf16": 2**-7, "bf16 errors": 2**-8}


def draw(worker: int, step: int, scale: float = 1.0, shapes: Any = SHAPES) -> list[Gradient]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return [Gradient(f"p{i}", scale * torch.randn(s, generator=generator)) for i, s in enumerate(shapes)]


def total(tensors: Any) -> Tensor:
    return torch.cat([tensor.double().reshape(-1) for tensor in tensors])


# --------------------------------------------------------------------- beside other forms


@both_paths
@pytest.mark.parametrize(
    ("world", "options"), [(1, {}), (3, {}), (2, {"orthonormal_q": True}), (2, {"one_sided": True})], ids=str
)
def test_agrees_with_the_papers_algorithm(world: int, options: dict[str, Any], on_gpu: bool) -> None:
    """In fp64: a step of ours is one of ``powersgd/simple.py``, with what it keeps and its norms."""
    shape, rank = (30, 50), 4
    workers = [power_sgd(min_elements=1, **options) for _ in range(world)]
    form = SimpleOneSided if workers[0].one_sided else SimplePowerSGD
    simple = form(random_factor(0, 1, "p0", shape[1], rank).double())
    errors = [torch.zeros(shape, dtype=torch.float64)] * world
    for step in range(10):
        gradients = [draw(w, step, shapes=[shape]) for w in range(world)]
        local = [own[0].tensor.double() for own in gradients]
        inputs = [gradient + error for gradient, error in zip(local, errors, strict=True)]
        mean, errors = simple.reduce(local), simple.errors
        with masked_path(on_gpu):
            statistics = reduce_together(workers, gradients, rank)
        for worker, said, own, error, m in zip(workers, statistics, gradients, errors, inputs, strict=True):
            assert (own[0].tensor - mean).norm() < 1e-4 * mean.norm()
            assert (worker.errors["p0"] - error).norm() < 1e-4 * m.norm()
            assert float(said.error_sq) == pytest.approx(float(error.square().sum()), rel=1e-4)
            assert float(said.input_sq) == pytest.approx(float(m.square().sum()), rel=1e-5)


def test_one_sided_the_known_factor_is_always_orthonormal() -> None:
    with pytest.raises(UserError, match="orthonormal_q"):
        power_sgd(one_sided=True, orthonormal_q=False)


# --------------------------------------------------------------------- what is not finite


def test_an_overflow_in_the_second_message_changes_no_state_either() -> None:
    """64 entries of 1e38 in a column: each of P is finite, a column's sum in Q = M^T P^ is not."""
    compressor = power_sgd(min_elements=64)
    compressor.reduce(draw(0, 0, shapes=[(64, 40)]), Channel(None), 2)
    before = compressor.state_dict()
    huge = Gradient("p0", torch.full((64, 40), 1e38) * torch.sign(compressor.factors["p0"][:, 0]))
    assert torch.isfinite(huge.tensor @ compressor.factors["p0"]).all()
    statistics = compressor.reduce([huge], Channel(None), 2)
    assert statistics.skipped == 1
    assert torch.isnan(huge.tensor).all()
    assert same(before, compressor.state_dict())


@both_paths
@pytest.mark.parametrize("options", [{}, {"factor_dtype": "bf16"}, {"one_sided": True}], ids=str)
def test_a_parameter_without_gradients_for_long_can_have_some_again(options: dict[str, Any], on_gpu: bool) -> None:
    """Its error feedback is sent bit by bit, until what is left is too small for a power of two of fp32 to scale."""
    worker = power_sgd(min_elements=64, **options)
    with masked_path(on_gpu):
        for step in range(130):
            [gradient] = draw(0, step, shapes=[(32, 32)])
            if 3 <= step < 120:
                gradient.tensor.zero_()
            came = gradient.tensor.double()
            statistics = worker.reduce([gradient], Channel(None), 8)
            assert not int(statistics.skipped) and bool(gradient.tensor.isfinite().all()), step
            assert all(bool(factor.isfinite().all()) for factor in worker.factors.values()), step
    got = gradient.tensor.double()
    assert float((got * came).sum() / (got.norm() * came.norm())) > 0.1, "what comes then gets across"


@both_paths
@pytest.mark.parametrize("change", ["rank", "buckets"])
def test_a_step_given_up_after_a_change_leaves_what_a_loss_scale_rescales(change: str, on_gpu: bool) -> None:
    worker = power_sgd(min_elements=64)

    def step(number: int, scale: float, poison: bool = False) -> list[Gradient]:
        [drawn] = draw(0, number, scale=scale, shapes=[(3, 40, 30)])
        gradients = [Gradient(f"p{i}", matrix) for i, matrix in enumerate(drawn.tensor)]  # views of one bucket
        if poison:
            gradients[0].tensor[0, 0] = math.inf
        rank = 6 if change == "rank" and number else 4
        split = change == "buckets" and number == 0
        parts = [gradients[:1], gradients[1:]] if split else [gradients]
        given_up = [int(reduce_together([worker], [part], rank, settle=False)[0].skipped) for part in parts]
        worker.settle(not any(given_up))
        assert any(given_up) == poison
        return gradients

    with masked_path(on_gpu):
        step(0, 1024.0)
        step(1, 1024.0, poison=True)
        owed = {name: error.double() / 1024 for name, error in worker.errors.items()}
        worker.rescale(0.5)
        gradients = step(2, 0.0)
    for gradient in gradients:
        left = (worker.errors[gradient.name].double() + gradient.tensor.double()) / 512
        assert float((left - owed[gradient.name]).norm()) < 1e-5 * float(owed[gradient.name].norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_never_more_bytes_than_the_gradients_own(dtype: torch.dtype) -> None:
    """bf16 gradients have half the bytes of fp32 factors' matrices. (What factors take: ``test_contract.py``.)"""
    for (factors, bits), rank in product((("fp32", 32), ("bf16", 16), ("int6", 6.25)), (20, 28, 32)):
        worker = power_sgd(min_elements=64, factor_dtype=factors)
        [gradient] = draw(0, 0, shapes=[(64, 64)])
        statistics = worker.reduce([Gradient("p", gradient.tensor.to(dtype))], Channel(None), rank)
        assert statistics.compressed == (bits * rank * 128 < 8 * dtype.itemsize * 64 * 64), (factors, rank)


# --------------------------------------------------------------------- state


@pytest.mark.parametrize("steps", [3, 4])  # either side is the next
def test_a_one_sided_state_can_go_on_with_both_factors(steps: int) -> None:
    first = power_sgd(min_elements=64, one_sided=True)
    for step in range(steps):
        first.reduce(draw(0, step), Channel(None), 4)
    second = power_sgd(min_elements=64)
    second.load_state_dict(first.state_dict())
    owed = total(second.errors[name] for name in sorted(second.errors))
    assert bool(owed.any())
    second.reduce(draw(0, steps), Channel(None), 4)
    assert all(bool(error.isfinite().all()) for error in second.errors.values())


def test_a_state_of_another_model_is_refused() -> None:
    first, second = power_sgd(min_elements=64), power_sgd(min_elements=64)
    first.reduce(draw(0, 0, shapes=[(40, 50)]), Channel(None), 4)
    second.load_state_dict(first.state_dict())
    with pytest.raises(UserError, match=r"error feedback of p0 is \(40, 50\), its gradient \(50, 40\)"):
        second.reduce(draw(0, 0, shapes=[(50, 40)]), Channel(None), 4)


def test_neither_buckets_nor_their_order_matter() -> None:
    """As after a bucket rebuild: state belongs to a name, and so do the first random columns.

    In between one matrix came alone, and those beside it not at all, as what was not used.
    """
    together, apart = power_sgd(min_elements=64), power_sgd(min_elements=64)
    for step in range(7):
        one, other = draw(0, step), draw(0, step)
        if step == 3:
            one, other = one[1:2], other[1:2]
        together.reduce(one, Channel(None), 4)
        cut = step % 4 + 1
        for part in (other[cut:], other[:cut]):
            apart.reduce(part, Channel(None), 4)
        assert torch.equal(total(g.tensor for g in one), total(g.tensor for g in other))
    assert same(together.state_dict(), apart.state_dict())
    # The workspaces of cuts and ranks that are gone are gone as well.
    assert len({id(work) for work in apart._workspaces.values()}) == 2
    apart.reduce(draw(0, 9), Channel(None), 8)
    assert len({id(work) for work in apart._workspaces.values()}) == 1


# --------------------------------------------------------------------- warm start


def alone(compressor: PowerSGD, matrix: Tensor, rank: int | None) -> float:
    """One step on a single worker; returns the relative error of M."""
    statistics = compressor.reduce([Gradient("w", matrix.clone())], Channel(None), rank)
    return statistics.worker_error or 0.0


def spectrum(values: Tensor, rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    u = torch.linalg.qr(torch.randn(rows, len(values), generator=generator)).Q
    v = torch.linalg.qr(torch.randn(columns, len(values), generator=generator)).Q
    return u * values @ v.T


@pytest.mark.parametrize("one_sided", [False, True])
def test_a_rank_change_keeps_the_warm_start(one_sided: bool) -> None:
    values = 2.0 ** -torch.arange(16.0)
    matrix = spectrum(values, 64, 80)
    compressor, cold = (power_sgd(error_feedback=False, one_sided=one_sided) for _ in range(2))
    for _ in range(20):
        alone(compressor, matrix, 8)
    best_4 = float(values[4:].norm() / values.norm())
    best_8 = float(values[8:].norm() / values.norm())
    assert alone(compressor, matrix, 4) == pytest.approx(best_4, rel=1e-3)
    assert alone(cold, matrix, 4) > 1.2 * best_4, "the bound above must be out of reach cold"
    for _ in range(20):
        alone(compressor, matrix, 8)
    assert alone(compressor, matrix, 12) < 1.05 * best_8, "growing must not lose what was known"


@pytest.mark.parametrize("one_sided", [False, True])
def test_a_zero_gradient_does_not_end_the_warm_start(one_sided: bool) -> None:
    matrix = spectrum(torch.tensor([1.0, 0.5, 0.25]), 40, 60)
    compressor = power_sgd(error_feedback=False, one_sided=one_sided)
    for _ in range(5):
        alone(compressor, matrix, 4)
    before = compressor.state_dict()
    alone(compressor, torch.zeros(40, 60), 4)
    assert same(before, compressor.state_dict())
    assert alone(compressor, matrix, 4) < 1e-5


# --------------------------------------------------------------------- statistics


@pytest.mark.parametrize("key", ["fp32", "bf16", "int6", "one-sided int4", "bf16 errors"])
@both_paths
def test_spectra(key: str, on_gpu: bool) -> None:
    shapes = {"p0": (40, 60), "p1": (60, 40), "p2": (60, 40), "p3": (8,)}
    workers = [power_sgd(min_elements=64, **OPTIONS[key]) for _ in range(2)]
    for step in range(4):
        gradients = [draw(w, step, shapes=shapes.values()) for w in range(2)]
        with masked_path(on_gpu):
            reduce_together(workers, gradients, 5)
        for worker, own in zip(workers, gradients, strict=True):
            spectra = worker.spectra()
            assert list(spectra) == ["p0", "p1", "p2"] and list(worker.spectra({"p1", "other"})) == ["p1"]
            for gradient in own[:3]:
                item, mean = spectra[gradient.name], gradient.tensor.double()  # what all workers have now
                assert item.shape == shapes[gradient.name]
                assert item.singular_sq == pytest.approx(torch.linalg.svdvals(mean).square()[:5].tolist(), rel=1e-3)
                assert item.singular_sq == workers[0].spectra()[gradient.name].singular_sq, "the same bits"
                sent_sq = worker.sent_sq(gradient.name)
                assert sent_sq is not None
                assert float(sent_sq) == pytest.approx(float(mean.square().sum()), rel=1e-5)
                kept_sq = float(worker.errors[gradient.name].double().square().sum())
                rest = item.input_sq - sum(item.singular_sq)
                assert rest == pytest.approx(kept_sq, rel=0.05), "what this worker's own approximation leaves"
    reduce_together(workers, [draw(w, 5, shapes=shapes.values()) for w in range(2)], None)
    assert workers[0].spectra() == {}, "nothing was compressed last"


# --------------------------------------------------------------------- any input


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    rank=st.integers(1, 80),
    exponent=st.integers(-30, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    on_gpu=st.booleans(),
    filled=st.sampled_from(["random", "transposed", "zero", "one column", "ones"]),
    key=st.sampled_from([key for key in OPTIONS if key != "one-sided int4"]),
    world=st.integers(1, 2),
)
@mock.patch.multiple(passes, _BLOCK=1000, _ROWS=7)  # several blocks in a matrix, the last one shorter
def test_any_matrix(
    shape: tuple[int, int],
    rank: int,
    exponent: int,
    dtype: torch.dtype,
    on_gpu: bool,
    filled: str,
    key: str,
    world: int,
) -> None:
    exponent = max(-2, min(3, exponent)) if dtype == torch.float16 else exponent
    workers = [power_sgd(min_elements=1, always_factor=True, **OPTIONS[key]) for _ in range(world)]
    for step in range(3):
        views = []
        for worker in range(world):
            matrix = draw(worker, step, shapes=[shape])[0].tensor
            if filled == "one column":
                matrix[:, 1:] = 0
            elif filled in ("zero", "ones"):
                matrix.fill_(filled == "ones")
            matrix = (matrix * 10.0**exponent).to(dtype)
            views.append(matrix.T if filled == "transposed" else matrix)
        inputs = [v.double() + w.errors.get("w", torch.zeros(())).double() for v, w in zip(views, workers, strict=True)]
        with masked_path(on_gpu):
            reduce_together(workers, [[Gradient("w", view)] for view in views], rank)
        outputs = [view.double() for view in views]
        assert all(torch.isfinite(o).all() and torch.equal(o, outputs[0]) for o in outputs)
        after = sum(w.errors.get("w", torch.zeros(())).double() for w in workers) / world
        norm = max(m.norm() for m in inputs)
        # A vector is not factored and has no error feedback, so its rounding is lost.
        lost = 2**-8 if dtype != torch.float32 and min(shape) == 1 else LOST.get(key, 4e-6)
        # Below this nothing of a quantised or bf16 factor is left in its exponents.
        assert (outputs[0] + after - sum(inputs) / world).norm() <= lost * norm + 1e-37


# --------------------------------------------------------------------- over many steps

WORLD, SHAPE, RANK = 4, (16, 24), 2


def gradients_of(step: int) -> Tensor:
    """Of all workers: something in common, and noise of each worker's own, [W, m, n]."""
    generator = torch.Generator().manual_seed(step)
    common = torch.randn(SHAPE[0], 3, generator=generator) @ torch.randn(3, SHAPE[1], generator=generator)
    return 0.5 * common + torch.randn(WORLD, *SHAPE, generator=generator)


@pytest.mark.parametrize("options", [{}, {"error_dtype": "bf16"}, {"factor_dtype": "int4"}], ids=str)
def test_what_is_kept_stays_within_a_constant_of_the_gradient(options: dict[str, Any]) -> None:
    workers, ratios = [power_sgd(min_elements=1, **options) for _ in range(WORLD)], []
    for step in range(300):
        statistics = reduce_together(workers, [[Gradient("w", gradient)] for gradient in gradients_of(step)], RANK)
        ratios.append(sum(float(s.error_sq) for s in statistics) / sum(float(s.gradient_sq) for s in statistics))
    early, late = fmean(ratios[100:200]), fmean(ratios[200:])
    assert late == pytest.approx(early, rel=0.15)
    # A direction waits for its turn: about min(m, n) / r steps.
    assert max(ratios) < 4 * min(SHAPE) / RANK


# --------------------------------------------------------------------- memory


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
    compressor, channel = power_sgd(min_elements=64, **options), Twin()
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
        ({"factor_dtype": "int4"}, torch.float32),
        ({"one_sided": True}, torch.float32),
    ],
    ids=str,
)
def test_steady_state_allocates_nothing(tmp_path: Path, options: dict[str, Any], dtype: torch.dtype) -> None:
    assert largest_allocation(tmp_path, steady_state(dtype, options)) <= ALLOWED
    assert largest_allocation(tmp_path, lambda: torch.empty(ALLOWED + 1, dtype=torch.uint8)) > ALLOWED


def test_a_renewed_warm_start_is_cut_to_the_leading_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(rows, 12, generator=generator)).Q for rows in (40, 30))
    matrix = left @ torch.diag(0.5 ** torch.arange(12.0)) @ right.mT
    kept = cut(leading(matrix, 8, torch.randn(30, 12, generator=generator)), 3)
    assert torch.linalg.matrix_norm(kept - right[:, :3] @ (right[:, :3].mT @ kept)) < 1e-4
