"""Orthonormal bases: against float64 QR, over conditioning, rank deficiency and scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edgc.compressors.powersgd.passes import Batched, RowBlocks


def decide(x: Tensor) -> Tensor:
    out = torch.full_like(x, torch.nan)
    RowBlocks().orthonormalise([x], [out])
    return out


def blind(x: Tensor) -> Tensor:
    out = torch.full_like(x, torch.nan)
    Batched().orthonormalise([x], [out])
    return out


BOTH = pytest.mark.parametrize("orthonormalise", [decide, blind])


def departure(basis: Tensor) -> float:
    """Largest entry of B^T B - I."""
    b = basis.double()
    return float((b.mT @ b - torch.eye(b.shape[-1], dtype=torch.float64)).abs().max())


def outside(x: Tensor, basis: Tensor) -> float:
    """Share of the norm of ``x`` that is not in the span of ``basis``."""
    a, b = x.double(), basis.double()
    norm = a.norm()
    return float((a - b @ (b.mT @ a)).norm() / norm) if norm > 0 else 0.0


def conditioned(rows: int, rank: int, condition: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(n, rank, generator=generator, dtype=torch.float64)).Q for n in (rows, rank))
    return ((u * torch.logspace(0, -float(np.log10(condition)), rank, dtype=torch.float64)) @ v.T).float()


@BOTH
@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 300),
    rank=st.integers(1, 40),
    log_condition=st.floats(0, 12),
    log_scale=st.integers(-30, 30),
    log_spread=st.integers(0, 8),
    zeros=st.integers(0, 3),
    copies=st.integers(0, 3),
    transposed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_orthonormal_and_nothing_lost(
    orthonormalise: Any,
    rows: int,
    rank: int,
    log_condition: float,
    log_scale: int,
    log_spread: int,
    zeros: int,
    copies: int,
    transposed: bool,
    seed: int,
) -> None:
    rank = min(rank, rows)
    x = conditioned(rows, rank, 10.0**log_condition, seed)
    # Columns of different size, the entries still in fp32.
    x *= torch.logspace(0, -log_spread, rank) * 10.0 ** min(30, max(log_scale, -30 + log_spread))
    x[:, :zeros] = 0
    x[:, rank - min(copies, rank) :] = x[:, :1]
    batch = torch.stack([x, 2 * x.flip(0)])
    if transposed:
        batch = batch.mT.contiguous().mT
    before = batch.clone()
    bases = orthonormalise(batch)
    assert torch.equal(batch, before)
    for matrix, basis in zip(batch, bases, strict=True):
        assert departure(basis) < 1e-5
        # LAPACK's own accuracy in fp32.
        assert outside(matrix, basis) < 3e-6


@BOTH
@pytest.mark.parametrize("condition", [1.0, 10.0, 1e2, 1e3, 1e4])
@pytest.mark.parametrize(("rows", "rank"), [(300, 8), (1024, 32), (200, 128)])
def test_the_subspace_is_that_of_float64_qr(orthonormalise: Any, rows: int, rank: int, condition: float) -> None:
    x = conditioned(rows, rank, condition)
    basis = orthonormalise(x[None])[0]
    reference = torch.from_numpy(np.linalg.qr(x.double().numpy())[0])
    cosines = torch.linalg.svdvals(reference.mT @ basis.double())
    # The smallest singular value is known to eps * condition, and so are the directions.
    assert float(1 - cosines.min()) < 1e-11 * condition**2 + 1e-6
    assert departure(basis) < 6e-6
    # Better than what LAPACK makes of the same fp32 matrix, or as good.
    assert departure(basis) < 8 * departure(torch.linalg.qr(x).Q) + 1e-6


@BOTH
@pytest.mark.parametrize("kind", ["zero", "one column", "tiny", "huge", "square", "denormal"])
def test_no_matrix_gives_anything_but_a_basis(orthonormalise: Any, kind: str) -> None:
    x = torch.randn(1, 50, 10, generator=torch.Generator().manual_seed(1))
    match kind:
        case "zero":
            x.zero_()
        case "one column":
            x.copy_(x[..., :1].clone().expand_as(x))
        case "tiny":
            x *= 1e-30
        case "huge":
            x *= 1e30
        case "square":
            x = x[:, :10]
        case "denormal":
            x *= 1e-42
    basis = orthonormalise(x)
    assert departure(basis[0]) < 1e-5
    # Of subnormal numbers only a few bits are left.
    assert outside(x[0], basis[0]) < (1e-2 if kind == "denormal" else 1e-6)


@BOTH
def test_same_bits_from_same_bits(orthonormalise: Any) -> None:
    for condition in (2.0, 1e3, 1e9):
        x = conditioned(257, 24, condition)[None]
        assert torch.equal(orthonormalise(x), orthonormalise(x.clone()))


def test_reduced_precision_of_products_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bf16 products C would be good to three digits."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is None:
        pytest.skip("this torch has no such setting")
    before = matmul.fp32_precision
    x = conditioned(500, 32, 100.0)[None]
    monkeypatch.setattr(torch, "mm", lambda *a, **k: pytest.fail("a product that the user lets round"))
    try:
        matmul.fp32_precision = "bf16"
        assert departure(decide(x)[0]) < 1e-5
    finally:
        matmul.fp32_precision = before


def test_not_finite_stays_so_where_nobody_looks() -> None:
    x = torch.randn(1, 30, 4)
    x[0, 3, 2] = torch.nan
    assert not torch.isfinite(blind(x)).all()


def test_matrices_of_several_shapes_are_one_batch_and_do_not_touch_each_other() -> None:
    shapes = [(2, 40, 4), (1, 130, 4), (3, 17, 4), (1, 60, 9)]
    xs = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
    together = [torch.full_like(x, torch.nan) for x in xs]
    Batched().orthonormalise(xs, together)
    for x, basis in zip(xs, together, strict=True):
        assert departure(basis) < 1e-6
        assert max(outside(*pair) for pair in zip(x, basis, strict=True)) < 1e-6
        # Alone or with others: the same basis, but for the order of sums in fp64.
        assert torch.allclose(blind(x), basis, atol=1e-6)
    # What is not finite in one of them stays there.
    xs[2][1, 3, 2] = torch.inf
    spoiled = [torch.zeros_like(x) for x in xs]
    Batched().orthonormalise(xs, spoiled)
    assert spoiled[2][1].isnan().all()
    spoiled[2][1] = together[2][1]
    assert all(torch.equal(a, b) for a, b in zip(spoiled, together, strict=True))
