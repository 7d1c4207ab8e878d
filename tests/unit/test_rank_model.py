"""edgc.control.rank_model: the Marchenko-Pastur error against Monte Carlo and quadrature, and exact inversion."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgc.control.rank_model import StageModel, error, next_rank, rank_for_error

GPT_STAGE = [(4096, 256), *[(256, 256), (768, 256), (1024, 256), (256, 1024)] * 4]


@pytest.mark.parametrize("shape", [(128, 128), (256, 512), (64, 1024), (192, 768), (768, 192), (96, 400)])
def test_error_is_within_1_percent_of_monte_carlo(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(7)
    repeats = 6 if shape == (256, 512) else 12
    squares = [
        torch.linalg.svdvals(torch.randn(*shape, generator=generator, dtype=torch.float64)) ** 2 for _ in range(repeats)
    ]
    p = min(shape)
    for rank in (0, 1, 4, p // 8, p // 4, p // 2):
        simulated = sum(float(s[rank:].sum().sqrt()) for s in squares) / repeats
        assert error(*shape, rank) == pytest.approx(simulated, rel=0.01), rank


@pytest.mark.parametrize("shape", [(64, 64), (100, 101), (64, 256), (64, 6400), (64, 50257)])
def test_table_follows_the_law(shape: tuple[int, int]) -> None:
    """Against quadrature of the density, not against the closed forms that the table is made of."""
    m, n = shape
    aspect = m / n
    low, high = (1 - math.sqrt(aspect)) ** 2, (1 + math.sqrt(aspect)) ** 2
    theta = (torch.arange(400_000, dtype=torch.float64) + 0.5) * (math.pi / 2 / 400_000)
    x = low + (high - low) * torch.sin(theta) ** 2
    mass = (high - low) ** 2 * (torch.sin(theta) * torch.cos(theta)) ** 2 / (math.pi * aspect)
    step = math.pi / 2 / 400_000
    tail, share = torch.cumsum(mass, 0) * step, torch.cumsum(mass / x, 0) * step
    assert float(share[-1]) == pytest.approx(1, abs=1e-6)
    tolerance = 2e-5 if aspect > 0.5 else 1e-6
    for k in range(1000, 400_000, 7919):
        rank = m * (1 - float(share[k]))
        assert abs(error(m, n, rank) / math.sqrt(m * n) - math.sqrt(float(tail[k]))) < tolerance


@settings(max_examples=400, deadline=None)
@given(m=st.integers(1, 5000), n=st.integers(1, 60_000), fraction=st.floats(1e-9, 1 - 1e-9))
@example(m=64, n=64, fraction=1 - 1e-9)
@example(m=4096, n=4096, fraction=1e-9)
@example(m=4096, n=4096, fraction=0.999999)
@example(m=1024, n=1025, fraction=0.9999999)
@example(m=50257, n=768, fraction=0.5)
def test_inverse_to_1e_9(m: int, n: int, fraction: float) -> None:
    rank = fraction * min(m, n)
    assert abs(rank_for_error(m, n, error(m, n, rank)) - rank) < 1e-9


@pytest.mark.parametrize("shape", [(7, 7), (64, 64), (64, 200), (1, 9), (3, 100_000)])
def test_shape_of_g(shape: tuple[int, int]) -> None:
    m, n = shape
    p = min(shape)
    assert error(m, n, 0) == pytest.approx(math.sqrt(m * n), rel=1e-15)
    assert error(m, n, p) == 0
    assert error(m, n, -3) == error(m, n, 0)
    assert error(m, n, p + 3) == 0
    assert error(m, n, 0.37 * p) == error(n, m, 0.37 * p)
    values = [error(m, n, p * k / 500) for k in range(501)]
    assert all(a > b for a, b in pairwise(values))
    # The largest singular value is sqrt(m) + sqrt(n): the slope of g^2 at rank 0 in the limit of many rows.
    slope = (m * n - error(m, n, 1e-3 * p) ** 2) / (1e-3 * p)
    assert slope <= (math.sqrt(m) + math.sqrt(n)) ** 2 * (1 + 1e-9)


def test_inverse_clamps() -> None:
    assert rank_for_error(32, 64, math.sqrt(32 * 64)) == 0
    assert rank_for_error(32, 64, math.inf) == 0
    assert rank_for_error(32, 64, 0) == 32
    assert rank_for_error(32, 64, -1) == 32
    stage = StageModel(GPT_STAGE)
    for value in (stage.error(0), 2 * stage.error(0)):
        assert stage.rank_for_error(value) == 0
    assert stage.rank_for_error(0) == 256


def test_stage_error_is_the_sum_of_squares() -> None:
    shapes = [(64, 64), (64, 256), (512, 64), (64, 64), (8, 100)]
    stage = StageModel(shapes)
    for rank in (0, 1, 7.5, 40, 63.9):
        direct = math.sqrt(sum(error(m, n, rank) ** 2 for m, n in shapes))
        assert stage.error(rank) == pytest.approx(direct, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 600), st.integers(1, 600)), min_size=1, max_size=6),
    fraction=st.floats(1e-6, 1 - 1e-6),
)
def test_stage_inverse_to_1e_9(shapes: list[tuple[int, int]], fraction: float) -> None:
    stage = StageModel(shapes)
    rank = fraction * stage.max_rank
    assert abs(stage.rank_for_error(stage.error(rank)) - rank) < 1e-9


def test_next_rank_keeps_the_error() -> None:
    stage = StageModel(GPT_STAGE)
    assert next_rank(stage, 64, -3.0, -3.0) == pytest.approx(64, abs=1e-9)
    for change in (-0.1, -0.02, 0.05, 0.3):
        rank = next_rank(stage, 64, -3.0, -3.0 + change)
        assert math.exp(change) * stage.error(rank) == pytest.approx(stage.error(64), rel=1e-9)
        assert (rank > 64) == (change > 0)


def test_next_rank_saturates_without_overflow() -> None:
    stage = StageModel(GPT_STAGE)
    for change in (-1.0, -800.0, -1e300):
        assert next_rank(stage, 64, 0.0, change) == 0
    assert next_rank(stage, 64, 0.0, 1e300) == 256
    assert next_rank(stage, 64, 0.0, 8.0) > 255
    assert next_rank(stage, 256, 0.0, -1e300) == 256
    assert next_rank(stage, 400, 0.0, 0.0) == 256
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            next_rank(stage, 64, 0.0, bad)
