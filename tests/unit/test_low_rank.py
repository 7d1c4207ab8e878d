"""The passes over matrices against plain float64, block by block and batched; squared norms at any scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edgc.compressors import Gradient
from edgc.compressors.base import square_sum, square_sums
from edgc.compressors.powersgd import passes as module
from edgc.compressors.powersgd.passes import Batched, Group, RowBlocks, batch_view

BOTH = pytest.mark.parametrize("passes", [RowBlocks, Batched])
OK = torch.tensor(True)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in matrices of a test's size, the last one shorter."""
    monkeypatch.setattr(module, "_BLOCK", 1000)
    monkeypatch.setattr(module, "_ROWS", 7)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrices(count: int, rows: int, columns: int, rank: int, error_dtype: torch.dtype | None = torch.float32) -> Group:
    error = None if error_dtype is None else draw(count, rows, columns, seed=1).to(error_dtype)
    return Group([f"w{i}" for i in range(count)], (rows, columns), rank, error)


def named(x: Group, tensors: list[Tensor]) -> list[Gradient]:
    return [Gradient(name, tensor) for name, tensor in zip(x.names, tensors, strict=True)]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((a.double() - b.double()).norm() <= tolerance * b.double().norm())


@BOTH
@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 3),
    rows=st.integers(1, 60),
    columns=st.integers(1, 60),
    rank=st.integers(1, 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    error_dtype=st.sampled_from([None, torch.float32, torch.bfloat16]),
    layout=st.sampled_from(["flat", "apart", "transposed"]),
)
def test_a_reduction_of_one_worker(
    passes: Any,
    count: int,
    rows: int,
    columns: int,
    rank: int,
    dtype: torch.dtype,
    error_dtype: torch.dtype | None,
    layout: str,
) -> None:
    x = matrices(count, rows, columns, min(rank, rows, columns), error_dtype)
    gradient = draw(count, rows, columns, seed=2).to(dtype)
    came_in = gradient.double().clone()
    gradients = list(gradient)
    if layout == "apart":
        gradients = [g.clone() for g in gradients]
    if layout == "transposed":
        gradients = [g.T.contiguous().T for g in gradients]
    before = x.error.double() if x.error is not None else torch.zeros(())
    m = came_in + before
    right = draw(count, x.rank, columns, seed=3)
    left = torch.empty(count, rows, x.rank)
    run = passes()
    run.load([x], [named(x, gradients)], [right], [left])
    if dtype != torch.float32:
        assert not x.in_place
    elif layout == "flat":
        assert x.in_place
    assert x.in_place == (x.m.data_ptr() == gradients[0].data_ptr())
    assert close(x.m, m)
    assert close(x.gradient_sq, came_in.square().sum((1, 2)))
    assert close(x.input_sq, m.square().sum((1, 2)))
    assert close(left, m @ right.mT.double())
    basis = torch.linalg.qr(left).Q
    own = torch.empty(count, x.rank, columns)
    run.right_factor(x, basis, own)
    assert close(own, basis.mT.double() @ m)
    if x.error is not None:
        assert torch.equal(x.error.double(), before), "E must not change before it is stored"
    # Another mean than this worker's own factor.
    mean = own + 0.1 * draw(count, x.rank, columns, seed=4)
    error_sq = (x.input_sq - square_sums(own)).clamp(min=0)
    [exact] = run.store([x], [(basis, own)], [(basis, mean.clone())], [error_sq], OK)
    result = torch.stack([g.double() for g in gradients])
    assert close(result, basis.double() @ mean.double(), 2e-2 if dtype.itemsize == 2 else 1e-5)
    error = m - basis.double() @ own.double()
    assert float((exact - error.square().sum((1, 2))).abs().max()) < 1e-4 * float(m.square().sum())
    if x.error is not None:
        # Also what the type of the gradient could not hold of the mean.
        kept = error + basis.double() @ mean.double() - result
        tolerance = 4e-6 if error_dtype == torch.float32 else 2**-8
        assert float((x.error.double() - kept).norm()) <= tolerance * float(m.norm() + result.norm())


def test_small_errors_are_measured_and_not_a_difference() -> None:
    left, right = torch.linalg.qr(draw(50, 3)).Q, 10 * draw(3, 40)
    noise = 1e-4 * draw(50, 40, seed=5)
    x = Group(["w"], (50, 40), 3, torch.zeros(1, 50, 40))
    basis = left[None]
    run = RowBlocks()
    run.load([x], [named(x, [left @ right + noise])], [None], [None])
    own = torch.empty(1, 3, 40)
    run.right_factor(x, basis, own)
    truth = float((noise - left @ (left.T @ noise)).double().square().sum())
    known = (x.input_sq - square_sums(own)).clamp(min=0)
    [exact] = run.store([x], [(basis, own)], [(basis, own)], [known], OK)
    assert float(exact) == pytest.approx(truth, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("error_dtype", [torch.float32, torch.bfloat16])
def test_not_finite_on_a_gpu_leaves_the_error_and_ruins_the_gradient(
    dtype: torch.dtype, error_dtype: torch.dtype
) -> None:
    x = matrices(2, 20, 30, 2, error_dtype)
    assert x.error is not None
    before = x.error.clone()
    gradient = draw(2, 20, 30).to(dtype)
    gradient[1, 3, 4] = torch.inf
    basis, own = draw(2, 20, 2), draw(2, 2, 30)
    run = Batched()
    run.load([x], [named(x, list(gradient))], [own], [basis])
    broken = torch.full_like(own, torch.nan)  # as the algorithm makes what it was told is not finite
    run.store([x], [(basis, own)], [(draw(2, 20, 2), broken)], [torch.zeros(2)], torch.tensor(False))
    assert torch.equal(x.error, before)
    assert torch.isnan(gradient).all()


def test_what_a_narrow_gradient_cannot_hold_is_clamped_and_kept() -> None:
    for run in (RowBlocks(), Batched()):
        x = Group(["w"], (4, 4), 1, torch.zeros(1, 4, 4))
        gradient = torch.zeros(4, 4, dtype=torch.float16)
        run.load([x], [named(x, [gradient])], [None], [None])
        large = (torch.full((1, 4, 1), 1e3), torch.full((1, 1, 4), 1e3))
        run.store([x], [large], [large], [torch.zeros(1)], OK)
        assert x.error is not None
        assert (gradient == 65504).all()
        assert (x.error == 0 + -1e6 + 1e6 - 65504).all()


def test_batch_view() -> None:
    flat = draw(100)
    even = [flat[start : start + 6].view(2, 3) for start in (4, 14, 24)]
    view = batch_view(even)
    assert view is not None
    view += 1
    assert all(torch.equal(part, whole) for part, whole in zip(even, view, strict=True))
    assert batch_view(even[::-1]) is None
    assert batch_view([even[0], even[2], flat[40:46].view(2, 3)]) is None
    assert batch_view([flat[0:6].view(2, 3), flat[3:9].view(2, 3)]) is None, "they overlap"
    assert batch_view([flat[0:6].view(2, 3), draw(2, 3)]) is None
    assert batch_view([flat[0:6].view(3, 2).T]) is None
    assert batch_view([flat[0:6].view(2, 3).double()]) is None


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-20, 1e-12, 1.0, 1e15, 1e19, 1e30])
@pytest.mark.parametrize("size", [1, 1000, 300_000])
def test_squared_norms_at_any_scale(scale: float, size: int) -> None:
    x = draw(size, seed=size) * scale
    expected = float(x.double().square().sum())
    assert square_sum(x) == pytest.approx(expected, rel=2e-6)
    both = torch.stack([x, torch.zeros(size)]).view(2, size, 1)
    for batch in (both, both.view(2, 1, size).mT):
        assert square_sums(batch).tolist() == pytest.approx([expected, 0.0], rel=2e-6)


def test_squared_norms_of_mixed_scales_and_of_what_is_not_finite() -> None:
    x = torch.cat([draw(300_000) * 1e-25, torch.ones(3)])
    assert square_sum(x) == pytest.approx(3.0)
    for bad in (torch.nan, torch.inf):
        x[5] = bad
        assert not torch.isfinite(torch.tensor(square_sum(x)))
