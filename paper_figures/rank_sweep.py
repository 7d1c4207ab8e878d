"""Fixed ranks: time of the parts of the reduction, compression error, and validation loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.quickest import quickest
from paper_figures import inputs, style, texts

TABLES = ("rank_sweep/table.csv", "rank_sweep/timings.csv", "rank_sweep/fit.csv")
CAPTION = """\
**What a fixed rank costs.** Fixed-rank PowerSGD. (a): time per step of the slowest pipeline stage in
compression, communication and decompression, of the quickest seed of each rank, for other work on the
machine only adds time (median over steps, bars: quartiles), with the least-squares
line T(r) = a·r + c that stage alignment relies on and its largest relative residual; where an uncompressed
run is part of the study, its time shows the rank from which compression stops paying. Seconds belong to the
machine and network that measured them. (b): relative error in the second half of training of M, gradient
plus error feedback: what the mean over the workers lacks, ‖M̄ − M̂‖/‖M̄‖ (estimated from sketches; not
known of runs from before it was measured), and, lighter, what a worker keeps back of its own M, ‖E‖/‖M‖, in
which the differences between workers count. (c): validation perplexity at the end."""
PARTS = (
    ("compress", "compress", "#E69F00", "s", "--"),
    ("communicate", "communicate", "#56B4E9", "^", "-."),
    ("decompress", "decompress", "#009E73", "v", ":"),
    ("total", "total", style.FAMILIES["powersgd"].colour, "o", ""),
)


def draw(results: Path) -> Figure:
    """Seconds, relative error and validation loss against the rank."""
    table = inputs.read(results, "rank_sweep")
    timings = inputs.read(results, "rank_sweep", "timings.csv")
    fit = inputs.read(results, "rank_sweep", "fit.csv")
    fig, axes = style.figure(3, 1, height=7.2)
    seconds(axes[0], timings, fit)
    errors(axes[1], table)
    loss(axes[2], table)
    for ax in axes:
        ranks = sorted(table["rank"].dropna().unique())
        ax.set_xticks(ranks, [f"{rank:g}" for rank in ranks])
        ax.set_xlabel("rank r")
    texts.letter(axes)
    texts.headline(fig, seen(table))
    counts = list(table[table["status"] == "ok"].groupby("variant").size())
    known = {"windows (mean)": "mean_error_median", "steps (worker)": "worker_error_median"}
    over = [words for words, column in known.items() if table[column].notna().any()]
    other = table[table["status"] != "ok"]
    missing = ", ".join(f"{row['label']} seed {row['seed']} ({row['status']})" for _, row in other.iterrows())
    texts.annotate(
        fig,
        counts,
        bars=f"(c) {texts.INTERVAL}",
        scale=results.name,
        extra="(a) slowest stage, quickest seed, median over steps, bars: quartiles; line: fit T(r) = a·r + c.\n"
        f"(b) of the second half, medians over {' and '.join(over)}, bars: quartiles."
        + (f" Without result: {missing}." if missing else ""),
    )
    return fig


def seen(table: pd.DataFrame) -> str:
    """In words: the perplexity at the lowest and at the highest rank, and without compression."""
    fine = table[table["status"] == "ok"]
    means = fine[fine["rank"].notna()].groupby("rank")["validation_perplexity"].mean()
    if means.empty:
        return "What a fixed rank costs"
    dense = fine.loc[fine["rank"].isna(), "validation_perplexity"]
    plain = f", uncompressed {dense.mean():.0f}" if len(dense) else ""
    low, high = means.index[0], means.index[-1]
    return f"Perplexity {means.iloc[0]:.0f} at rank {low:g}, {means.iloc[-1]:.0f} at rank {high:g}{plain}"


def slowest(timings: pd.DataFrame) -> int:
    """The stage with the largest median total over all ranks."""
    total = timings[(timings["kind"] == "total") & timings["rank"].notna()]
    return int(total.groupby("stage")["seconds_median"].median().idxmax())


def seconds(ax: Axes, timings: pd.DataFrame, fit: pd.DataFrame) -> None:
    fine = quickest(timings[timings["status"] == "ok"])
    stage = slowest(fine)
    fine = fine[fine["stage"] == stage]
    for kind, label, colour, marker, line in PARTS:
        rows = fine[(fine["kind"] == kind) & fine["rank"].notna()].groupby("rank")
        median = 1e3 * rows["seconds_median"].median()
        low, high = 1e3 * rows["seconds_q1"].min(), 1e3 * rows["seconds_q3"].max()
        error = np.maximum(0, [median - low, high - median])
        ax.errorbar(median.index, median, yerr=error, color=colour, marker=marker, linestyle=line, label=label)
    total = fit[(fit["stage"] == stage) & (fit["kind"] == "total")].iloc[0]
    ranks = np.array([fine["rank"].min(), fine["rank"].max()])
    if np.isfinite(total["seconds_per_rank"]):
        fitted = 1e3 * (total["seconds_per_rank"] * ranks + total["seconds_fixed"])
        label = f"fit (largest residual {100 * total['residual_largest_share']:.0f} %)"
        ax.plot(ranks, fitted, color=style.FAMILIES["powersgd"].colour, linewidth=0.9, label=label)
    if np.isfinite(total["seconds_uncompressed"]):
        level = 1e3 * total["seconds_uncompressed"]
        look = style.FAMILIES["none"]
        ax.axhline(level, color=look.colour, linewidth=1.0, linestyle="--", label="uncompressed")
    ax.set_ylabel("time per step (ms)")
    ax.set_ylim(bottom=0)
    ax.set_title(f"time of a step's reduction, {seen_in(total)}")
    ax.legend(*style.handles(ax), loc="upper center", bbox_to_anchor=(0.5, -0.34), ncols=2, columnspacing=0.8)


def seen_in(total: pd.Series) -> str:
    """In words: what a rank adds, by the fit."""
    slope = total["seconds_per_rank"]
    return f"{1e3 * slope:.2g} ms a rank" if np.isfinite(slope) else "no fit"


def errors(ax: Axes, table: pd.DataFrame) -> None:
    """What the mean lacks, and lighter what a worker keeps of its own M, relative to either."""
    look = style.FAMILIES["powersgd"]
    rows = table[(table["status"] == "ok") & table["rank"].notna()].groupby("rank")
    for kind, label, line, opacity in (
        ("mean_error", "mean, ‖M̄ − M̂‖ / ‖M̄‖", "-", 1.0),
        ("worker_error", "worker, ‖E‖ / ‖M‖", "--", 0.5),
    ):
        middle = rows[f"{kind}_median"].median().dropna()
        if middle.empty:
            continue  # of runs from before it was measured
        low, high = rows[f"{kind}_q1"].min()[middle.index], rows[f"{kind}_q3"].max()[middle.index]
        bars = np.maximum(0, [middle - low, high - middle])
        ax.errorbar(middle.index, middle, yerr=bars, alpha=opacity, label=label, **look.marks(line))
    ax.set(ylabel="relative error (no unit)", title="compression error")
    medians = rows[["mean_error_median", "worker_error_median"]].median()
    lacking = medians["mean_error_median"].dropna()
    if len(lacking):
        ax.set_title(f"the mean lacks {lacking.iloc[0]:.2f} to {lacking.iloc[-1]:.2f} of its norm")
    shown = medians.stack().dropna()
    if len(shown):
        room = 0.5 * max(0.02, 1 - shown.min())  # as far below the smallest as half its distance from 1
        ax.set_ylim(max(0.0, min(shown.min() - room, ax.get_ylim()[0])), max(1 + room / 4, ax.get_ylim()[1]))
    ax.legend(*style.handles(ax), loc="upper center", bbox_to_anchor=(0.5, -0.34), ncols=2, columnspacing=0.8)


def loss(ax: Axes, table: pd.DataFrame) -> None:
    look, base = style.FAMILIES["powersgd"], style.FAMILIES["none"]
    fine = table[table["status"] == "ok"]
    rows = fine[fine["rank"].notna()].groupby("rank")["validation_perplexity"]
    mean = rows.mean()
    ax.errorbar(mean.index, mean, yerr=rows.apply(style.half_interval), label=look.label, **look.marks("-"))
    dense = fine.loc[fine["rank"].isna(), "validation_perplexity"]
    if len(dense):
        ax.axhline(dense.mean(), color=base.colour, linewidth=1.0, linestyle="--", label="uncompressed")
    ax.set(ylabel="validation perplexity", title="quality")
    if len(dense) and len(mean):
        ax.set_title(f"nearest to dense: r = {(mean - dense.mean()).abs().idxmin():g}")
    ax.legend(*style.handles(ax), loc="upper center", bbox_to_anchor=(0.5, -0.34), ncols=2, columnspacing=0.8)
