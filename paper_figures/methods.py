"""Validation loss against bytes sent, all methods: the main comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import style

TABLES = ("methods/table.csv", "methods/summary.csv")
CAPTION = """\
**Methods compared at equal training length.** The price of compression: validation loss above uncompressed
training of the same seed (nats; 0.01 nats are about 1 % of perplexity) against the gradient bytes that one
replica hands to data-parallel collectives, as a share of an fp32 all-reduce; of a bf16 one, which is what most
training sends, they are twice as much. Left and down is better. Markers are means over seeds, bars their range,
small dots the runs; fixed-rank PowerSGD carries its rank. EDGC's bytes contain its uncompressed warm-up. Where
a method is more than 0.3 nats off, panel (b) shows those below 0.1. Runs without a result are named below the
figure and stay in ``methods/table.csv``. So are policies that did not act: their runs are those of a fixed
rank, and of the policy nothing was tested. Differences smaller than the bars say nothing."""
TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)


# Where the worst method is so far off that the others lie on one line, a second panel shows these.
FAR, NEAR = 0.3, 0.1  # nats


def draw(results: Path) -> Figure:
    """Gap to uncompressed training (mean and range over seeds) against the share of the fp32 bytes sent."""
    runs = style.read(results, "methods")
    summary = style.read(results, "methods", "summary.csv")
    shown = summary[summary["gap_nats_mean"].notna()]
    near = shown[shown["gap_nats_mean"] < NEAR]
    zoomed = shown["gap_nats_mean"].max() > FAR and len(near) > 1
    shape: dict[str, Any] = {"width": style.TEXT, "width_ratios": [2, 3]} if zoomed else {"width": style.COLUMN}
    fig, axes = style.figure(1, 1 + zoomed, height=3.4, **shape)
    low, high = 100 * runs["bytes_ratio"].min(), 100 * runs["bytes_ratio"].max()
    for ax in axes:
        points(ax, shown, runs, ranks_from=NEAR if zoomed and ax is axes[0] else float("-inf"))
        ax.axhline(0, color="#444444", linewidth=0.6)
        ax.set_xscale("log")
        style.plain(ax.xaxis, [t for t in TICKS if low / 2 <= t <= 2 * high])
        ax.set_xlim(low / 1.35, high * 1.35)
        ax.margins(y=0.14)
        ax.set_xlabel(style.share_of_bytes())
    axes[0].set_ylabel("validation loss\nabove uncompressed (nats)")
    if zoomed:
        least = min(0.0, near["gap_nats_min"].min())
        axes[1].set(ylim=(least - 0.1 * (NEAR - least), NEAR), title=f"those below {NEAR:g} nats")
        axes[1].set_ylabel("nats")
        style.letter(axes)
    fig.legend(*style.handles(axes[0]), loc="outside upper center", ncols=3 if zoomed else 2, columnspacing=1.0)
    style.annotate(
        fig,
        list(shown["n_ok"]),
        bars="bars: min to max, dots: runs",
        scale=results.name,
        extra="\n".join(part for part in (lost(runs), style.untested(runs, 120 if zoomed else 62)) if part),
    )
    return fig


def points(ax: Axes, summary: pd.DataFrame, runs: pd.DataFrame, *, ranks_from: float = float("-inf")) -> None:
    """A marker per variant with its range, a dot per run, and the rank of PowerSGD as text.

    ``ranks_from``: no rank at variants that are closer to uncompressed training, in nats.
    """
    named: set[str] = set()
    everyone = [row for _, row in summary.iterrows()]
    for _, row in summary.iterrows():
        look = style.look(runs[runs["variant"] == row["variant"]].iloc[0])
        x, y = 100 * row["bytes_ratio_mean"], row["gap_nats_mean"]
        mine = runs[(runs["variant"] == row["variant"]) & (runs["status"] == "ok")]
        label = look.label if look.key not in named else None
        named.add(look.key)
        spread = [[y - row["gap_nats_min"]], [row["gap_nats_max"] - y]]
        ax.errorbar(x, y, yerr=spread, markersize=5.5, label=label, **look.marks())
        percent = 100 * mine["bytes_ratio"]
        ax.plot(percent, mine["gap_nats"], ".", color=look.colour, markersize=2.5, alpha=0.6)
        rank = mine["rank"].iloc[0] if len(mine) else float("nan")
        if mine["method"].eq("powersgd").any() and y >= ranks_from:
            others = [other for other in everyone if other is not row and crowds(row, other)]
            place: dict[str, Any] = {
                "xytext": (-6 if others else 6, 0),  # beside the bar, not on it
                "textcoords": "offset points",
                "ha": "right" if others else "left",
                "va": "center",
            }
            style.outline(ax.annotate(f"r={rank:g}", (x, y), fontsize=style.MIN_FONT, **place))


def crowds(row: pd.Series, other: pd.Series) -> bool:
    """Whether ``other`` lies where a text to the right of ``row`` would be."""
    apart = other["bytes_ratio_mean"] / row["bytes_ratio_mean"]
    return bool(1 < apart < 1.15 and abs(other["gap_nats_mean"] - row["gap_nats_mean"]) < NEAR / 12)


def lost(runs: pd.DataFrame) -> str:
    """Runs without a result, in words: a figure must not hide them."""
    other = runs[runs["status"] != "ok"]
    if other.empty:
        return ""
    names = [f"{row['label']} seed {row['seed']} ({row['status']})" for _, row in other.iterrows()]
    return "without result: " + ",\n".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
