"""Learning curves of study ``policies_long``: the longest runs."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from paper_figures import learning_curves
from paper_figures.learning_curves_policies import rows

TABLES = ("policies_long/curves.csv", "policies_long/table.csv")
CAPTION = """\
**Learning curves over eight million tokens.** (a): training loss (trailing mean of ten steps) of every run against
iterations, and its validation losses. Below, EDGC and its own ranks in other orders, with fp32 factors, then with int8
factors; then the other methods. Left: the training loss against the gradient bytes sent so far; right: the training
loss minus that of the uncompressed run of the same seed at the same iteration, on the same batches (linear below 0.01
nats). Thin: a run; thick: mean over runs. Black: uncompressed training. The steep start is cut off; runs without a
result are named below the figure."""


def draw(results: Path) -> Figure:
    """Loss over iterations and bytes, and above uncompressed training, of every run."""
    return learning_curves.draw(results, "policies_long", rows)
