"""Validation loss against bytes sent, all methods: the main comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import style

NAME = "methods"
TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)


def draw(results: Path) -> Figure:
    """Gap to uncompressed training (mean and range over seeds) against the share of the fp32 bytes sent."""
    runs = style.read(results, "methods")
    summary = style.read(results, "methods", "summary.csv")
    fig, (ax,) = style.figure(height=3.3)
    shown = summary[summary["gap_nats_mean"].notna()]
    points(ax, shown, runs)
    ax.axhline(0, color="#444444", linewidth=0.6)
    ax.set_xscale("log")
    low, high = 100 * runs["bytes_ratio"].min(), 100 * runs["bytes_ratio"].max()
    ticks = [t for t in TICKS if low / 2 <= t <= 2 * high]
    style.plain(ax.xaxis, ticks)
    ax.set_xlim(low / 1.35, high * 1.35)
    ax.margins(y=0.14)
    ax.set_xlabel("gradient bytes sent (% of fp32, log scale)")
    ax.set_ylabel("validation loss\nabove uncompressed (nats)")
    fig.legend(*style.handles(ax), loc="outside upper center", ncols=2, columnspacing=1.0)
    style.annotate(
        fig,
        list(shown["n_ok"]),
        bars="bars: min to max, dots: runs",
        scale=results.name,
        extra=lost(runs),
    )
    return fig


def points(ax: Axes, summary: pd.DataFrame, runs: pd.DataFrame) -> None:
    """A marker per variant with its range, a dot per run, and the rank of fixed-rank variants as text."""
    named: set[str] = set()
    for _, row in summary.iterrows():
        look = style.look(runs[runs["variant"] == row["variant"]].iloc[0])
        x, y = 100 * row["bytes_ratio_mean"], row["gap_nats_mean"]
        mine = runs[(runs["variant"] == row["variant"]) & (runs["status"] == "ok")]
        label = look.label if look.key not in named else None
        named.add(look.key)
        spread = [[y - row["gap_nats_min"]], [row["gap_nats_max"] - y]]
        ax.errorbar(
            x,
            y,
            yerr=spread,
            color=look.colour,
            marker=look.marker,
            markersize=5.5,
            linestyle="",
            label=label,
        )
        ax.plot(
            100 * mine["bytes_ratio"], mine["gap_nats"], ".", color=look.colour, markersize=2.5, alpha=0.6
        )
        rank = mine["rank"].iloc[0] if len(mine) else float("nan")
        if pd.notna(rank):
            place: dict[str, Any] = {
                "xytext": (6, 0),  # beside the bar, not on it
                "textcoords": "offset points",
                "ha": "left",
                "va": "center",
            }
            style.outline(ax.annotate(f"r={rank:g}", (x, y), fontsize=style.MIN_FONT, **place))


def lost(runs: pd.DataFrame) -> str:
    """Runs without a result, in words: a figure must not hide them."""
    other = runs[runs["status"] != "ok"]
    if other.empty:
        return ""
    names = [f"{row['label']} seed {row['seed']} ({row['status']})" for _, row in other.iterrows()]
    return (
        "without result: " + ",\n".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    )


if __name__ == "__main__":
    style.main(draw)
