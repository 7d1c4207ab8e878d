"""edgc.measurement.spectral: errors at other ranks from the singular values at one, against true decompositions."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgc.compressors import Gradient
from edgc.control.policies.spectral import Spectral, SpectralConfig
from edgc.control.rank_model import StageModel
from edgc.engine import Engine
from edgc.measurement.spectral import MatrixSpectrum, error_curve
from edgc.sections import EntropyConfig
from tests.workers import run_workers

ROWS, COLUMNS = 256, 384


def with_values(values: torch.Tensor) -> torch.Tensor:
    """A matrix of ROWS x COLUMNS with these singular values, in float64."""
    generator = torch.Generator().manual_seed(7)
    u, v = (
        torch.linalg.qr(torch.randn(size, ROWS, generator=generator, dtype=torch.float64)).Q for size in (ROWS, COLUMNS)
    )
    return (u * values) @ v.T


def noise() -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)


def matrix(kind: str, parameter: float) -> torch.Tensor:
    index = torch.arange(1, ROWS + 1, dtype=torch.float64)
    if kind == "power":
        return with_values(index**-parameter)
    if kind == "exponential":
        return with_values(torch.exp(-index / parameter))
    if kind == "low rank + noise":
        signal = torch.where(index <= parameter, 30 * torch.exp(-index / parameter), 0.0)
        return with_values(signal) + 0.5 * noise()
    return noise()


def power_iterations(m: torch.Tensor, rank: int, count: int) -> tuple[list[float], float]:
    """Squared singular values that ``count`` steps of PowerSGD find, and the exact squared error they leave."""
    generator = torch.Generator().manual_seed(rank)
    q = torch.randn(m.shape[1], rank, generator=generator, dtype=torch.float64)
    p = q
    for _ in range(count):
        p = torch.linalg.qr(m @ q).Q
        q = m.T @ p
    return torch.linalg.eigvalsh(q.T @ q).tolist(), float((m - p @ q.T).square().sum())


# Largest |ln(predicted / true)| of the error's norm, at ranks up to twice the known one. With exact singular values,
# and with those after three power iterations from a random start, which are too small.
CASES = [
    ("power", 0.25, 0.03, 0.10),
    ("power", 1.0, 0.20, 0.10),
    ("power", 1.5, 0.35, 0.30),
    ("exponential", 8.0, 0.01, 0.30),
    ("exponential", 100.0, 0.01, 0.20),
    ("iid", 0.0, 0.05, 0.20),
    ("low rank + noise", 6.0, 0.06, 0.20),
    ("low rank + noise", 48.0, 0.06, 0.22),
]


@pytest.mark.parametrize(("kind", "parameter", "exact", "iterated"), CASES)
def test_accuracy(kind: str, parameter: float, exact: float, iterated: float) -> None:
    m = matrix(kind, parameter)
    true_sq = torch.linalg.svdvals(m).square()
    total = float(true_sq.sum())
    for rank in (8, 16, 32, 64):
        ranks = list(range(4, 2 * rank + 1, 4))
        for values, bound in (
            (true_sq[:rank].tolist(), exact),
            (power_iterations(m, rank, 3)[0], iterated),
        ):
            predicted = MatrixSpectrum((ROWS, COLUMNS), values, total).errors_sq(ranks)
            for wanted, error_sq in zip(ranks, predicted, strict=True):
                true = float(true_sq[wanted:].sum())
                if true > 1e-6 * total:  # nobody asks for a relative error below 0.001
                    assert abs(0.5 * math.log(error_sq / true)) < bound, (rank, wanted)


@st.composite
def spectra(draw: st.DrawFn) -> MatrixSpectrum:
    rows, columns = draw(st.integers(1, 80)), draw(st.integers(1, 80))
    rank = draw(st.integers(0, min(rows, columns)))
    scale = 10.0 ** draw(st.integers(-40, 40))
    # Rounding leaves eigenvalues a little below 0, and a norm a little below the sum of the values.
    value = st.one_of(st.floats(0, 1), st.just(0.0), st.floats(-1e-9, 1e-3))
    values = draw(st.lists(value, min_size=rank, max_size=rank))
    beyond = draw(st.one_of(st.floats(-1e-7, 0), st.floats(0, 50)))
    total = max(0.0, (sum(max(0.0, v) for v in values)) * (1 + beyond) + max(0.0, beyond) * 1e-3)
    return MatrixSpectrum((rows, columns), [v * scale for v in values], total * scale)


@settings(max_examples=500, deadline=None)
@given(spectrum=spectra())
def test_bounded_monotone_and_complete(spectrum: MatrixSpectrum) -> None:
    full = min(spectrum.shape)
    errors = spectrum.errors_sq(range(full + 3))
    kept = math.fsum(max(0.0, v) for v in spectrum.singular_sq)
    largest = max(spectrum.input_sq, kept)
    assert all(math.isfinite(e) and -1e-12 * largest <= e <= largest * (1 + 1e-12) for e in errors)
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(errors))
    assert errors[full:] == [0.0] * 3
    assert errors[0] == pytest.approx(largest) or len(spectrum.singular_sq) == full
    rank = len(spectrum.singular_sq)
    if rank < full:
        assert errors[rank] == max(0.0, spectrum.input_sq - kept)


@settings(max_examples=200, deadline=None)
@given(decay=st.floats(1e-4, 2), start=st.floats(-30, 30), size=st.integers(4, 60), known=st.floats(0.1, 0.9))
def test_a_geometric_spectrum_is_continued_exactly(decay: float, start: float, size: int, known: float) -> None:
    values = [math.exp(start - decay * k) for k in range(size)]
    rank = max(1, round(known * size))
    total = math.fsum(values)
    errors = MatrixSpectrum((size, size + 5), values[:rank], total).errors_sq(range(size))
    for wanted, error_sq in enumerate(errors):
        true = math.fsum(values[wanted:])
        # What R = total - sum loses to cancellation is all that may be missing.
        assert error_sq == pytest.approx(true, rel=1e-3, abs=1e-10 * total)


def always(shape: tuple[int, int], rank: int) -> bool:
    return True


def test_squared_errors_add_up_over_matrices() -> None:
    first = MatrixSpectrum((10, 20), [9.0, 4.0], 16.0)
    second = MatrixSpectrum((30, 10), [50.0, 20.0, 10.0], 84.0)
    curve = error_curve([first, second], [1, 2, 3, 10], always)
    assert curve is not None
    parts = [[a + b for a, b in zip(first.errors_sq([1, 2, 3, 10]), second.errors_sq([1, 2, 3, 10]), strict=True)]]
    assert curve == pytest.approx([value / 100 for value in parts[0]])
    assert curve[0] == pytest.approx((7 + 34) / 100)
    assert curve[3] == 0


@pytest.mark.parametrize(
    "unknown",
    [
        MatrixSpectrum((9, 9), [0.0, 0.0], 0.0),
        MatrixSpectrum((9, 9), [math.nan, 1.0], 2.0),
        MatrixSpectrum((9, 9), [1.0, 1.0], math.inf),
    ],
)
def test_what_says_nothing_is_left_out(unknown: MatrixSpectrum) -> None:
    known = MatrixSpectrum((9, 9), [3.0, 1.0], 6.0)
    assert error_curve([unknown], [1, 2], always) is None
    assert error_curve([], [1, 2], always) is None
    assert error_curve([unknown, known], [1, 2], always) == error_curve([known], [1, 2], always)


def test_smoothing_weighs_the_newest_window() -> None:
    curves = Spectral(SpectralConfig(), StageModel([(8, 8)]), 2, 100)
    assert curves.smoothed([(0.8, 0.4), None]) == [(0.8, 0.4), None]
    assert curves.smoothed([(0.4, 0.0), (0.5, 0.1)]) == [pytest.approx((0.6, 0.2)), (0.5, 0.1)]
    # A window without spectra says nothing, but does not forget either.
    assert curves.smoothed([None, None]) == [None, None]
    saved = json.loads(json.dumps(curves.state_dict()))
    resumed = Spectral(SpectralConfig(), StageModel([(8, 8)]), 2, 100)
    resumed.load_state_dict(saved)
    following: list[tuple[float, ...] | None] = [(0.3, 0.3), (0.1, 0.1)]
    assert resumed.smoothed(following) == curves.smoothed(following) == [
        pytest.approx((0.45, 0.25)),
        pytest.approx((0.3, 0.1)),
    ]  # fmt: skip


# --------------------------------------------------------------------- in an engine, on two workers

SHAPES = {"a": (64, 96), "b": (96, 64)}
# Without error feedback, so that what is left over is what the spectra say; with it, see test_mean_error.py.
SETTLING: dict[str, Any] = {
    "r_max": 16,
    "r_min": 4,
    "window": 4,
    "step_limit": 100,
    "target_error": 0.3,
    "warmup_fraction": 0.0,
    "warmup_limit_fraction": 0.0,
    "min_compression_elements": 64,
    "error_feedback": False,
    "entropy": EntropyConfig(iteration_rate=1.0),
}


def settled() -> list[tuple[int | None, float | None]]:
    """The rank of a stage, and the worker's error, where both workers reduce matrices with singular values
    exp(-k / 8)."""
    engine, told = Engine(SpectralConfig(**SETTLING), stage=0, stages=[[*SHAPES.values()]], iterations=40), []
    matrices = {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        generator = torch.Generator().manual_seed(seed)
        u, v = (torch.linalg.qr(torch.randn(side, 64, generator=generator)).Q for side in shape)
        matrices[name] = (u * torch.exp(-torch.arange(64) / 8.0)) @ v.T
    for _ in range(40):
        engine.reduce([Gradient(name, matrix.clone()) for name, matrix in matrices.items()], None)
        engine.end_iteration()
        assert engine.last is not None
        told.append((engine.last.rank, engine.last.statistics.worker_error))
    return told


def test_the_rank_settles_where_the_true_error_meets_the_target() -> None:
    squares = torch.exp(-torch.arange(64) / 4.0)
    true = {rank: float((squares[rank:].sum() / squares.sum()).sqrt()) for rank in (8, 12)}
    assert true[8] > 0.3 >= true[12]
    for worker in run_workers(2, settled):
        ranks, errors = zip(*worker, strict=True)
        assert ranks[:4] == (None,) * 4 and ranks[-16:] == (12,) * 16
        assert errors[-1] == pytest.approx(true[12], rel=0.02)
