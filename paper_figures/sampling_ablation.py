"""Sampling rates of the entropy estimate: agreement, error and cost over the grid of alpha and beta."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import style

NAME = "sampling_ablation"


def draw(results: Path) -> Figure:
    """Three grids: CC, RMSE in nats, and seconds per step relative to reading everything."""
    table = style.read(results, "sampling_ablation")
    timings = style.read(results, "sampling_ablation", "timings.csv")
    sampling = "strided" if "strided" in set(table["sampling"]) else str(table["sampling"].iloc[0])
    fine = table[(table["status"] == "ok") & (table["sampling"] == sampling)]
    cost = timings[(timings["status"] == "ok") & (timings["sampling"] == sampling)].copy()
    cost["percent"] = 100 + cost["change_percent"]
    fig, axes = style.figure(1, 3, width=style.TEXT, height=2.75)
    grid(axes[0], fine, "cc", "CC (no unit)", "{:.3f}", reverse=False)
    grid(axes[1], fine, "rmse_nats", "RMSE of windows (nats)", "{:.3f}", reverse=True)
    grid(axes[2], cost, "percent", "time of the estimate (%)", "{:.1f}", reverse=True)
    for ax in axes:
        ax.set_xlabel("β, share of entries read (no unit)")
        ax.set_ylabel("α, share of iterations")
    style.letter(axes)
    counts = list(fine.groupby(["alpha", "beta"]).size())
    decided = fine.dropna(subset=["decisions_differing"])
    first = decided[
        (decided["seed"] == decided["seed"].min()) & ((decided["alpha"] < 1) | (decided["beta"] < 1))
    ]
    text = ", ".join(
        f"α={row['alpha']:g} β={row['beta']:g}: {row['decisions_differing']:g} of {row['decisions_compared']:g}"
        for _, row in first.head(4).iterrows()
    )
    style.annotate(
        fig,
        counts,
        bars="cells: mean over seeds",
        scale=results.name,
        extra=f"{sampling.capitalize()} sampling; (a), (b) stage 0; (c) 100 %: α = β = 1. Darker is better."
        + (f"\nDecisions unlike α = β = 1 (first seed): {text}." if text else ""),
    )
    return fig


def grid(ax: Axes, rows: pd.DataFrame, column: str, title: str, number: str, *, reverse: bool) -> None:
    """A cell per (alpha, beta) with its number written in it; darker is better, a dash marks what is undefined."""
    cells = rows.pivot_table(index="alpha", columns="beta", values=column, aggfunc="mean", dropna=False)
    cells = cells.sort_index(ascending=False)
    values = cells.to_numpy(dtype=float)
    shown = np.ma.masked_invalid(values)
    ax.imshow(shown, cmap=plt.get_cmap("cividis" if reverse else "cividis_r"), aspect="auto")
    ax.set_xticks(range(cells.shape[1]), [f"{beta:g}" for beta in cells.columns])
    ax.set_yticks(range(cells.shape[0]), [f"{alpha:g}" for alpha in cells.index])
    ax.grid(False)
    finite = values[np.isfinite(values)]
    middle = (finite.min() + finite.max()) / 2 if finite.size else 0.0
    for (i, j), value in np.ndenumerate(values):
        dark = np.isfinite(value) and ((value < middle) == reverse) and value != middle
        text = number.format(value) if np.isfinite(value) else "–"
        ax.text(j, i, text, ha="center", va="center", color="white" if dark else "black", fontsize=style.FONT)
    ax.set_title(title)


if __name__ == "__main__":
    style.main(draw)
