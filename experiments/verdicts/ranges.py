"""A claim's number against a grid of simulated values, one for each bandwidth and recorded entropy.

No value of a grid stands for the others, so what is told of it is the range, where the rule holds, and between which
bandwidths the paper's number lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def alike(found: Mapping[str, str]) -> list[str]:
    """``a, b words`` for each of the words that entropies have, in the order in which they come."""
    names: dict[str, list[str]] = {}
    for name, words in found.items():
        names.setdefault(words, []).append(name)
    return [f"{', '.join(which)} {words}" for words, which in names.items() if words]


def account(values: Sequence[float], grid: Sequence[Place], holds: Callable[[float], bool], number: float) -> str:
    """Where the rule holds, and where ``number`` itself lies, in words."""
    found = by_entropy(values, grid)
    where = {name: [f"{gbits:g}" for gbits, value in points if holds(value)] for name, points in found.items()}
    named = alike({name: f"at {', '.join(gbits)} Gbit/s" if gbits else "" for name, gbits in where.items()})
    between = alike({name: ", ".join(crossed(points, number)) for name, points in found.items()})
    holding = f"the rule holds for {sum(map(holds, values))} of {len(values)} values"
    if named:
        holding += f": {', and '.join(named)}"
    return f"{holding}; {number:g} % itself: {', and '.join(between) or 'at no bandwidth'}"


def beside(assumed: Sequence[tuple[float, float]], number: float) -> str:
    """The range at the mean rank that is assumed, and where ``number`` lies in it, in words; empty without any."""
    if not assumed:
        return ""
    where = ", ".join(crossed(sorted(assumed), number)) or "at no bandwidth"
    return f"at a mean rank assumed half-way {text([value for _, value in assumed])} %, {number:g} % {where}"
