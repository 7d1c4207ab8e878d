"""Fixed ranks: time of the parts of the reduction, compression error, and validation loss."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.analyse.rank_sweep import quickest
from paper_figures import inputs, style, texts

TABLES = ("rank_sweep/table.csv", "rank_sweep/timings.csv", "rank_sweep/fit.csv")
CAPTION = """\
**What a fixed rank costs.** Fixed-rank PowerSGD. (a): time per step of the slowest pipeline stage in compression,
communication and decompression, of the quickest seed of each rank, for other work on the machine only adds time
(median over steps, bars: quartiles), with the least-squares line T(r) = a·r + c that stage alignment relies on and
its largest relative residual; where an uncompressed run is part of the study, its time shows the rank from which
compression stops paying. Seconds belong to the machine and network that measured them. (b): relative error in the
second half of training of M, gradient plus error feedback: what the mean over the workers lacks, ‖M̄ − M̂‖/‖M̄‖
(estimated from sketches), and, lighter, what a worker keeps back of its own M, ‖E‖/‖M‖, in which the differences
between workers count. (c): validation perplexity at the end."""
LOOK, DENSE = style.FAMILIES["powersgd"], style.FAMILIES["none"]
PARTS = (
    ("compress", "#E69F00", "s", "--"),
    ("communicate", "#56B4E9", "^", "-."),
    ("decompress", "#009E73", "v", ":"),
    ("total", LOOK.colour, "o", ""),
)


def draw(results: Path) -> Figure:
    """Seconds, relative error and validation loss against the rank."""
    table, timings, fit = inputs.tables(results, TABLES)
    fig, axes = style.figure(3, 1, height=7.2)
    seconds(axes[0], timings, fit)
    errors(axes[1], table)
    loss(axes[2], table)
    ranks = sorted(table["rank"].dropna().unique())
    for ax in axes:
        ax.set_xticks(ranks, [f"{rank:g}" for rank in ranks])
        ax.set_xlabel("rank r")
        texts.legend_below(ax, 0.5, 0.34)
    missing = ", ".join(texts.failures(table))
    note = texts.count_note(
        table[table["status"] == "ok"].groupby("variant").size(),
        "(a) slowest stage, quickest seed, median over steps, bars: quartiles; line: fit T(r) = a·r + c.",
        "(b) of the second half, medians over windows (mean) and steps (worker), bars: quartiles."
        + (f" Without result: {missing}." if missing else ""),
        bars=f"(c) {texts.INTERVAL}",
        scale=results.name,
    )
    return texts.finish(fig, axes, finding(table), note)


def finding(table: pd.DataFrame) -> str:
    """Sentence on the perplexity at the lowest and at the highest rank, and without compression."""
    fine = table[table["status"] == "ok"]
    means = fine.groupby("rank")["validation_perplexity"].mean()
    if means.empty:
        return "What a fixed rank costs"
    dense = fine.loc[fine["rank"].isna(), "validation_perplexity"]
    plain = f", uncompressed {dense.mean():.0f}" if len(dense) else ""
    low, high = means.index[0], means.index[-1]
    return f"Perplexity {means.iloc[0]:.0f} at rank {low:g}, {means.iloc[-1]:.0f} at rank {high:g}{plain}"


def seconds(ax: Axes, timings: pd.DataFrame, fit: pd.DataFrame) -> None:
    """Parts of the time of the stage with the largest median total over all ranks, and the fit of that total."""
    fine = quickest(timings[timings["status"] == "ok"])
    totals = fine[(fine["kind"] == "total") & fine["rank"].notna()]
    stage = int(totals.groupby("stage")["seconds_median"].median().idxmax())
    fine = fine[fine["stage"] == stage]
    for kind, colour, marker, line in PARTS:
        rows = 1e3 * fine[fine["kind"] == kind].set_index("rank")[["seconds_median", "seconds_q1", "seconds_q3"]]
        rows = rows.groupby("rank").agg({"seconds_median": "median", "seconds_q1": "min", "seconds_q3": "max"})
        median, low, high = (rows[name] for name in rows)
        error = np.maximum(0, [median - low, high - median])
        ax.errorbar(median.index, median, yerr=error, color=colour, marker=marker, linestyle=line, label=kind)
    total = fit[(fit["stage"] == stage) & (fit["kind"] == "total")].iloc[0]
    ranks, slope = np.array([fine["rank"].min(), fine["rank"].max()]), total["seconds_per_rank"]
    label = f"fit (largest residual {100 * total['residual_largest_share']:.0f} %)"
    ax.plot(ranks, 1e3 * (slope * ranks + total["seconds_fixed"]), color=LOOK.colour, linewidth=0.9, label=label)
    if np.isfinite(total["seconds_uncompressed"]):
        level = 1e3 * total["seconds_uncompressed"]
        ax.axhline(level, color=DENSE.colour, linewidth=1.0, linestyle="--", label="uncompressed")
    ax.set_ylim(bottom=0)
    ax.set(ylabel="time per step (ms)", title=f"time of a step's reduction, {1e3 * slope:.2g} ms a rank")


def errors(ax: Axes, table: pd.DataFrame) -> None:
    """Error of the mean over the workers and, lighter, of a worker's own M, relative to either."""
    rows = table[table["status"] == "ok"].groupby("rank")
    for kind, label, line, opacity in (
        ("mean_error", "mean, ‖M̄ − M̂‖ / ‖M̄‖", "-", 1.0),
        ("worker_error", "worker, ‖E‖ / ‖M‖", "--", 0.5),
    ):
        middle = rows[f"{kind}_median"].median().dropna()
        low, high = rows[f"{kind}_q1"].min()[middle.index], rows[f"{kind}_q3"].max()[middle.index]
        bars = np.maximum(0, [middle - low, high - middle])
        ax.errorbar(middle.index, middle, yerr=bars, alpha=opacity, label=label, **LOOK.marks(line))
    ax.set(ylabel="relative error (no unit)", title="compression error")
    medians = rows[["mean_error_median", "worker_error_median"]].median()
    lacking, least = medians["mean_error_median"].dropna(), medians.min().min()
    if len(lacking):
        ax.set_title(f"the mean lacks {lacking.iloc[0]:.2f} to {lacking.iloc[-1]:.2f} of its norm")
        room = 0.5 * max(0.02, 1 - least)  # as far below the smallest as half its distance from 1
        ax.set_ylim(max(0.0, min(least - room, ax.get_ylim()[0])), max(1 + room / 4, ax.get_ylim()[1]))


def loss(ax: Axes, table: pd.DataFrame) -> None:
    """Validation perplexity, mean over seeds with its 95 % t interval."""
    fine = table[table["status"] == "ok"]
    rows = fine.groupby("rank")["validation_perplexity"]
    mean = rows.mean()
    ax.errorbar(mean.index, mean, yerr=rows.apply(style.half_interval), label=LOOK.label, **LOOK.marks("-"))
    dense = fine.loc[fine["rank"].isna(), "validation_perplexity"]
    ax.set(ylabel="validation perplexity", title="quality")
    if len(dense):
        ax.axhline(dense.mean(), color=DENSE.colour, linewidth=1.0, linestyle="--", label="uncompressed")
    if len(dense) and len(mean):
        ax.set_title(f"nearest to dense: r = {(mean - dense.mean()).abs().idxmin():g}")
