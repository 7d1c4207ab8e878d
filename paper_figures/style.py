"""One look for every figure: sizes, colours, markers, axes, and how long an error bar is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from paper_figures.families import ARCHITECTURES, ESTIMATORS, FAMILIES, MARKERS, Family, family, look, stage_colours

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ARCHITECTURES", "ESTIMATORS", "FAMILIES", "MARKERS", "Family", "family", "look", "stage_colours"]

COLUMN = 3.35  # inches, one column of a two-column page: every figure is as wide
TALLEST = 2.9 * COLUMN  # inches; a higher one does not fit a page beside its caption
MARGIN = 0.6  # inches that the title and the note of stacked parts take
FONT = 7.5  # points at print size; nothing is set below MIN_FONT
MIN_FONT = 7.0


def use() -> None:
    """Set the theme: call it before the first axes is made."""
    sns.set_theme(context="paper", style="whitegrid", font="DejaVu Sans")
    plt.rcParams.update(
        {
            "font.size": FONT,
            "axes.labelsize": FONT,
            "axes.titlesize": FONT,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "xtick.labelsize": MIN_FONT,
            "ytick.labelsize": MIN_FONT,
            "legend.fontsize": MIN_FONT,
            "legend.title_fontsize": MIN_FONT,
            "legend.frameon": True,
            "legend.framealpha": 0.85,
            "legend.edgecolor": "none",
            "legend.borderpad": 0.2,
            "legend.handlelength": 1.8,
            "legend.labelspacing": 0.25,
            "lines.linewidth": 1.2,
            "lines.markersize": 4,
            "axes.linewidth": 0.6,
            "grid.linewidth": 0.4,
            "grid.color": "#dddddd",
            "xtick.bottom": True,
            "ytick.left": True,
            "xtick.major.size": 2.5,
            "ytick.major.size": 2.5,
            "xtick.major.width": 0.6,
            "ytick.major.width": 0.6,
            "axes.formatter.useoffset": False,
            "errorbar.capsize": 2,
            "figure.dpi": 100,
            "savefig.dpi": 200,
            "pdf.fonttype": 42,
            "ps.fonttype": 42,
            "svg.hashsalt": "edgc",  # or names inside the file differ from one drawing to the next
            "figure.constrained_layout.use": True,
        }
    )


def figure(
    rows: int = 1, columns: int = 1, *, height: float | None = None, **options: object
) -> tuple[Figure, list[Axes]]:
    """A themed figure at its print size and its axes, row by row. ``height``: inches."""
    use()
    height = height if height is not None else 0.72 * COLUMN * rows / columns
    fig, axes = plt.subplots(rows, columns, figsize=(COLUMN, height), squeeze=False, **options)
    return fig, list(axes.flat)


def stacked(heights: Sequence[float]) -> tuple[Figure, list[SubFigure]]:
    """A themed figure and its parts, one above the other, each with panels and a legend of its own. Inches."""
    use()
    fig = plt.figure(figsize=(COLUMN, sum(heights) + MARGIN))
    parts = fig.subfigures(len(heights), 1, height_ratios=list(heights), squeeze=False)
    return fig, list(parts.flat)


def half_interval(values: pd.Series) -> float:
    """Half the 95 % t interval of the mean of some values; nan with fewer than two."""
    from scipy.stats import t

    known = values.dropna()
    return float(t.ppf(0.975, len(known) - 1) * known.sem()) if len(known) > 1 else math.nan


def handles(*axes: Axes) -> tuple[list[Any], list[str]]:
    """Legend entries of one or several panels, each label once, drawn without error bars."""
    found: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle[0] if isinstance(handle, ErrorbarContainer) else handle)
    return list(found.values()), list(found)


def plain(axis: Axis, ticks: Sequence[float] | None = None) -> None:
    """Write the ticks of a log axis as plain numbers; ``ticks`` fixes where they are."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if ticks is None:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    else:
        axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())


def plain_linear(axis: Axis, most: int = 5) -> None:
    """At most ``most`` ticks on a linear axis, as plain numbers with a true minus sign and no trailing zeros."""
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(value, 12) + 0:g}".replace("-", "−")))
