"""Learning curves of study ``policies``: policies and fixed ranks."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from paper_figures import learning_curves

TABLES = ("policies/curves.csv", "policies/table.csv")
CAPTION = """\
**Learning curves: policies and fixed ranks.** (a): training loss (trailing mean of ten steps) of every run against
iterations, and its validation losses. Below, EDGC and its own ranks in other orders, with fp32 factors, then with int8
factors; then the other policies, likewise. Left: the training loss against the gradient bytes sent so far; right: the
training loss minus that of the uncompressed run of the same seed at the same iteration, on the same batches (linear
below 0.01 nats). Thin: a run; thick: mean over runs. Black: uncompressed training. The steep start is cut off; runs
without a result are named below the figure."""


def draw(results: Path) -> Figure:
    """Loss over iterations and bytes, and above uncompressed training, of every run."""
    return learning_curves.draw(results, "policies", rows)


def rows(variants: pd.DataFrame) -> list[list[str]]:
    """EDGC beside its own ranks in other orders, then the other policies; fp32 and int8 factors apart."""
    found: dict[tuple[bool, bool], list[str]] = {}
    for variant in variants.index:
        name = variant.removesuffix("_int8")
        other = name != "cqm" and learning_curves.order_of(name) is None
        found.setdefault((other, name != variant), []).append(variant)
    return [found[key] for key in sorted(found)]
