"""edgc.timing.rank_search: what is timed, when it ends, and the r_max that follows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest

from edgc.timing.rank_search import RankSearch, bytes_limit


def run(search: RankSearch, seconds: Callable[[int], tuple[float, ...]]) -> list[int]:
    probed = []
    while (probe := search.probe) is not None:
        probed.append(probe)
        search.observe(seconds(probe))
        assert len(probed) < 100
    return probed


def linear(dense: float, slope: float = 0.01, fixed: float = 0.1) -> Callable[[int], tuple[float, ...]]:
    return lambda rank: (slope * rank + fixed,) if rank else (dense,)


@pytest.mark.parametrize(
    ("shapes", "multiple", "expected"),
    [
        ([(256, 256)], 4, 124),  # r * 512 < 65536
        ([(256, 256)], 1, 127),
        ([(64, 4096)], 4, 60),  # 64 * 4160 is more than the matrix itself
        ([(8, 8)], 4, 0),  # 4 * 16 saves nothing
        ([(9, 9)], 4, 4),
        ([(4, 4)], 8, 0),
        ([(256, 256), (16, 16)], 4, 124),
    ],
)
def test_bytes_limit(shapes: list[tuple[int, int]], multiple: int, expected: int) -> None:
    limit = bytes_limit(shapes, multiple)
    assert limit == expected

    def entries(rank: int) -> int:
        return sum(min(rank, m, n) * (m + n) for m, n in shapes)

    dense = sum(m * n for m, n in shapes)
    assert limit == 0 or entries(limit) < dense
    assert entries(limit + multiple) >= dense


@pytest.mark.parametrize("factor_bits", [32, 16, 8.25, 4.25])
@pytest.mark.parametrize("gradient_bits", [32, 16])
def test_bytes_limit_reckons_in_the_types_that_are_sent(factor_bits: float, gradient_bits: int) -> None:
    shapes = [(64, 64), (64, 256)]
    bits = {"factor_bits": factor_bits, "gradient_bits": gradient_bits}
    limit = bytes_limit(shapes, 4, **bits)

    def sent(rank: int) -> float:
        return factor_bits * sum(rank * (m + n) for m, n in shapes)

    dense = gradient_bits * sum(m * n for m, n in shapes)
    assert 0 < limit < 64 and sent(limit) < dense
    assert limit + 4 == 64 or sent(limit + 4) >= dense


def test_doubling_ranks_until_slower() -> None:
    search = RankSearch(124, 4, 2, stop_at_crossing=True)
    assert run(search, linear(dense=0.5)) == [0, 0, 4, 4, 8, 8, 16, 16, 32, 32, 64, 64]
    rank, reason = search.r_max(4)
    assert rank == 40  # 0.01 r + 0.1 = 0.5
    assert "40.0" in reason


def test_crossing_is_interpolated_and_floored() -> None:
    search = RankSearch(124, 4, 1, stop_at_crossing=True)
    run(search, linear(dense=0.579))
    assert search.r_max(4)[0] == 44  # 47.9


def test_a_crossing_just_above_a_rank_keeps_that_rank() -> None:
    search = RankSearch(124, 4, 1, stop_at_crossing=True)
    run(search, linear(dense=0.42))
    assert search.r_max(4)[0] == 32


def test_equal_time_counts_as_not_slower() -> None:
    search = RankSearch(16, 4, 1, stop_at_crossing=True)
    assert run(search, lambda rank: (1.0,)) == [0, 4, 8, 16]
    assert search.r_max(4)[0] == 16


def test_never_slower_gives_the_last_rank_that_saves_bytes() -> None:
    search = RankSearch(124, 4, 1, stop_at_crossing=True)
    assert run(search, linear(dense=9.0)) == [0, 4, 8, 16, 32, 64, 124]
    assert search.r_max(4)[0] == 124


def test_smallest_rank_slower_gives_zero() -> None:
    search = RankSearch(124, 4, 2, stop_at_crossing=True)
    assert run(search, linear(dense=0.01)) == [0, 0, 4, 4]
    rank, reason = search.r_max(4)
    assert rank == 0
    assert "rank 4" in reason
    assert search.lines() is None


def test_the_shortest_of_repeated_timings_counts() -> None:
    search = RankSearch(8, 4, 3, stop_at_crossing=True)
    for seconds in (5.0, 1.0, 2.0, 7.0, 0.5, 9.0, 3.0, 0.75, 0.8):
        search.observe((seconds,))
    assert search.probe is None
    assert search.uncompressed() == [1.0]
    lines = search.lines()
    assert lines is not None
    assert lines[0].time(4) == pytest.approx(0.5)
    assert lines[0].time(8) == pytest.approx(0.75)


def test_stage_0_decides_and_every_stage_gets_a_line() -> None:
    search = RankSearch(60, 4, 1, stop_at_crossing=True)
    run(search, lambda rank: (0.01 * rank + 0.1, 0.03 * rank + 0.2) if rank else (0.35, 0.0))
    assert search.r_max(4)[0] == 24
    lines = search.lines()
    assert lines is not None
    assert [line.seconds_per_rank for line in lines] == pytest.approx([0.01, 0.03])
    assert [line.seconds_fixed for line in lines] == pytest.approx([0.1, 0.2])
    assert search.uncompressed() == [0.35, 0.0]


def test_without_stopping_all_ranks_up_to_the_limit_are_timed() -> None:
    assert run(RankSearch(24, 4, 1, stop_at_crossing=False), linear(dense=0.0)) == [0, 4, 8, 16, 24]
    single = RankSearch(4, 4, 1, stop_at_crossing=False)
    assert run(single, linear(dense=0.0)) == [0, 4, 8]
    assert single.lines() is not None


def test_refuses_bad_timings() -> None:
    search = RankSearch(8, 4, 1, stop_at_crossing=True)
    for bad in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="finite"):
            search.observe((bad,))
    assert not search.started
    run(search, linear(dense=0.5))
    with pytest.raises(ValueError, match="over"):
        search.observe((1.0,))


@pytest.mark.parametrize("stop", range(13))
def test_resumed_search_goes_on_as_if_never_stopped(stop: int) -> None:
    whole, part = (RankSearch(124, 4, 2, stop_at_crossing=True) for _ in range(2))
    seconds = linear(dense=0.5)
    expected = run(whole, seconds)
    for _ in range(stop):
        assert part.probe is not None
        part.observe(seconds(part.probe))
    resumed = RankSearch(124, 4, 2, stop_at_crossing=True)
    resumed.load_state_dict(json.loads(json.dumps(part.state_dict())))
    assert run(resumed, seconds) == expected[stop:]
    assert resumed.r_max(4) == whole.r_max(4)
    assert resumed.lines() == whole.lines()
