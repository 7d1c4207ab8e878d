"""Learning curves of study ``policies``: policies and fixed ranks."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from paper_figures import learning_curves

TABLES = ("policies/curves.csv", "policies/table.csv")
CAPTION = """\
**Learning curves: policies and fixed ranks.** (a): training loss (trailing mean of ten steps) of every run against
iterations, and its validation losses. Below, a row per group of variants; left: the training loss against the
gradient bytes sent so far; right: the training loss minus that of the uncompressed run of the same seed at the
same iteration, on the same batches (linear below 0.01 nats). Thin: a run; thick: mean over the seeds. Black:
uncompressed training. The steep start is cut off; runs without a result are named below the figure."""


def draw(results: Path) -> Figure:
    """Loss over iterations and bytes, and above uncompressed training, of every run."""
    return learning_curves.draw(results, "policies")
