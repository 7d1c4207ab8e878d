"""Predicted against actual error of low-rank approximations over training."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from paper_figures import inputs, style, texts

TABLES = ("rank_model/table.csv", "rank_model/errors.csv")
CAPTION = """\
**Predicted error.** What is predicted is the Frobenius error at rank r of the gradient G of one worker and of M = G +
E (E: error feedback), averaged over the workers as it is approximated, matrices of the transformer layers, under
PowerSGD of a fixed rank. σ·g(r) takes entries to be independent; *anchored* is CQM's rule, the error at the rank in
use at the end of warm-up, moved by exp(H − H₀) and g; *spectral* reads PowerSGD's singular values at the rank in use
and continues them geometrically, *from exact values* does the same from those of M itself. Actual errors are those of
the best approximation of rank r, and what PowerSGD left: its own at the rank in use, at another rank the relative
error of the run with that rank and the same seed. (a): predicted over actual during training, at ranks above the one
in use; 1 is exact. (b): size of the logarithm of that ratio by rank, after warm-up. Numbers are in
``rank_model/table.csv`` and ``errors.csv``; ranks per nat, how stiffly CQM's rank follows, in ``stiffness.csv``."""
LAYERS = "<layers>"
# predictor: label, colour, marker
PREDICTORS = {
    "iid": ("σ·g(r)", "#D55E00", "o"),
    "anchored": ("anchored (CQM)", "#0072B2", "s"),
    "spectral": ("spectral", "#009E73", "^"),
    "tail": ("spectral from exact values", "#882255", "v"),
}
# matrix and its actual error: label, line
ACTUAL = {
    ("mean", "powersgd"): ("mean of M, PowerSGD's error", "-"),
    ("mean", "best"): ("mean of M, best of rank r", "--"),
    ("gradient", "best"): ("G, best of rank r", ":"),
}


def draw(results: Path) -> Figure:
    """(a) ratio over training, (b) error of the prediction by rank."""
    table, errors = inputs.tables(results, TABLES)
    fig, axes = style.figure(2, 1, height=5.8)
    variant = shown(table)
    rows = table[(table["variant"] == variant) & (table["status"] == "ok")]
    errors = errors[errors["variant"] == variant]
    over_training(axes[0], errors)
    by_rank(axes[1], rows)
    lines = [Line2D([], [], color="#444444", linestyle=line) for _, line in ACTUAL.values()]
    texts.legend_below(axes[0], 0.45, 0.24)
    texts.legend_below(axes[1], 0.45, 0.24, (lines, [label for label, _ in ACTUAL.values()]))
    label = rows["label"].iloc[0] if len(rows) else "no finished run"
    note = texts.count_note(
        rows["seed"].nunique(),
        f"{label}, matrices of the layers, medians; bands and bars: quartiles, of M with PowerSGD's error. "
        "(a): ranks above the one in use. (b): after warm-up; vertical: the rank in use.",
        bars="",
        scale=results.name,
    )
    return texts.finish(fig, axes, finding(errors), note)


def finding(errors: pd.DataFrame) -> str:
    """Sentence on how far both forms of CQM are off at the end of training, against PowerSGD's error."""
    rows = errors[(errors["kind"] == LAYERS) & (errors["ranks"] == "above") & (errors["actual"] == "powersgd")]
    last = rows[rows["window"] == rows["window"].max()].groupby("predictor")["ratio_median"].median()
    if not {"iid", "anchored"} <= set(last.index):
        return "Predicted and actual error"
    return f"At the end σ·g(r) predicts {last['iid']:.2g} times the error, anchored {last['anchored']:.2g} times"


def shown(table: pd.DataFrame) -> str:
    """The variant of the middle rank among those with a rank."""
    ranks = table.dropna(subset=["rank_in_use"]).groupby("variant", sort=False)["rank_in_use"].first()
    ordered = ranks.sort_values(kind="stable").index
    return str(ordered[(len(ordered) - 1) // 2]) if len(ordered) else ""


def predictions(rows: pd.DataFrame) -> Iterator[tuple[pd.DataFrame, bool, dict[str, Any], str]]:
    """Rows of every predictor and kind of error, whether that error is PowerSGD's, their look, and their marker."""
    for name, (_, colour, marker) in PREDICTORS.items():
        for (matrix, actual), (_, line) in ACTUAL.items():
            part = rows[(rows["predictor"] == name) & (rows["of"] == matrix) & (rows["actual"] == actual)]
            yield part, actual == "powersgd", {"color": colour, "linestyle": line}, marker


def over_training(ax: Axes, errors: pd.DataFrame) -> None:
    """Predicted / actual over iterations, above the rank in use."""
    rows = errors[(errors["kind"] == LAYERS) & (errors["ranks"] == "above")]
    for part, powersgd, look, _ in predictions(rows):
        ax.plot(part["window"], part["ratio_median"], **look)
        if powersgd:
            ax.fill_between(
                part["window"], part["ratio_q1"], part["ratio_q3"], color=look["color"], alpha=0.18, linewidth=0
            )
    for label, colour, marker in PREDICTORS.values():
        ax.plot([], [], color=colour, marker=marker, markersize=3, label=label)
    ax.axhline(1, color="#444444", linewidth=0.6)
    style.log_y(ax)
    ax.set(xlabel="iteration", ylabel="predicted / actual error", title="over training")


def by_rank(ax: Axes, table: pd.DataFrame) -> None:
    """Size of the logarithm of predicted / actual; medians over seeds."""
    rows = table[(table["matrices"] == LAYERS) & (table["ranks"] == "one")]
    for part, powersgd, look, marker in predictions(rows):
        sizes = part.groupby("rank")[["abs_log_median", "abs_log_q1", "abs_log_q3"]].median()
        middle, low, high = (sizes[name] for name in sizes)
        bars = [middle - low, high - middle] if powersgd else None
        ax.errorbar(sizes.index, middle, yerr=bars, marker=marker, markersize=3, **look)
    in_use = table["rank_in_use"].median()
    if pd.notna(in_use):
        ax.axvline(in_use, color="#444444", linewidth=0.6)
    ax.set_xscale("log", base=2)
    style.plain(ax.xaxis, sorted(rows["rank"].dropna().unique()))
    ax.set_ylim(bottom=0)
    ax.set(xlabel="rank r", ylabel="|ln(predicted / actual)|", title="by rank")
