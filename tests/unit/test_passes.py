"""PowerSGD's passes over matrices beside the laws of the whole (``test_powersgd.py``), and orthonormal bases."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edgc.compressors import Gradient
from edgc.compressors.base import square_sum, square_sums, within
from edgc.compressors.kernels import matrix_kernels_for
from edgc.compressors.powersgd import PowerSGDConfig
from edgc.compressors.powersgd.passes import Batched, Group, RowBlocks, batch_view
from edgc.compressors.powersgd.state import State
from edgc.runtime.channel import Channel
from edgc.runtime.device import masked_path
from tests.low_rank import power_sgd

BOTH = pytest.mark.parametrize("passes", [RowBlocks, Batched])
OK = torch.tensor(True)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def named(tensors: list[Tensor]) -> list[Gradient]:
    return [Gradient(f"w{i}", tensor) for i, tensor in enumerate(tensors)]


def group(shape: tuple[int, int], rank: int, error: Tensor) -> Group:
    """One matrix, with memory for its factors; the mean is its own factor."""
    x = Group(["w"], shape, rank, error, torch.empty_like(error), draw(1, rank, shape[1]))
    x.start, x.summed, x.basis = x.right, torch.empty(1, shape[0], rank), torch.empty(1, shape[0], rank)
    x.own = x.mean = torch.empty(1, rank, shape[1])
    return x


class Stand(ModuleType):
    """Kernels that leave the work to torch, and tell what they were asked for; the real ones: tests/gpu."""

    def __init__(self, fails: str = "") -> None:
        super().__init__("edgc.runtime.matrix_kernels")
        self.fails, self.calls = fails, list[str]()

    HEIGHTS = (16, 64)

    def load(
        self, m: Tensor, error: Tensor | None, right: Tensor | None, left: Tensor, height: int | None = None
    ) -> Tensor:
        self.calls.append("load")
        if self.fails == "raises":
            raise RuntimeError("no compiler\nat all")
        norms = [m.double().square().sum((1, 2))]
        if error is not None:
            m.add_(error)
        if right is not None:
            torch.bmm(m, self._rounded(right).mT, out=left)
        return torch.stack([*norms, m.double().square().sum((1, 2))])

    def store(
        self,
        m: Tensor,
        error: Tensor,
        spare: Tensor,
        own: tuple[Tensor, Tensor],
        mean: tuple[Tensor, Tensor],
        finite: Tensor,
        dtype: torch.dtype,
        height: int | None = None,
    ) -> None:
        self.calls.append("store")
        result = mean[0] @ mean[1]
        rounded = within(result.clone(), dtype).to(dtype).float()
        spare.copy_(torch.where(finite, m - own[0] @ own[1] + result - rounded, error))
        m.copy_(rounded)

    def _rounded(self, x: Tensor) -> Tensor:
        return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32) if self.fails == "TF32" else x


# --------------------------------------------------------------------- passes


def courses(settings: dict[str, Any], dtype: torch.dtype, rank: int = 4) -> list[Tensor]:
    """What two steps on the masked path leave in the gradients and in error feedback."""
    compressor = power_sgd(**settings)
    with masked_path():
        for step in range(2):
            tensors = [draw(50, 40, seed=2 * step + i).to(dtype) for i in range(2)]
            compressor.reduce(named(tensors), Channel(None), rank)
    return [*tensors, *compressor.errors.values()]


@pytest.mark.parametrize("settings", [{}, {"error_dtype": "bf16"}, {"one_sided": True}, {"error_feedback": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_make_the_passes_over_a_batch_in_two_launches(
    settings: dict[str, Any], dtype: torch.dtype, stand: Callable[[str], Stand]
) -> None:
    expected = courses(settings, dtype)
    kernels = stand("")
    assert matrix_kernels_for(4, torch.device("cpu")) is not None
    kernels.calls.clear()
    for one, other in zip(courses(settings, dtype), expected, strict=True):
        assert torch.allclose(one, other, rtol=0.02 if one.dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert kernels.calls == 2 * (["load", "store"] if "error_feedback" not in settings else ["load"])


@pytest.mark.parametrize(("fails", "reason"), [("raises", "no compiler"), ("TF32", "other numbers than torch")])
def test_kernels_that_do_not_do_are_left_out(fails: str, reason: str, stand: Callable[[str], Stand]) -> None:
    expected = courses({}, torch.float32)
    kernels = stand(fails)
    with pytest.warns(UserWarning, match=f"rank 16 on cpu, torch's are: .*{reason}$"):
        matrix_kernels_for(4, torch.device("cpu"))
    kernels.calls.clear()
    assert all(map(torch.equal, courses({}, torch.float32), expected)) and not kernels.calls


def test_ranks_of_which_a_tile_has_no_room_have_no_kernels(stand: Callable[[str], Stand]) -> None:
    kernels = stand("")
    assert matrix_kernels_for(129, torch.device("cpu")) is None and not kernels.calls


def test_small_errors_are_measured_and_not_a_difference() -> None:
    left, right = torch.linalg.qr(draw(50, 3)).Q, 10 * draw(3, 40)
    noise = 1e-4 * draw(50, 40, seed=5)
    x, run = group((50, 40), 3, torch.zeros(1, 50, 40)), RowBlocks()
    run.load([x], [named([left @ right + noise])])
    x.basis = left[None]
    run.right_factor(x)
    truth = float((noise - left @ (left.T @ noise)).double().square().sum())
    known = (x.input_sq - square_sums([x.own])[0]).clamp(min=0)
    [exact] = run.store([x], [known], OK)
    assert float(exact) == pytest.approx(truth, rel=0.02)


@BOTH
def test_what_a_narrow_gradient_cannot_hold_is_clamped_and_kept(passes: Any) -> None:
    run, gradient = passes(), torch.zeros(4, 4, dtype=torch.float16)
    x = group((4, 4), 1, torch.zeros(1, 4, 4))
    run.load([x], [named([gradient])])
    x.basis.fill_(1e3)
    x.own.fill_(1e3)
    run.store([x], [torch.zeros(1)], OK)
    assert (gradient == 65504).all() and (x.spare == 0 + -1e6 + 1e6 - 65504).all()


def test_batch_view() -> None:
    flat = draw(100)
    even = [flat[start : start + 6].view(2, 3) for start in (4, 14, 24)]
    view = batch_view(even)
    assert view is not None
    view += 1
    assert all(torch.equal(part, whole) for part, whole in zip(even, view, strict=True))
    for other in (
        even[::-1],
        [even[0], even[2], flat[40:46].view(2, 3)],
        [flat[:6].view(2, 3), flat[3:9].view(2, 3)],  # they overlap
        [even[0], draw(2, 3)],
        [flat[:6].view(3, 2).T],
        [even[0].double()],
    ):
        assert batch_view(other) is None


def test_matrices_of_one_shape_are_batched_on_a_gpu_if_they_are_one_tensor_or_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flat = draw(90)
    apart, one = [draw(6, 5) for _ in range(3)], [flat[start : start + 30].view(6, 5) for start in (0, 30, 60)]

    def counts(tensors: list[torch.Tensor], batched: bool = True) -> list[int]:
        found = State(PowerSGDConfig(rank=2)).groups(named(tensors), 2, batched=batched)
        return [len(group.names) for group in found]

    assert counts(apart) == counts(one) == [3] and counts([*apart, draw(5, 6)]) == [1, 3]
    assert counts(apart, batched=False) == counts(one, batched=False) == [1, 1, 1]
    assert counts([*apart[:2], apart[2].bfloat16()]) == [2, 1]
    monkeypatch.setattr("edgc.compressors.powersgd.state._COPIED", 29)
    assert counts(apart) == [1, 1, 1] and counts(one) == [3]


@pytest.mark.parametrize("scale", [1e-42, 1e-20, 1.0, 1e19, 1e30])
@pytest.mark.parametrize("size", [1, 1000, 300_000])
def test_squared_norms_at_any_scale(scale: float, size: int) -> None:
    x = draw(size, seed=size) * scale
    expected = float(x.double().square().sum())
    assert square_sum(x) == pytest.approx(expected, rel=2e-6)
    both = torch.stack([x, torch.zeros(size)]).view(2, size, 1)
    for batch in (both, both.view(2, 1, size).mT):
        assert square_sums([batch])[0].tolist() == pytest.approx([expected, 0.0], rel=2e-6)
    x = torch.cat([x * 1e-30, torch.ones(3)])
    assert square_sum(x) == pytest.approx(3.0 if scale < 1e30 else 3.0 + expected * 1e-60, rel=2e-6)
    for bad in (torch.nan, torch.inf):
        x[0] = bad
        assert not torch.isfinite(torch.tensor(square_sum(x)))


# --------------------------------------------------------------------- orthonormal bases


def orthonormal(passes: Any, x: Tensor) -> Tensor:
    out = torch.full_like(x, torch.nan)
    passes().orthonormalise([x], [out])
    return out


def departure(basis: Tensor) -> float:
    """Largest entry of B^T B - I."""
    b = basis.double()
    return float((b.mT @ b - torch.eye(b.shape[-1], dtype=torch.float64)).abs().max())


def outside(x: Tensor, basis: Tensor) -> float:
    """Share of the norm of ``x`` that is not in the span of ``basis``."""
    a, b = x.double(), basis.double()
    norm = a.norm()
    return float((a - b @ (b.mT @ a)).norm() / norm) if norm > 0 else 0.0


def conditioned(rows: int, rank: int, log_condition: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(n, rank, generator=generator, dtype=torch.float64)).Q for n in (rows, rank))
    return ((u * torch.logspace(0, -log_condition, rank, dtype=torch.float64)) @ v.T).float()


@BOTH
@settings(max_examples=100, deadline=None)
@given(
    size=st.tuples(st.integers(1, 300), st.integers(1, 40)),
    log_condition=st.floats(0, 12),
    log_scale=st.integers(-30, 30),
    log_spread=st.integers(0, 8),
    zeros=st.integers(0, 40),
    copies=st.integers(0, 40),
    transposed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_orthonormal_and_nothing_lost(
    passes: Any,
    size: tuple[int, int],
    log_condition: float,
    log_scale: int,
    log_spread: int,
    zeros: int,
    copies: int,
    transposed: bool,
    seed: int,
) -> None:
    rows, rank = size[0], min(size)
    x = conditioned(rows, rank, log_condition, seed)
    # Columns of different size, the entries still in fp32.
    x *= torch.logspace(0, -log_spread, rank) * 10.0 ** min(30, max(log_scale, -30 + log_spread))
    x[:, :zeros] = 0
    x[:, rank - min(copies, rank) :] = x[:, :1]
    batch = torch.stack([x, 2 * x.flip(0)])
    if transposed:
        batch = batch.mT.contiguous().mT
    before = batch.clone()
    bases = orthonormal(passes, batch)
    assert torch.equal(batch, before) and torch.equal(orthonormal(passes, before), bases), "same bits from same bits"
    for matrix, basis in zip(batch, bases, strict=True):
        assert departure(basis) < 1e-5
        assert outside(matrix, basis) < 3e-6  # LAPACK's own accuracy in fp32


def test_reduced_precision_of_products_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """With bf16 products C would be good to three digits."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is None:
        pytest.skip("this torch has no such setting")
    previous = matmul.fp32_precision
    x = conditioned(500, 32, 2)[None]
    monkeypatch.setattr(torch, "mm", lambda *a, **k: pytest.fail("a product that the user lets round"))
    try:  # not by monkeypatch, which cannot delete what torch computes
        matmul.fp32_precision = "bf16"
        assert departure(orthonormal(RowBlocks, x)[0]) < 1e-5
    finally:
        matmul.fp32_precision = previous


def test_matrices_of_several_shapes_are_one_batch_and_do_not_touch_each_other() -> None:
    shapes = [(2, 40, 4), (1, 130, 4), (3, 17, 4), (1, 60, 9)]
    xs = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    together, spoiled = ([torch.full_like(x, torch.nan) for x in xs] for _ in range(2))
    Batched().orthonormalise(xs, together)
    for x, basis in zip(xs, together, strict=True):
        assert departure(basis) < 1e-6
        # Alone or with others: the same basis, but for the order of sums in fp64.
        assert torch.allclose(orthonormal(Batched, x), basis, atol=1e-6)
    # What is not finite in one of them stays there.
    xs[2][1, 3, 2] = torch.inf
    Batched().orthonormalise(xs, spoiled)
    assert spoiled[2][1].isnan().all()
    spoiled[2][1] = together[2][1]
    assert all(torch.equal(a, b) for a, b in zip(spoiled, together, strict=True))
