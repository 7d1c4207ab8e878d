"""Low-rank compression of a stream of matrices: against its own algebra in float64, on both code paths."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edgc.compressors.base import Statistics
from edgc.errors import UserError
from edgc.megatron.activation import ActivationCompressor
from edgc.runtime.device import masked_path


@pytest.fixture(params=[False, True], ids=["host", "masked"])
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    """The path of a CPU, and that of a GPU, on which the host decides nothing."""
    with masked_path(request.param):
        yield


BOTH = pytest.mark.usefixtures("path")


def made(*, rank: int | None, always_factor: bool = False, seed: int = 0) -> ActivationCompressor:
    compressor = ActivationCompressor(rank, seed)
    compressor.always_factor = always_factor
    return compressor


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def send(
    compressor: ActivationCompressor, gradient: Tensor, name: str = "a", statistics: Statistics | None = None
) -> Tensor:
    """The matrix that the receiver gets, from the message alone."""
    layout = compressor.layout(gradient.shape, gradient.dtype)
    assert layout is not None
    statistics = statistics or Statistics()
    message = compressor.compress(name, gradient, layout, statistics)
    assert message.shape == (layout.size,)
    received = torch.full_like(gradient, 7.0, memory_format=torch.contiguous_format)
    made(rank=compressor.rank).decompress(message.clone(), layout, received, statistics)
    return received


@settings(max_examples=80, deadline=None)
@given(
    on=st.booleans(),
    shape=st.tuples(st.integers(1, 12), st.integers(1, 3), st.integers(1, 40)),
    rank=st.integers(1, 8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    transposed=st.booleans(),
)
def test_received_plus_kept_is_sent_plus_kept_before(
    on: bool, shape: tuple[int, int, int], rank: int, dtype: torch.dtype, transposed: bool
) -> None:
    compressor = made(rank=rank, always_factor=True)
    received, sent, size = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64), 0.0
    for step in range(4):
        gradient = draw(*shape, seed=step, dtype=dtype)
        if transposed:
            gradient = gradient.transpose(0, 1).contiguous().transpose(0, 1)
        before = gradient.clone()
        with masked_path(on):
            received += send(compressor, gradient)
        assert torch.equal(gradient, before)
        sent += gradient
        size += float(gradient.double().norm())
        assert (received + compressor.errors["a"].view_as(sent) - sent).norm() <= 1e-6 * size
    if min(shape[0] * shape[1], shape[2]) <= rank and dtype == torch.float32:
        assert compressor.errors["a"].norm() <= 2e-6 * size


@BOTH
def test_a_matrix_of_low_rank_gets_across_and_statistics_say_so() -> None:
    low = (draw(6, 4, 3) @ draw(3, 40, seed=1)).contiguous()
    compressor, statistics = made(rank=3), Statistics()
    assert (send(compressor, low, statistics=statistics) - low).norm() < 1e-5 * low.norm()
    assert statistics.worker_error is not None and statistics.worker_error < 1e-5
    assert float(statistics.input_sq) == pytest.approx(float(low.double().norm() ** 2))
    assert statistics.compress.seconds > 0 and statistics.decompress.seconds > 0
    full, statistics = draw(6, 4, 40, seed=2), Statistics()
    received = send(compressor, full, "b", statistics)
    expected = float((full - received).norm() / full.norm())
    assert statistics.worker_error == pytest.approx(expected, rel=1e-5)
    assert 0.5 < expected < 1


def test_the_warm_start_finds_the_best_subspace() -> None:
    matrix = draw(30, 2, 50, seed=3)
    matrix = (matrix.view(60, 50) @ torch.diag(0.7 ** torch.arange(50.0))).view(30, 2, 50)
    compressor, errors = made(rank=4), []
    values = torch.linalg.svdvals(matrix.view(60, 50).double())
    best = float(values[4:].square().sum().sqrt())
    for _ in range(12):
        errors.append(float((send(compressor, matrix) - matrix).norm()))
        compressor.errors.clear()
    assert errors[0] > 1.02 * best
    assert errors[-1] == pytest.approx(best, rel=1e-3)


@BOTH
@pytest.mark.parametrize("scale", [1e-35, 1e-30, 1e-10, 1e10, 1e30, 1e36])
def test_any_scale(scale: float) -> None:
    compressor, plain = made(rank=4), made(rank=4)
    for step in range(3):
        gradient = draw(8, 2, 40, seed=step)
        received, reference = send(compressor, gradient * scale), send(plain, gradient)
        assert (received / scale - reference).norm() < 1e-4 * reference.norm()


@BOTH
def test_zero_is_sent_and_forgets_nothing() -> None:
    compressor = made(rank=2)
    zero = torch.zeros(6, 2, 20)
    first = draw(6, 2, 20)
    send(compressor, first)
    compressor.errors.clear()
    factor = compressor.factors["a"].clone()
    statistics = Statistics()
    assert not send(compressor, zero, statistics=statistics).any()
    assert torch.equal(compressor.factors["a"], factor)
    assert statistics.skipped == 0
    fresh = made(rank=2)
    assert not send(fresh, zero).any()
    assert send(fresh, first).any()


@BOTH
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_arrives_so_and_touches_no_state(value: float, dtype: torch.dtype) -> None:
    compressor = made(rank=2)
    for step in range(2):
        send(compressor, draw(6, 2, 20, seed=step, dtype=dtype))
    before = copy.deepcopy(compressor.state_dict())
    bad, statistics = draw(6, 2, 20, seed=5, dtype=dtype), Statistics()
    bad[3, 1, 7] = value
    assert not send(compressor, bad, statistics=statistics).isfinite().any()
    assert statistics.skipped == 1 and statistics.input_sq == statistics.error_sq == 0
    after = compressor.state_dict()
    for key in ("errors", "factors"):
        assert torch.equal(before[key]["a"], after[key]["a"])
    assert send(compressor, draw(6, 2, 20, seed=6, dtype=dtype)).isfinite().all()


def test_what_fp16_cannot_hold_is_kept_for_later() -> None:
    compressor = made(rank=2)
    peak = torch.zeros(6, 2, 20, dtype=torch.float16)
    peak[2, 1] = 6e4
    send(compressor, peak)
    compressor.errors["a"] += peak.view(12, 20).float()
    received = send(compressor, peak)
    assert received.isfinite().all() and float(received.max()) == torch.finfo(torch.float16).max
    kept = compressor.errors["a"][5]
    assert torch.allclose(kept, torch.full((20,), 1.2e5 - float(received.max())), rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_factors_that_are_smaller_are_sent(dtype: torch.dtype) -> None:
    for rank in range(1, 40):
        compressor = made(rank=rank)
        layout = compressor.layout((8, 4, 24), dtype)
        size = 4 * min(rank, 24, 32) * (32 + 24)
        assert (layout is not None) == (size < 32 * 24 * dtype.itemsize)
        if layout is not None:
            assert layout.empty(torch.device("cpu")).nbytes == size
    assert made(rank=None).layout((8, 4, 24), dtype) is None


@pytest.mark.parametrize("rank", [2, 8])
def test_a_stream_goes_on_with_another_rank(rank: int) -> None:
    """Its warm start is cut or extended, and its error feedback is sent."""
    gradient = (draw(64, 3, seed=1) @ draw(3, 32, seed=2)).view(32, 2, 32)
    first = made(rank=4)
    for _ in range(4):
        send(first, gradient)
    second = made(rank=rank)
    second.load_state_dict(first.state_dict())
    arrived = send(second, gradient)
    assert second.factors["a"].shape == (rank, 32)
    assert float((arrived - gradient).norm()) < (1e-4 if rank > 3 else 0.9) * float(gradient.norm())


def test_state_of_other_shapes_is_refused_in_one_line() -> None:
    compressor = made(rank=3)
    send(compressor, draw(6, 2, 30))
    with pytest.raises(UserError, match=r"error feedback of a is \(12, 30\), but should be \(8, 30\)"):
        send(compressor, draw(4, 2, 30))
    other = made(rank=3)
    other.load_state_dict({**compressor.state_dict(), "errors": {}})
    with pytest.raises(UserError, match=r"factor of a is \(3, 30\), but should be \(3, 40\)"):
        send(other, draw(6, 2, 40))
