"""edgc.control.policies: what each rule asks for, and the limits on a step."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgc.control.policies.cqm import CQMConfig
from edgc.control.policies.given import scheduled
from edgc.control.policies.released import by_change
from edgc.control.policies.spectral import spectral


@pytest.mark.parametrize(
    ("first", "previous", "entropy", "expected"),
    [
        ([0.0, 2.0], 1.0, 1.0, 16.0),  # no change: r_min
        ([0.0, 2.0], 1.0, 0.0, 40.0),  # half of the first change; the sign does not matter
        ([0.0, 2.0], 0.0, 2.0, 64.0),
        ([0.0, 2.0], 0.0, -6.0, 64.0),  # at most r_max
        ([0.0, 1e-320], -1e308, 1e308, 64.0),
        ([1.0, 1.0], 1.0, 2.0, None),  # division by zero in the published code
        ([1.0], 1.0, 1.0, None),
        ([0.0, 2.0], None, 1.0, None),
    ],
)
@pytest.mark.parametrize("quantity", ["entropy", "loss"])
def test_the_rule_of_changes(
    first: list[float], previous: float | None, entropy: float, expected: float | None, quantity: str
) -> None:
    target = by_change(quantity, 16, 64, first, previous, entropy)
    assert target.target == (None if expected is None else pytest.approx(expected))
    assert ("loss" if quantity == "loss" else "entrop") in target.reason


@given(
    rows=st.dictionaries(st.integers(0, 1000), st.integers(1, 64), min_size=1, max_size=6),
    iterations=st.integers(1, 10_000),
    where=st.floats(0, 1),
)
@example(rows={0: 8, 100: 4}, iterations=30, where=0.1)
def test_a_schedule_has_the_rank_of_the_last_share_that_is_over(
    rows: dict[int, int], iterations: int, where: float
) -> None:
    thousandths = sorted(rows.items())
    schedule = [(share / 1000, rank) for share, rank in thousandths]
    iteration = round(where * iterations)
    over = [rank for share, rank in thousandths if share * iterations <= 1000 * iteration]
    assert scheduled(schedule, iteration, iterations) == (over[-1] if over else schedule[0][1])


@pytest.mark.parametrize(
    ("target_error", "expected"),
    [
        (0.9, 4),
        (0.5, 8),  # exactly the square of 0.5
        (0.49, 12),
        (0.3, 12),
        (0.2, 16),
        (0.05, 16),  # none is enough: the largest
        (1.0, 4),
    ],
)
def test_spectral_takes_the_smallest_rank_that_is_enough(target_error: float, expected: int) -> None:
    rank, reason = spectral((0.64, 0.25, 0.09, 0.04), (4, 8, 12, 16), target_error)
    assert rank == expected
    assert ("does not meet" in reason) == (target_error < 0.2)


@pytest.mark.parametrize(
    ("current", "target", "limit", "expected"),
    [
        (32, 33.9, 8, 32),
        (32, 34.0, 8, 36),
        (32, 63.0, 8, 40),
        (32, -5.0, 8, 24),
        (32, 1e308, 100, 64),
        (32, 63.0, 7, 36),  # 7 holds one multiple of 4
        (32, 17.9, 100, 16),
    ],
)
def test_step(current: int, target: float, limit: int, expected: int) -> None:
    assert CQMConfig(step_limit=limit).step(current, target, 16, 64) == expected
