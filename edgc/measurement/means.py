"""Running means of what a rank measures, and the same means over ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgc.measurement.spectral import Curve


@dataclass
class Mean:
    """Running mean of the finite values given to it."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self.total += value
            self.count += 1

    @property
    def value(self) -> float:
        """nan if there was no value."""
        return self.total / self.count if self.count else math.nan


def mean(values: Iterable[float]) -> float:
    """Mean of the finite values, in their order; nan if there is none."""
    result = Mean()
    for value in values:
        result.add(value)
    return result.value


def mean_curve(curves: Iterable[Sequence[float]]) -> Curve | None:
    """Mean, point by point, of the finite curves of one length, in their order; None if there is none, or if they have
    no points."""
    finite = [curve for curve in curves if all(map(math.isfinite, curve))]
    return tuple(mean(points) for points in zip(*finite, strict=True)) or None


def stage_seconds(rows: Sequence[tuple[float, Sequence[float]]]) -> float:
    """What the reductions of one stage took, in seconds, from the times that its ranks have kept.

    At each iteration the replica that waited least counts, because the last to arrive waits for nobody; of the
    iterations the median, because what disturbs a few of them is no change of the network; and the mean of what the
    groups of replicas (one per tensor-parallel rank) say, as of their benchmarks.

    Args:
        rows: per rank the number of its group of replicas (nan: it has no other replica) and its times by place.

    Returns:
        nan unless at least half of the iterations are known.
    """
    groups: dict[float, list[Sequence[float]]] = {}
    for group, times in rows:
        if math.isfinite(group):
            groups.setdefault(group, []).append(times)
    medians = []
    for replicas in groups.values():
        least = [min(times) for times in zip(*replicas, strict=True) if all(map(math.isfinite, times))]
        if least and 2 * len(least) >= len(replicas[0]):
            medians.append(statistics.median(least))
    return mean(medians)
