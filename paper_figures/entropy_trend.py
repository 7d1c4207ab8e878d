"""Entropy of gradients through training, log sigma per parameter, and the gradient norm around clipping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import inputs, style, texts

TABLES = ("entropy_trend/trend.csv", "entropy_trend/parameters.csv", "entropy_trend/norms.csv")
CAPTION = """\
**Entropy of gradients through training, GPT and BERT.** Top: change of the entropy since the first probe,
mean over parameters weighted by their size, one line per estimator; the differential estimators (histogram,
Gaussian, Vasicek) follow the gradient's scale, the discrete entropy of the authors' released code cannot,
because it is computed over [min, max]. Middle: log σ of every parameter (thin) and the mean of its group
(thick). Bottom: gradient norm before and after clipping. Everything above was measured before clipping. How
to read it: a line that falls and stays down supports the paper's observation; a line that falls first and
rises later does so only for the first part of training. The verdict in ``entropy_trend/table.csv`` follows
rules fixed before the runs."""
PLAIN = ("gpt", "bert")  # the other variants change one condition each, see entropy_conditions
GROUP_ORDER = ("embedding", "position", "qkv", "projection", "fc1", "fc2", "head", "norm", "other")


def draw(results: Path) -> Figure:
    """One column of panels per run variant (GPT, BERT): entropy change, log sigma, gradient norm."""
    trend = inputs.read(results, "entropy_trend", "trend.csv")
    parameters = inputs.read(results, "entropy_trend", "parameters.csv")
    norms = inputs.read(results, "entropy_trend", "norms.csv")
    trend = trend[trend["variant"].isin(PLAIN)]
    variants = list(dict.fromkeys(trend["variant"]))
    fig, parts = style.stacked([2.0, 2.5, 1.9])
    grid = np.array([np.ravel(part.subplots(1, len(variants), sharey=True)) for part in parts], dtype=object)
    moves = []
    for column, variant in enumerate(variants):
        rows = trend[trend["variant"] == variant]
        whole = rows[rows["group"] == "<all>"]
        moves.append(f"{rows['label'].iloc[0]} {moved(whole)}")
        entropy(grid[0, column], whole)
        sigmas(grid[1, column], parameters[parameters["variant"] == variant])
        clipping(grid[2, column], norms[norms["variant"] == variant])
        grid[0, column].set_title(f"{rows['label'].iloc[0]}, entropy")
        grid[1, column].set_title(f"{rows['label'].iloc[0]}, log σ")
        grid[2, column].set_title(f"{rows['label'].iloc[0]}, norm")
        for ax in grid[:, column]:
            ax.set_xlabel("iteration")
    for ax, text in zip(
        grid[:, 0],
        ("change of entropy\nsince first probe (nats)", "log σ (σ in units of\nthe gradient)", "gradient norm (L2)"),
        strict=True,
    ):
        ax.set_ylabel(text)
    for part, row in zip(parts, grid, strict=True):
        part.legend(*style.handles(*row), loc="outside upper center", ncols=3, columnspacing=0.8, handlelength=1.5)
    texts.letter(list(grid.flat))
    texts.headline(fig, f"How entropy moves in the second half: {', '.join(moves)}")
    counts = trend.groupby("variant")["seed"].nunique()
    texts.annotate(
        fig,
        list(counts),
        bars="lines: mean, bands: 95 % t interval of the mean",
        scale=results.name,
        extra="Measured before clipping. Entropy: mean over parameters weighted by size. Log σ: thin lines are single "
        "parameters (first seed), thick lines the mean of their group.",
    )
    return fig


def moved(rows: pd.DataFrame) -> str:
    """In words: how far the histogram entropy, mean over seeds, has moved in the second half of the run."""
    mean = rows.groupby("iteration")["entropy_histogram"].mean().dropna()
    if len(mean) < 2:
        return "not known"
    change = mean.iloc[-1] - mean[mean.index >= mean.index[-1] / 2].iloc[0]
    return f"{change:+.2g} nats".replace("-", "−")


def entropy(ax: Axes, rows: pd.DataFrame) -> None:
    """Change since the first probe, per estimator: the estimators' levels differ, their movement is compared."""
    for name, look in style.ESTIMATORS.items():
        table = rows.pivot_table(index="iteration", columns="seed", values=f"entropy_{name}")
        if table.empty:
            continue
        table = table - table.iloc[0]
        wide = 2.4 if name == "histogram" else 1.2  # Vasicek's lies on it
        line: dict[str, Any] = {"color": look.colour, "linestyle": look.line, "linewidth": wide}
        ax.plot(table.index, table.mean(axis=1), label=look.label, **line)
        if table.shape[1] > 1:
            mean, half = table.mean(axis=1), table.apply(style.half_interval, axis=1)
            ax.fill_between(table.index, mean - half, mean + half, color=look.colour, alpha=0.2, linewidth=0)
    ax.axhline(0, color="#444444", linewidth=0.6)


def sigmas(ax: Axes, rows: pd.DataFrame) -> None:
    """Thin lines: parameters of the first seed; thick: mean of their group over parameters and seeds."""
    groups = [group for group in GROUP_ORDER if group in set(rows["group"])]
    colours = dict(zip(GROUP_ORDER, sns.color_palette("colorblind", len(GROUP_ORDER)), strict=True))
    first = rows[rows["seed"] == rows["seed"].min()]
    for (_, _, group), line in first.groupby(["stage", "parameter", "group"]):
        ax.plot(line["iteration"], line["log_sigma"], color=colours[group], linewidth=0.4, alpha=0.5)
    lines = ("-", "--", "-.", ":")
    for group in groups:
        mean = rows[rows["group"] == group].groupby("iteration")["log_sigma"].mean()
        look = lines[GROUP_ORDER.index(group) % len(lines)]
        ax.plot(mean.index, mean, color=colours[group], linewidth=1.6, linestyle=look, label=group)


def clipping(ax: Axes, rows: pd.DataFrame) -> None:
    """Norm before and after clipping, mean over seeds."""
    mean = rows.groupby("iteration")[["grad_norm", "grad_norm_clipped"]].mean()
    ax.plot(mean.index, mean["grad_norm"], color="#000000", linewidth=0.7, label="before clipping")
    ax.plot(
        mean.index, mean["grad_norm_clipped"], color="#D55E00", linewidth=0.9, linestyle="--", label="after clipping"
    )
    ax.set_yscale("log")
    style.plain(ax.yaxis)
