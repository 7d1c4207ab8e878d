"""Our values for the claims on the paper's clusters: of every bandwidth and every recorded entropy, none for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pandas as pd

from experiments.verdicts import ranges
from experiments.verdicts.evidence import Measured, join, numbers, read


def _cluster(root: Path, column: str, *others: tuple[str, str]) -> Measured:
    """Percent change, a value for each bandwidth and recorded entropy; ``others`` are columns told in the note."""
    relative = "gpt2_12p1b_h100/traces.csv"
    frame = read(root, relative).dropna(subset=[column])
    grid = tuple(zip(frame["entropy"].astype(str), frame["gbits_per_second"].astype(float), strict=True))
    values = numbers(-frame[column])
    medians: dict[str, list[str]] = {}
    for name, median in (-frame[column]).groupby(frame["entropy"], sort=False).median().sort_values().items():
        medians.setdefault(f"{median:.2g}", []).append(str(name))
    note = join(
        "median over bandwidths " + ", ".join(f"{median} ({', '.join(names)})" for median, names in medians.items()),
        *(f"{what} {ranges.text(numbers(-frame[other]))} %" for what, other in others),
    )
    counts = {"bandwidths": frame["gbits_per_second"].nunique(), "entropies": frame["entropy"].nunique()}
    return Measured(values, relative, note, "simulated", counts=counts, grid=grid)


def _assumed(root: Path, relative: str, where: Mapping[str, object], column: str) -> tuple[tuple[float, float], ...]:
    """(bandwidth, value) at the mean rank that is assumed half-way between the limits."""
    frame = read(root, relative)
    rows = frame[(frame[list(where)] == pd.Series(where)).all(axis=1)]
    return tuple(zip(rows["gbits_per_second"].astype(float), numbers(-rows[column]), strict=True))


def cluster_communication(root: Path) -> Measured:
    """Change of the slowest stage's time for communication under the ranks that EDGC's controller takes."""
    column = "reduction_communication_percent"
    found = _cluster(root, column, ("compression included", "reduction_with_compress_percent"))
    at = {"method": "edgc", "stage": "slowest"}
    return replace(found, assumed=_assumed(root, "gpt2_12p1b_h100/table.csv", at, column))


def cluster_training_time(root: Path) -> Measured:
    """Change of the simulated step under the ranks that EDGC's controller takes, reductions after backward."""
    column = "reduction_time_percent"
    found = _cluster(root, column, ("reductions beside backward", "reduction_time_overlap_percent"))
    at = {"method": "edgc", "overlap": False}
    return replace(found, assumed=_assumed(root, "gpt2_12p1b_h100/steps.csv", at, column))
