"""Correlations, slopes, quartiles and thinned series over finite values."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd

SMOOTHING = 10  # steps in the trailing mean of the training loss
CURVE_POINTS = 500  # a curve is thinned to about this many steps


def finite(first: object, second: object) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of which both are finite."""
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    keep = np.isfinite(a) & np.isfinite(b)
    return a[keep], b[keep]


def pearson(first: object, second: object) -> float:
    """Pearson correlation over the finite pairs; nan with fewer than three of them or a constant side."""
    a, b = finite(first, second)
    if a.size < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


def slope(x: object, y: object) -> float:
    """Least-squares slope of y over x; nan with fewer than two distinct points."""
    a, b = finite(x, y)
    if a.size < 2 or np.ptp(a) == 0:
        return math.nan
    a = a - a.mean()
    return float(np.dot(a, b - b.mean()) / np.dot(a, a))


def thin(count: int, keep: Iterable[int] = ()) -> list[int]:
    """Row numbers of an evenly thinned series of ``count`` rows, first, last and ``keep`` included."""
    if count == 0:
        return []
    step = max(1, count // CURVE_POINTS)
    return sorted({*range(0, count, step), count - 1, *keep})


def quartiles(values: pd.Series) -> dict[str, float]:
    """Median and quartiles of the finite values."""
    x = values.dropna()
    low, mid, high = np.percentile(x, (25, 50, 75)) if len(x) else (math.nan,) * 3
    return {"median": float(mid), "q1": float(low), "q3": float(high)}


def root_mean_square(values: pd.Series) -> float:
    """Root of the mean square of the finite values; nan without any."""
    return float(np.sqrt((values.dropna().to_numpy(dtype=float) ** 2).mean())) if values.notna().any() else math.nan
