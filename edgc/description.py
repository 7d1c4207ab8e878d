"""Look of a method in figures, and examples of it for the tests of all methods; they stand in the method's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Look(NamedTuple):
    """Look of a method in every figure: its legend, and in matplotlib's words for colour, marker and line."""

    label: str
    colour: str
    marker: str
    line: str = "-"


@dataclass(frozen=True)
class Example:
    """Settings of a method that the tests of all methods run.

    Attributes:
        settings: beside ``method`` (and ``policy``).
        sent: bytes that a rank sends in a group of two for one fp32 gradient of so many rows and columns.
        exact: within 1e-6 of its norm, what is sent plus what is kept is what came in.
        bound: where the result is exact only on average, the largest error of an entry, as a share of the largest entry
            that any worker has; None elsewhere.
    """

    sent: Callable[[int, int], float]
    settings: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True
    bound: float | None = None
