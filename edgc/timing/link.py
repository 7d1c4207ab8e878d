"""Network as two numbers, and the gain of compression on it.

A reduction that computes for c seconds and sends B bytes per rank in k rounds, each of which waits for the one before,
takes ``c + k * latency + B / bandwidth`` seconds. Bytes are counted as in :class:`edgc.runtime.channel.Channel`, by
the ring or direct formula, so the bandwidth is that of one rank's sending. Plain arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Cost:
    """Cost of one reduction on one rank: seconds of its own computing, bytes sent, dependent rounds."""

    seconds: float
    bytes: float
    rounds: int


@dataclass(frozen=True)
class Link:
    """Latency of a round in seconds and bandwidth in bytes per second.

    ``residual`` is the root mean square of the fit's relative errors, 0 for a link that was given.
    """

    latency: float
    bandwidth: float
    residual: float = 0.0

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> Self:
        """Least squares of the relative errors through (bytes sent, seconds), with no part below 0.

        A time that does not grow with the size gives an infinite bandwidth.

        Raises:
            ValueError: fewer than two different sizes, or a time that is not above 0.
        """
        if len({size for size, _ in points}) < 2 or not all(0 < t < math.inf for _, t in points):
            raise ValueError(f"a link needs two sizes and times above 0, not {list(points)}")
        u = [1 / seconds for _, seconds in points]
        v = [size / seconds for size, seconds in points]
        uu, uv, vv = (math.fsum(a * b for a, b in zip(*pair, strict=True)) for pair in ((u, u), (u, v), (v, v)))
        determinant = uu * vv - uv * uv
        latency = (math.fsum(u) * vv - math.fsum(v) * uv) / determinant
        slope = (math.fsum(v) * uu - math.fsum(u) * uv) / determinant
        if latency < 0:
            latency, slope = 0.0, math.fsum(v) / vv
        elif slope <= 0:
            latency, slope = math.fsum(u) / uu, 0.0
        errors = [(latency + slope * size) / seconds - 1 for size, seconds in points]
        residual = math.sqrt(math.fsum(error**2 for error in errors) / len(errors))
        return cls(latency, 1 / slope if slope > 0 else math.inf, residual)

    def seconds(self, cost: Cost) -> float:
        """Time of a reduction over this link."""
        return cost.seconds + cost.rounds * self.latency + cost.bytes / self.bandwidth


def break_even(dense: Cost, compressed: Cost, latency: float) -> float:
    """Bandwidth in bytes per second below which ``compressed`` is the faster one; 0 if never, ``inf`` if always."""
    saved = dense.bytes - compressed.bytes
    lost = compressed.seconds - dense.seconds + (compressed.rounds - dense.rounds) * latency
    if lost <= 0:
        return math.inf if saved >= 0 else 0.0
    return max(0.0, saved / lost)
