"""What a measure finds for a claim of the paper, and how it reads a scale's tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from experiments.common import written_tables

Place = tuple[str, float]  # recorded entropy, Gbit/s per node
COUNTS = ("runs", "windows", "tasks", "bandwidths", "entropies")


class Missing(Exception):
    """There is no evidence for a claim; the text says why."""


@dataclass(frozen=True)
class Measured:
    """Values of one claim. ``kind`` is ``measured`` or ``simulated`` as the evidence itself says."""

    values: tuple[float | str, ...]
    evidence: str  # path below the scale's folder
    note: str = ""
    kind: str = "measured"
    extrapolated: bool = False  # to what the claim is about: then a claim is supported in part at best
    acted: bool | None = None  # whether the policy did that the claim is about; None: it is about none
    n: int = 0  # seeds; where settings have different numbers of them, the fewest
    n_most: int | None = None  # and the most, where that is another number
    more_evidence: tuple[str, ...] = ()  # tables that the values are from, too, as ``evidence`` names one
    counts: dict[str, int] = field(default_factory=dict)  # of other things, by ``COUNTS``
    grid: tuple[Place, ...] = ()  # of simulated values: what each is of
    assumed: tuple[tuple[float, float], ...] = ()  # (bandwidth, value) at the mean rank that is assumed
    readings: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # other meanings of the claim, on the grid
    things: str = "runs"  # what each of the values is of
    gap: tuple[float, float, float] | None = None  # of words that judge one: its mean and 95 % t interval, nats


def read(root: Path, relative: str) -> pd.DataFrame:
    """A table below the folder of a scale; ``Missing`` where there is none or it has no rows."""
    path = root / relative
    if not path.is_file():
        raise Missing(f"{relative} does not exist")
    frame = written_tables.read(path)
    if frame.empty:
        raise Missing(f"{relative} has no rows")
    return frame


def join(*parts: str) -> str:
    """One note of several, some of them perhaps empty."""
    return "; ".join(part for part in parts if part)


def numbers(column: pd.Series) -> tuple[float, ...]:
    """The finite values of a column."""
    return tuple(float(v) for v in column if math.isfinite(v))
