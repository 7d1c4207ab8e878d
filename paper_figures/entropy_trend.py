"""Entropy of gradients through training, log sigma per parameter, and the gradient norm around clipping."""

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
    trend, parameters, norms = (inputs.read(results, *table.split("/")) for table in TABLES)
    trend = trend[trend["variant"].isin(PLAIN)]
    variants = list(dict.fromkeys(trend["variant"]))
    fig, parts = style.stacked([2.0, 2.5, 1.9])
    grid = np.array([np.ravel(part.subplots(1, len(variants), sharey=True)) for part in parts], dtype=object)
    moves = []
    for axes, variant in zip(grid.T, variants, strict=True):
        rows = trend[trend["variant"] == variant]
        whole, label = rows[rows["group"] == "<all>"], rows["label"].iloc[0]
        moves.append(f"{label} {moved(whole)}")
        entropy(axes[0], whole)
        sigmas(axes[1], parameters[parameters["variant"] == variant])
        clipping(axes[2], norms[norms["variant"] == variant])
        for ax, name in zip(axes, ("entropy", "log σ", "norm"), strict=True):
            ax.set(title=f"{label}, {name}", xlabel="iteration")
    labels = "change of entropy\nsince first probe (nats)", "log σ (σ in units of\nthe gradient)", "gradient norm (L2)"
    for part, row, label in zip(parts, grid, labels, strict=True):
        row[0].set_ylabel(label)
        part.legend(*style.handles(*row), loc="outside upper center", ncols=3, columnspacing=0.8, handlelength=1.5)
    note = texts.count_note(
        trend.groupby("variant")["seed"].nunique(),
        "Measured before clipping. Entropy: mean over parameters weighted by size. Log σ: thin lines are single "
        "parameters (first seed), thick lines the mean of their group.",
        bars="lines: mean, bands: 95 % t interval of the mean",
        scale=results.name,
    )
    return texts.finish(fig, list(grid.flat), f"How entropy moves in the second half: {', '.join(moves)}", note)


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
        mean = table.mean(axis=1)
        wide = 2.4 if name == "histogram" else 1.2  # Vasicek's lies on it
        ax.plot(mean.index, mean, label=look.label, color=look.colour, linestyle=look.line, linewidth=wide)
        if table.shape[1] > 1:
            half = table.apply(style.half_interval, axis=1)
            ax.fill_between(mean.index, mean - half, mean + half, color=look.colour, alpha=0.2, linewidth=0)
    ax.axhline(0, color="#444444", linewidth=0.6)


def sigmas(ax: Axes, rows: pd.DataFrame) -> None:
    """Thin lines: parameters of the first seed; thick: mean of their group over parameters and seeds."""
    colours = dict(zip(GROUP_ORDER, sns.color_palette("colorblind", len(GROUP_ORDER)), strict=True))
    first = rows[rows["seed"] == rows["seed"].min()]
    for (_, _, group), line in first.groupby(["stage", "parameter", "group"]):
        ax.plot(line["iteration"], line["log_sigma"], color=colours[group], linewidth=0.4, alpha=0.5)
    for place, group in enumerate(GROUP_ORDER):
        if group in set(rows["group"]):
            mean = rows[rows["group"] == group].groupby("iteration")["log_sigma"].mean()
            look: dict[str, Any] = {"linewidth": 1.6, "linestyle": ("-", "--", "-.", ":")[place % 4]}
            ax.plot(mean.index, mean, color=colours[group], label=group, **look)


def clipping(ax: Axes, rows: pd.DataFrame) -> None:
    """Norm before and after clipping, mean over seeds."""
    mean = rows.groupby("iteration")[["grad_norm", "grad_norm_clipped"]].mean()
    ax.plot(mean["grad_norm"], color="#000000", linewidth=0.7, label="before clipping")
    ax.plot(mean["grad_norm_clipped"], color="#D55E00", linewidth=0.9, linestyle="--", label="after clipping")
    style.log_y(ax)
