"""Learning curves of study ``tuning``: learning rates of uncompressed training."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from paper_figures import learning_curves

TABLES = ("tuning/curves.csv", "tuning/table.csv")
CAPTION = """\
**Learning curves: learning rates of uncompressed training.** (a): training loss (trailing mean of ten steps)
of every run against iterations, and its validation losses. Below, a row per setting, against the gradient bytes
sent so far (left) and against iterations (right). Thin: a run; thick: mean over the seeds. The steep start is cut
off; runs without a result are named below the figure."""


def draw(results: Path) -> Figure:
    """Loss over iterations and over bytes, of every run."""
    return learning_curves.draw(results, "tuning")
