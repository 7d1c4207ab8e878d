"""edgc.measurement.report: what a stage's reductions took, and its error curve, from what its ranks have kept."""

from __future__ import annotations

import math
import random
import statistics
from itertools import pairwise

import pytest

from edgc.compressors import Statistics
from edgc.measurement.report import Window, WindowTimes, report, stage_seconds
from edgc.runtime.channel import Stopwatch

NAN = math.nan


def done(seconds: float, skipped: int = 0) -> Statistics:
    parts = [Stopwatch(share * seconds) for share in (0.5, 0.25, 0.25)]
    return Statistics(compress=parts[0], communicate=parts[1], decompress=parts[2], skipped=skipped)


def test_times_are_kept_by_their_place_in_the_window() -> None:
    times = WindowTimes(4)
    for iteration in (5, 7, 8):
        times.add(iteration, done(float(iteration)))
    assert repr(times.values) == repr([5.0, NAN, 7.0, 8.0])
    times.add(9, done(9.0, skipped=1))  # a reduction that was given up says nothing
    assert repr(times.values) == repr([NAN, NAN, 7.0, 8.0])
    other = WindowTimes(4)
    other.values = times.values
    assert repr(other.values) == repr(times.values)
    times.clear()
    assert repr(times.values) == repr([NAN] * 4)


@pytest.mark.parametrize("window", [1, 63, 64, 65, 100, 1000, 1001])
def test_a_long_window_keeps_evenly_spread_iterations(window: int) -> None:
    times = WindowTimes(window)
    for iteration in range(3 * window + 1, 4 * window + 1):
        times.add(iteration, done(float(iteration)))
    kept = times.values
    assert min(window, WindowTimes.MOST / 2) <= len(kept) <= WindowTimes.MOST
    assert len({b - a for a, b in pairwise(kept)}) <= 1
    assert kept[0] == 3 * window + 1 and kept[-1] > 4 * window - times.stride


def test_the_replica_that_waited_least_counts_and_the_median_iteration() -> None:
    assert stage_seconds([(0.0, [1.0, 5.0, 2.0]), (0.0, [3.0, 2.0, 9.0])]) == 2.0
    # Two groups of replicas, as under tensor parallelism: each has its own last one.
    rows = [(0.0, [1.0, 1.0]), (1.0, [3.0, 4.0]), (0.0, [2.0, 2.0]), (1.0, [4.0, 3.0])]
    assert stage_seconds(rows) == 2.0


def test_waiting_for_a_late_replica_is_no_time_of_the_network() -> None:
    generator = random.Random(0)
    late = [[generator.expovariate(2.0) for _ in range(51)] for _ in range(8)]
    rows = [(0.0, [0.1 + max(all_[i] for all_ in late) - own[i] for i in range(51)]) for own in late]
    assert statistics.median(rows[0][1]) > 0.5
    assert stage_seconds(rows) == pytest.approx(0.1)


def test_what_is_not_known_does_not_count() -> None:
    assert stage_seconds([(0.0, [1.0, NAN, 3.0]), (0.0, [1.0, 2.0, 3.0])]) == 2.0
    assert math.isnan(stage_seconds([(0.0, [NAN, NAN, 3.0]), (0.0, [1.0, 2.0, 3.0])]))
    assert math.isnan(stage_seconds([(NAN, [1.0, 2.0, 3.0])])), "a rank without another replica sends nothing"
    assert math.isnan(stage_seconds([]))


def test_noise_of_single_iterations_does_not_move_the_median_far() -> None:
    generator = random.Random(1)
    for _ in range(300):
        rows = [(0.0, [generator.gauss(1.0, 0.1) + (generator.random() < 0.2) for _ in range(64)])] * 2
        assert abs(stage_seconds(rows) - 1.0) < 0.15


def test_error_curves_are_the_mean_over_the_ranks_of_a_stage() -> None:
    rows = []
    for stage, curve in ((0, (0.8, 0.5)), (1, None), (0, (0.6, 0.1)), (0, (NAN, 0.7))):
        window = Window(4)
        window.curve = curve
        place = {"stage": stage, "replicas": NAN, "probe_seconds": NAN, "backward_seconds": NAN}
        rows.append(place | window.row((4, 8), False))
    found, _ = report(rows, 2, (4, 8), watches=False, probed=False, gate=())
    assert found.error_curve == (pytest.approx((0.7, 0.3)), None)
