"""edgc.timing.stage_times: order of the timings, their end, and the r_max that follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edgc.timing.stage_times import RankSearch, bytes_limit


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
    assert bytes_limit(shapes, multiple) == expected


@pytest.mark.parametrize(("factor_bits", "gradient_bits"), [(32, 32), (16, 32), (8.25, 16), (4.25, 32), (32, 16)])
def test_bytes_limit_counts_the_types_that_are_sent(factor_bits: float, gradient_bits: int) -> None:
    shapes = [(64, 64), (64, 256)]
    limit = bytes_limit(shapes, 4, factor_bits=factor_bits, gradient_bits=gradient_bits)

    def smaller(rank: int) -> bool:
        return factor_bits * sum(rank * (m + n) for m, n in shapes) < gradient_bits * sum(m * n for m, n in shapes)

    assert 0 < limit < 64 and smaller(limit)
    assert limit + 4 == 64 or not smaller(limit + 4)


@pytest.mark.parametrize(
    ("limit", "seconds", "probed", "r_max"),
    [
        (124, linear(0.5), [0, 4, 8, 16, 32, 64], 40),  # 0.01 r + 0.1 = 0.5
        (124, linear(0.579), [0, 4, 8, 16, 32, 64], 44),  # 47.9, floored
        (124, linear(0.42), [0, 4, 8, 16, 32], 32),  # slower by rounding alone: that rank is kept
        (124, linear(9.0), [0, 4, 8, 16, 32, 64, 124], 124),  # never slower: the last that saves bytes
        (16, lambda rank: (1.0,), [0, 4, 8, 16], 16),  # an equal time is not slower
        (124, linear(0.01), [0, 4], 0),  # even the smallest rank is slower
        (60, lambda rank: (0.01 * rank + 0.1, 9.0) if rank else (0.35, 0.0), [0, 4, 8, 16, 32], 24),  # stage 0 decides
    ],
)
@pytest.mark.parametrize("repeats", [1, 2])
def test_doubling_ranks_until_slower(
    limit: int, seconds: Callable[[int], tuple[float, ...]], probed: list[int], r_max: int, repeats: int
) -> None:
    search = RankSearch(limit, 4, repeats, stop_at_crossing=True)
    assert run(search, seconds) == [rank for rank in probed for _ in range(repeats)]
    assert search.r_max()[0] == r_max
    assert search.times == [list(seconds(rank)) for rank in probed]


def test_the_shortest_of_repeated_timings_counts() -> None:
    search = RankSearch(8, 4, 3, stop_at_crossing=True)
    for seconds in (5.0, 1.0, 2.0, 7.0, 0.5, 9.0, 3.0, 0.75, 0.8):
        search.observe((seconds,))
    assert search.probe is None
    assert search.times == [[1.0], [0.5], [0.75]]


def test_without_stopping_all_ranks_up_to_the_limit_are_timed() -> None:
    assert run(RankSearch(24, 4, 1, stop_at_crossing=False), linear(dense=0.0)) == [0, 4, 8, 16, 24]
    assert run(RankSearch(4, 4, 1, stop_at_crossing=False), linear(dense=0.0)) == [0, 4, 8], "a line needs two"
