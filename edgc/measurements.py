"""Running means of what a rank measures, and the same means over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from edgc.spectral import Curve


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
