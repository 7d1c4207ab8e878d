"""edgc.timing.alignment: the fit of T(r) and the ranks per pipeline stage."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgc.timing.alignment import LinearTime, align

INFINITE = (math.inf,) * 4


def test_fit_reports_its_residual() -> None:
    # Errors of +-0.1 that are orthogonal to (1, r) leave the line as it is; the mean time is 2.5.
    points = [(1, 1.1), (2, 1.9), (3, 2.9), (4, 4.1)]
    line = LinearTime.fit(points)
    assert line.seconds_per_rank == pytest.approx(1.0)
    assert line.seconds_fixed == pytest.approx(0.0)
    assert line.residual == pytest.approx(0.1 / 2.5)


def test_fit_of_falling_times_is_flat() -> None:
    line = LinearTime.fit([(4, 2.0), (8, 1.0)])
    assert (line.seconds_per_rank, line.seconds_fixed, line.residual) == (0.0, 1.5, 0.5 / 1.5)


@pytest.mark.parametrize(
    ("first", "backward", "r_max", "expected"),
    [
        (16, 0.0, 64, (16, 16, 16, 16)),  # no head start: T^-1(T(r)) must not be floored below r
        (16, 0.08, 64, (16, 24, 32, 40)),
        (16, 0.099, 64, (16, 24, 32, 44)),  # 25.9, 35.8, 45.7: floored
        (16, 0.04, 64, (16, 20, 24, 28)),  # whole multiples stay; the published code would take the next above
        (48, 0.08, 64, (48, 56, 64, None)),  # r_max itself is allowed, above it the stage sends uncompressed
        (64, 0.08, 64, (64, None, None, None)),
        (64, 0.0, 64, (64, 64, 64, 64)),
        (6, 0.01, 64, (6, 6, 8, 8)),  # a fixed rank off the multiple: floored, not below stage 0's
    ],
)
def test_equal_stages(first: int, backward: float, r_max: int, expected: tuple[int | None, ...]) -> None:
    times = [LinearTime(0.01, 0.3)] * 4
    assert align(first, 4, [backward] * 4, times, INFINITE, r_max) == expected


def test_uncompressed_where_the_budget_allows_it() -> None:
    # Budgets: 0.46, 0.54, 0.62, 0.70 seconds.
    times = [LinearTime(0.01, 0.3)] * 4
    assert align(16, 4, [0.08] * 4, times, (0.1, 0.6, 0.6, 0.6), 64) == (16, 24, None, None)
    assert align(16, 4, [0.08] * 4, times, (0.1, 0.54, 0.62, 0.70), 64) == (16, 24, 32, 40)


def test_unequal_stages_share_the_finish_time_not_the_rank() -> None:
    slow, fast = LinearTime(0.02, 0.3), LinearTime(0.005, 0.3)
    ranks = align(16, 3, [0.0] * 3, [LinearTime(0.01, 0.3), slow, fast], INFINITE[:3], 64)
    assert ranks == (16, 8, 32)
    assert align(16, 3, [0.0] * 3, [LinearTime(0.01, 0.3), slow, fast], INFINITE[:3], 64, r_min=12) == (
        16,
        12,
        32,
    )
    very_slow = LinearTime(1.0, 5.0)
    assert align(16, 2, [0.0] * 2, [LinearTime(0.01, 0.3), very_slow], INFINITE[:2], 64) == (16, 4)


def test_a_stage_without_a_slope_follows_stage_0() -> None:
    assert align(16, 2, [0.1] * 2, [LinearTime(0.01, 0.3), LinearTime(0.0, 0.2)], INFINITE[:2], 64) == (
        16,
        16,
    )


@settings(max_examples=300, deadline=None)
@given(
    ranks=st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 8), st.integers(0, 40), st.integers(0, 40)),
    stages=st.integers(1, 8),
    line=st.builds(LinearTime, st.floats(1e-7, 1.0), st.floats(0, 10)),
    backward=st.floats(0, 5),
    dense=st.floats(0, 50),
)
def test_equal_stages_properties(
    ranks: tuple[int, int, int, int], stages: int, line: LinearTime, backward: float, dense: float
) -> None:
    multiple, low, steps, head = ranks
    r_min, first, r_max = low * multiple, (low + steps) * multiple, (low + steps + head) * multiple
    aligned = align(first, stages, [backward] * stages, [line] * stages, [dense] * stages, r_max, multiple, r_min)
    assert len(aligned) == stages and aligned[0] == first
    previous, uncompressed = first, False
    for stage, rank in enumerate(aligned):
        budget = line.time(first) + stage * backward
        if rank is None:
            uncompressed = True
            assert budget > dense or line.rank(budget) > r_max - 1e-6
            continue
        assert not uncompressed, "later stages have more time, so they stay uncompressed"
        assert r_min <= rank and previous <= rank <= r_max and rank % multiple == 0
        assert line.time(rank) <= budget * (1 + 1e-6), "the stage must not finish after stage 0"
        previous = rank
