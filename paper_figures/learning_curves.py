"""Loss against iterations and against bytes, of every run of a study at any scale; its figures name the study."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import style
from paper_figures.methods import lost

MOST = 8  # variants in a row of panels
BLACK = "#000000"
COLUMNS = (
    ("iteration", "train_loss", "iteration"),
    ("sent", "train_loss", "bytes sent so far\n({unit}, log scale)"),
    ("iteration", "above", "iteration"),
)
ABOVE = (-0.3, -0.1, -0.03, -0.01, 0, 0.01, 0.03, 0.1, 0.3, 1)  # ticks, nats
LINEAR = 0.01  # nats; the axis of differences is linear below and logarithmic above
CUT = 0.1  # share of the run after which the loss axis starts


def draw(results: Path, study: str) -> Figure:
    """A row per group of variants, a line per run: loss over iterations and over bytes, and, where the study has an
    uncompressed variant, which is drawn in every row, the training loss above that of the same seed."""
    curves = style.read(results, study, "curves.csv")
    runs = style.read(results, study)
    variants = runs.drop_duplicates("variant").set_index("variant")
    plain = [name for name in variants.index if variants["method"].nunique() > 1 and variants["method"][name] == "none"]
    rows = groups(variants.drop(plain[:1]))
    unit, size = ("GB", 1e9) if curves["bytes"].max() > 2e9 else ("MB", 1e6)
    curves = curves.assign(validation_loss=np.log(curves["validation_perplexity"]), sent=curves["bytes"] / size)
    curves["above"] = above(curves, plain[:1])
    columns = COLUMNS if plain else COLUMNS[:2]
    height = 1.0 + sum(max(1.5, 0.3 + 0.16 * (len(row) + 1)) for row in rows)
    fig, axes = style.figure(len(rows), len(columns), width=style.TEXT, height=height, sharex="col", sharey="col")
    for number, row in enumerate(rows):
        own = dict(zip(row, sns.color_palette("colorblind", MOST), strict=False))
        mine = axes[len(columns) * number : len(columns) * (number + 1)]
        for ax, (x, y, _) in zip(mine, columns, strict=True):
            for variant, colour in {**dict.fromkeys(plain[:1], BLACK), **own}.items():
                lines(ax, curves[curves["variant"] == variant], x, y, colour, name_of(variants, variant))
            ax.set_ylabel("loss above\nuncompressed (nats)" if y == "above" else "loss (nats)")
        mine[-1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    low, high = limits(curves)
    for ax, (x, y, label) in zip(axes[-len(columns) :], columns, strict=True):
        ax.set_xlabel(label.format(unit=unit))
        if x == "sent":
            least = curves.loc[curves["iteration"] >= CUT * curves["iteration"].max(), "sent"].min()
            log_bytes(ax, 0.8 * least, 1.2 * curves["sent"].max())
        if y == "above":
            least, most = curves["above"].min(), min(curves["above"].max(), 3.0)
            ax.set_yscale("symlog", linthresh=LINEAR, linscale=0.5)
            ax.set_yticks(ABOVE, [f"{tick:g}" for tick in ABOVE])
            ax.set_ylim(min(1.3 * least, -LINEAR), max(1.3 * most, LINEAR))
        else:
            ax.set_ylim(low, high)
    style.letter(axes)
    extra = f"Lines: training loss, trailing mean; circles: validation loss. Losses above {high:.2f} are cut off."
    if missing := lost(runs):
        extra += f"\n{missing}"
    seeds = list(runs.groupby("variant")["seed"].nunique())
    style.annotate(fig, seeds, bars="every run is a line", scale=results.name, extra=extra)
    return fig


def log_bytes(ax: Axes, low: float, high: float) -> None:
    """A log axis from ``low`` to ``high`` with powers of ten as ticks, and their double and fivefold where few fit."""
    ax.set_xscale("log")
    powers = [10.0**k for k in range(-3, 7)]
    all_ticks = [step * power for power in powers for step in (1, 2, 5) if low <= step * power <= high]
    style.plain(ax.xaxis, all_ticks if len(all_ticks) < 6 else [tick for tick in powers if low <= tick <= high])
    ax.set_xlim(low, high)


def above(curves: pd.DataFrame, plain: list[str]) -> pd.Series:
    """Training loss minus that of the uncompressed run of the same seed at the same iteration; nan without one."""
    place = ["seed", "iteration"]
    own = curves[curves["variant"].isin(plain)].drop_duplicates(place).set_index(place)["train_loss"]
    found = curves.join(own.rename("uncompressed"), on=place)
    return found["train_loss"] - found["uncompressed"]


def name_of(variants: pd.DataFrame, variant: str) -> str:
    """Its label, or what tells it apart from others of the same label."""
    row = variants.loc[variant]
    if variants["label"].is_unique:
        return str(row["label"])
    if "lr" not in row:
        return variant
    rate = f"learning rate {row['lr']:g}"
    return rate if variants["label"].nunique() == 1 else f"{row['label']}:\n{rate}"


def groups(variants: pd.DataFrame) -> list[list[str]]:
    """Variants by method, methods with few of them together, in rows of at most ``MOST``."""
    by = [list(group.index) for _, group in variants.groupby("method", sort=False)]
    many = [names for names in by if len(names) > 2]
    few = [name for names in by if len(names) <= 2 for name in names]
    rows = []
    for names in (*many, few):
        count = math.ceil(len(names) / MOST)
        rows += [list(part) for part in np.array_split(names, count)] if count else []
    return rows


def lines(ax: Axes, curves: pd.DataFrame, x: str, y: str, colour: Any, label: str) -> None:
    """The runs of one variant, a line each; beside losses the validation losses as circles."""
    for number, (_, run) in enumerate(curves.groupby("seed")):
        run = run.dropna(subset=[y])
        named = label if number == 0 else None
        ax.plot(run[x], run[y], color=colour, linewidth=0.8, alpha=0.7, label=named)
        if y != "above":
            at = run.dropna(subset=["validation_loss"])
            ax.plot(at[x], at["validation_loss"], "o", color=colour, markersize=2)


def limits(curves: pd.DataFrame) -> tuple[float, float]:
    """The range of losses from ``CUT`` of the run on, without what lies far above the others (diverging runs)."""
    late = curves[curves["iteration"] >= CUT * curves["iteration"].max()]
    high = late.groupby(["variant", "seed"])["train_loss"].max().median()
    low = min(late["train_loss"].min(), late["validation_loss"].min())
    return low - 0.05 * (high - low), high + 0.05 * (high - low)
