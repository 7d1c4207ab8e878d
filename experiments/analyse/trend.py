"""One noisy trajectory described by rules fixed before any run: does it fall, where, does it rise again."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from experiments.analyse.statistics import finite, slope

ESTIMATORS = ("histogram", "gaussian", "vasicek", "released")
TOLERANCE = 0.05  # nats; smaller changes count as none
STEEP_SHARE = 0.9  # the steep phase ends where this share of the fall to the minimum is done
DESCRIPTION = ("start", "minimum", "iteration_minimum", "end", "steep_end",
               "slope_first_per_100", "slope_after_per_100", "noise")  # fmt: skip
SMOOTH = 3  # probes in the centred mean that minimum and end are read from


def _sorted(iterations: Iterable[float], values: Iterable[float]) -> tuple[np.ndarray, np.ndarray]:
    x, y = finite(list(iterations), list(values))
    order = np.argsort(x, kind="stable")
    return x[order], y[order]


def smoothed(y: np.ndarray) -> np.ndarray:
    """Centred mean over three points.

    The first point stays as it is, because the fall there is the steepest; the last gets the mean of the last
    three, which is also what ``end`` is, so that a steady fall has its minimum at the end.
    """
    if y.size < SMOOTH:
        return y.copy()
    inner = np.convolve(y, np.ones(SMOOTH) / SMOOTH, mode="valid")
    return np.concatenate([y[:1], inner, inner[-1:]])


def steep_end(iterations: Iterable[float], values: Iterable[float]) -> float:
    """Iteration at which 90 % of the fall from the first point to the (smoothed) minimum is done.

    The first iteration when the trajectory does not fall by more than the tolerance; nan without points.
    """
    x, y = _sorted(iterations, values)
    if x.size == 0:
        return math.nan
    s = smoothed(y)
    fall = s[0] - s.min()
    return float(x[0] if fall <= TOLERANCE else x[int(np.argmax(s <= s[0] - STEEP_SHARE * fall))])


def describe(iterations: Iterable[float], values: Iterable[float]) -> dict[str, Any]:
    """Start, minimum, end, slopes per 100 iterations, noise and verdict of a trajectory in nats.

    ``noise`` is the standard deviation of successive differences after the steep phase over sqrt 2.
    ``falls``: the end (mean of the last three points) is below the start by more than the tolerance;
    ``rises_again``: the end is above the smoothed minimum by more than the larger of tolerance and noise.
    Verdicts: falls; falls, then rises; rises; flat; too few probes (< 4).
    """
    x, y = _sorted(iterations, values)
    if x.size < 4:
        empty = {"falls": "", "rises_again": "", "verdict": "too few probes"}
        return dict.fromkeys(DESCRIPTION, math.nan) | {"probes": int(x.size)} | empty
    s, turn = smoothed(y), steep_end(x, y)
    first, after = x <= turn, x >= turn
    steps = np.diff(y[after])
    noise = float(steps.std(ddof=1) / math.sqrt(2)) if steps.size > 1 else math.nan
    end, lowest = float(y[-SMOOTH:].mean()), int(np.argmin(s))
    limit = max(TOLERANCE, noise) if math.isfinite(noise) else TOLERANCE
    falls, dips = s[0] - end > TOLERANCE, s[0] - s[lowest] > TOLERANCE
    rises_again = dips and end - s[lowest] > limit
    if dips:
        verdict = "falls, then rises" if rises_again else "falls"
    else:
        verdict = "rises" if end - s[0] > limit else "flat"
    slopes = [100 * slope(x[part], y[part]) for part in (first, after)]
    numbers = (float(y[0]), float(s[lowest]), float(x[lowest]), end, turn, *slopes, noise)
    answers = {"falls": "yes" if falls else "no", "rises_again": "yes" if rises_again else "no", "verdict": verdict}
    return dict(zip(DESCRIPTION, numbers, strict=True)) | {"probes": int(x.size)} | answers
