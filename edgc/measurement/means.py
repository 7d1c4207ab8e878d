"""Running means of what a rank measures, and the same means over ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from edgc.compressors.base import Statistics
from edgc.measurement.spectral import Curve
from edgc.timing.benchmark import seconds


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


@dataclass
class CurveMean:
    """Running mean, point by point, of the curves of one length given to it; those with a value that is not finite
    do not count."""

    totals: list[float] = field(default_factory=list)
    count: int = 0

    def add(self, curve: Sequence[float]) -> None:
        if all(map(math.isfinite, curve)):
            old = self.totals if self.count else [0.0] * len(curve)
            self.totals = [a + b for a, b in zip(old, curve, strict=True)]
            self.count += 1

    @property
    def value(self) -> Curve | None:
        """None if there was no curve."""
        return tuple(total / self.count for total in self.totals) if self.count else None


def mean(values: Iterable[float]) -> float:
    """Mean of the finite values, in their order; nan if there is none."""
    result = Mean()
    for value in values:
        result.add(value)
    return result.value


def mean_curve(curves: Iterable[Sequence[float]]) -> Curve | None:
    """Mean of the finite curves, in their order; None if there is none, or if they have no points."""
    result = CurveMean()
    for curve in curves:
        result.add(curve)
    return result.value or None


class WindowTimes:
    """What the reductions of this rank took at up to ``MOST`` evenly spread iterations of a window.

    They are kept by place in the window, so that those of several ranks can be compared iteration by iteration. On a
    GPU the times are read when somebody asks for them.
    """

    MOST = 64

    def __init__(self, window: int) -> None:
        self.window, self.stride = window, -(-window // self.MOST)
        self._slots: list[Statistics | float] = []
        self.clear()

    def clear(self) -> None:
        self._slots = [math.nan] * -(-self.window // self.stride)

    def add(self, iteration: int, done: Statistics) -> None:
        """Take in what one iteration (1-based) has done, if it is one of those that are kept."""
        place, rest = divmod((iteration - 1) % self.window, self.stride)
        if rest == 0:
            self._slots[place] = done

    @property
    def values(self) -> list[float]:
        """Seconds by place, nan where nothing is known: compress + communicate + decompress."""
        self._slots = [item if isinstance(item, float) else seconds(item) for item in self._slots]
        return [item for item in self._slots if isinstance(item, float)]

    @values.setter
    def values(self, values: Iterable[float]) -> None:
        self._slots = [float(value) for value in values]


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
