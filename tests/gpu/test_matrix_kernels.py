"""Kernels that make the passes over matrices, against fp64: on a GPU, or in Triton's interpreter (docs/gpu.md)."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor

from edgc.compressors.base import within
from edgc.compressors.kernels import matrix_kernels_for
from tests import contract
from tests.gpu.conftest import of_kernels

pytestmark = of_kernels()


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGC_MATRIX_KERNELS", "1")


PRODUCT = 2.0**-19  # of the sum of the magnitudes that a product adds up
# Matrices, shape, rank: about a tile (16 or 64 rows, 64 columns), a row or a column alone, batches of tall tiles.
CASES = [
    (1, (1, 1), 1),
    (3, (1, 200), 16),
    (2, (200, 1), 1),
    (1, (16, 64), 8),
    (2, (65, 129), 17),
    (3, (15, 300), 32),
    (2, (66, 63), 40),
    (1, (130, 65), 100),
    (2, (40, 70), 128),
]
# Of error feedback, each of them with each of gradients.
TYPES = list(product((torch.float32, torch.bfloat16, None), (torch.float32, torch.bfloat16, torch.float16)))
ALL = [
    (*case, *types, height)
    for i, case in enumerate(CASES)
    for types, height in (((torch.float32, torch.float32), 64), (TYPES[i % len(TYPES)], 16))
]
MASKED = [setting for setting in contract.SETTINGS if setting.masked and setting.dtype != torch.float64]
# Slow in the interpreter; on a GPU test_contract.py runs all.
NAMES = ("powersgd", "powersgd", "powersgd", "powersgd one-sided", "powersgd int8", "powersgd errors in bf16")


class Case:
    """A batch with gaps between its matrices, its error feedback and factors; the left one row by row or by columns."""

    def __init__(self, count: int, shape: tuple[int, int], rank: int, error: torch.dtype | None, device: Any) -> None:
        generator = torch.Generator().manual_seed(rank)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(device)

        (rows, columns), gap = shape, 3
        self.flat = torch.full((count, rows * columns + gap), torch.nan, device=device)
        self.m = self.flat.as_strided((count, rows, columns), (rows * columns + gap, columns, 1))
        scale = torch.logspace(-9, 9, count, device=device)[:, None, None]
        self.g = draw(count, rows, columns) * scale
        self.m.copy_(self.g)
        self.error = None if error is None else (draw(count, rows, columns) * self.g.abs()).to(error)
        self.right, self.mean = draw(count, rank, columns), draw(count, rank, columns) * scale
        left = draw(count, rank, rows).mT
        self.left = left if rank % 2 else left.contiguous()

    def gaps_hold(self) -> bool:
        return bool(self.flat[:, self.g[0].numel() :].isnan().all())


def near(found: Tensor, exact: Tensor, scale: Tensor, share: float = PRODUCT) -> bool:
    return bool(((found.double() - exact).abs() <= share * scale).all())


def magnitudes(left: Tensor, right: Tensor) -> Tensor:
    return left.double().abs() @ right.double().abs()


@pytest.mark.parametrize(("count", "shape", "rank", "error", "dtype", "height"), ALL)
def test_passes_are_those_of_fp64(
    count: int, shape: tuple[int, int], rank: int, error: Any, dtype: torch.dtype, height: int, device: torch.device
) -> None:
    kernels = matrix_kernels_for(rank, device)
    assert kernels is not None
    x = Case(count, shape, rank, error, device)
    added = x.g if x.error is None else x.g + x.error
    for right in (None, x.right):
        x.m.copy_(x.g)
        first, p = x.left.clone(), x.left.clone()
        norms = kernels.load(x.m, x.error, right, p, height)
        assert torch.equal(x.m, added) and x.gaps_hold()
        for norm, matrices in zip(norms, (x.g, added), strict=True):
            assert torch.allclose(norm, matrices.double().square().sum((1, 2)), rtol=1e-12, atol=0)
        if right is None:
            assert torch.equal(p, first)
        else:
            assert near(p, added.double() @ x.right.double().mT, magnitudes(added, x.right.mT))
            again = torch.empty_like(p)
            kernels.load(x.m.copy_(x.g), x.error, right, again, height)
            assert torch.equal(again, p)
    if x.error is None:
        return
    one_sided = rank % 3 == 0
    mean = (x.left * 2, x.right) if one_sided else (x.left, x.mean)
    results = []
    for finite in (True, False):
        spare = torch.full_like(x.error, torch.nan)
        flag, own = torch.tensor(finite, device=device), (x.left, x.right)
        kernels.store(x.m.copy_(added), x.error, spare, own, mean, flag, dtype, height)
        assert x.gaps_hold()
        results.append((x.m.clone(), spare))
    (result, kept), (same, old) = results
    assert torch.equal(result, same) and torch.equal(old, x.error)
    exact = mean[0].double() @ mean[1].double()
    scale = magnitudes(*mean)
    narrow = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    limit = torch.finfo(dtype).max
    # Below its normal numbers float16 has steps of 2^-24.
    assert near(result, exact.clamp(-limit, limit), scale + 2.0**-13 * (dtype == torch.float16), PRODUCT + narrow)
    assert torch.equal(result, within(result.clone(), dtype).to(dtype).float())
    # What does not get across is kept: with the mean's product before it is rounded to the gradient's type.
    owed = added.double() - x.left.double() @ x.right.double()
    if dtype != torch.float32:
        owed += exact - result.double()
    size = added.double().abs() + magnitudes(x.left, x.right) + scale
    assert near(kept, owed, size, 2.0**-7 if kept.dtype == torch.bfloat16 else 2 * PRODUCT)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_entry_spoils_its_row_of_p(bad: float, device: torch.device) -> None:
    kernels = matrix_kernels_for(8, device)
    assert kernels is not None
    x = Case(2, (70, 90), 8, torch.float32, device)
    good, p = torch.empty_like(x.left), torch.empty_like(x.left)
    kernels.load(x.m, x.error, x.right, good)
    x.m.copy_(x.g)[1, 66, 70] = bad
    norms = kernels.load(x.m, x.error, x.right, p)
    assert not p[1, 66].isfinite().any()
    p[1, 66] = good[1, 66]
    assert torch.equal(p, good)
    assert norms[:, 0].isfinite().all() and not norms[:, 1].isfinite().any()


@pytest.mark.parametrize(("name", "setting"), list(zip(NAMES, cycle(MASKED), strict=False)), ids=str)
def test_all_laws_hold_with_kernels(
    name: str, setting: contract.Setting, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the whole compressor: sent + kept = input, equal replicas, what is not finite; as on a CPU, nearly."""
    kernels, calls = matrix_kernels_for(8, device), 0
    assert kernels is not None
    load = kernels.load

    def counted(*arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        found: Tensor = load(*arguments)
        return found

    monkeypatch.setattr(kernels, "load", counted)
    contract.course_holds(name, setting, device)
    assert calls
