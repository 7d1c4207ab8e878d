"""A claim's number against a grid of simulated values, one for each bandwidth and recorded entropy.

No value of a grid stands for the others, so what is told of it is the range, where the rule holds, and between which
bandwidths the paper's number lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

Place = tuple[str, float]  # recorded entropy, Gbit/s per node


def text(values: Sequence[float]) -> str:
    """From the most that is saved to the least: ``-40 to -0.47``."""
    return f"{min(values):.4g} to {max(values):.4g}"


def by_entropy(values: Sequence[float], grid: Sequence[Place]) -> dict[str, list[tuple[float, float]]]:
    """(bandwidth, value), ascending in the bandwidth, by recorded entropy."""
    found: dict[str, list[tuple[float, float]]] = {}
    for value, (name, gbits) in zip(values, grid, strict=True):
        found.setdefault(name, []).append((gbits, value))
    return {name: sorted(points) for name, points in found.items()}


def crossed(points: Sequence[tuple[float, float]], number: float) -> list[str]:
    """Between which neighbouring bandwidths ``number`` lies, in words; ``points`` ascend in the bandwidth."""
    return [
        f"between {a:g} and {b:g} Gbit/s"
        for (a, first), (b, second) in pairwise(points)
        if (first - number) * (second - number) <= 0
    ]


def account(values: Sequence[float], grid: Sequence[Place], holds: Callable[[float], bool], number: float) -> str:
    """Where the rule holds, and where ``number`` itself lies, in words."""
    found = by_entropy(values, grid)
    named = [
        f"{name} at {', '.join(f'{gbits:g}' for gbits, value in points if holds(value))} Gbit/s"
        for name, points in found.items()
        if any(holds(value) for _, value in points)
    ]
    between = [f"{name} {where}" for name, points in found.items() for where in crossed(points, number)]
    where = f"holds for {sum(map(holds, values))} of {len(values)} values" + (f" ({'; '.join(named)})" if named else "")
    return f"{where}; {number:g} % itself {', '.join(between) or 'at no bandwidth'}"


def beside(assumed: Sequence[tuple[float, float]], number: float) -> str:
    """The range at the mean rank that is assumed, and where ``number`` lies in it, in words; empty without any."""
    if not assumed:
        return ""
    where = ", ".join(crossed(sorted(assumed), number)) or "at no bandwidth"
    return f"at a mean rank assumed half-way {text([value for _, value in assumed])} %, {number:g} % {where}"
