"""Sampled against full entropy by the length of a window and the samples in it, and the ranks that follow."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paper_figures import inputs, style, texts

TABLES = {
    "window_ablation": ("window_ablation/table.csv", "window_ablation/trajectories.csv"),
    "window_correlation": ("window_ablation/correlation.csv", "window_ablation/correlation_summary.csv"),
}
CAPTION = {
    "window_ablation": """\
**How long a window must be.** (a): Pearson correlation (CC) between windowed means of the sampled entropy
and of the entropy of all entries at every iteration, for the whole run and for the windows after warm-up
alone; the whole run contains the steep fall at the start, which any estimator follows. The dotted line is
the paper's 0.94. Undefined values (fewer than three windows) are named below the figure. (b): the
trajectories that are correlated; lines: all entries, markers: sampled. (c): the rank of the first stage
that follows. Window lengths are scaled with the length of the run; the paper's 500, 1000 and 2500 are of
230 000 iterations.""",
    "window_correlation": """\
**Sampled against full entropy, by the number of samples in a window.** Pearson correlation (CC) over windows
between the mean of the sampled entropies and the mean of the full entropy at every iteration, stage 0. The
paper's window has 100 samples (a tenth of 1000 iterations; dotted lines: 100, and its CC of 0.94), ours have
few. Filled: a tenth of the iterations sampled; open: other shares. Solid: measured, mean over seeds; bars: 95 % t
interval by Fisher's z. Dashed: extrapolated from the longest window of which a run has ten, by CC = √(V / (V +
s² / k)) with k samples, their variance s² and the variance V of the window means, which longer windows are
taken to keep (``experiments/analyse/correlation.py``). It says what more samples do to this run's course of
entropy, nothing about another model's. Over the whole run the largest errors are those of the steep start, which
is no noise: there the model falls short of what is measured.""",
}

COLOURS = ("#D55E00", "#000000", "#CC79A7", "#0072B2", "#8C6D00")
LINES: tuple[style.Line, ...] = ("--", ":", "-.", (0, (6, 2)), (0, (3, 1, 1, 1, 1, 1)))
KINDS = (("cc", "whole run", "#0072B2", "o", "-"), ("cc_after_warmup", "after warm-up", "#D55E00", "s", "--"))
PAPER_CC, PAPER_SAMPLES, ALPHA = 0.94, 100, 0.1
COLOUR, OTHER = "#0072B2", "#888888"
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500)


def window_ablation(results: Path) -> Figure:
    """CC against window length; windowed entropy of stage 0; rank of stage 0, of all variants."""
    everything, paths = inputs.tables(results, TABLES["window_ablation"])
    # A window's first variant stands for it; of others, such as other step limits, only the ranks are of interest.
    usual = everything.drop_duplicates("window")["variant"]
    table = everything[everything["variant"].isin(usual)]
    fig, (top, entropies, ranks) = style.figure(3, 1, height=7.8)
    correlation(top, table)
    first = paths[(paths["stage"] == 0) & (paths["seed"] == paths["seed"].min())]
    lengths = sorted(table["window"].unique())
    for length, colour, marker in zip(lengths, style.stage_colours(len(lengths)), style.MARKERS, strict=False):
        rows = first[(first["length"] == length) & first["variant"].isin(usual)].set_index("iteration")
        entropies.plot(rows["entropy_full"], color=colour, linewidth=1.0, label=f"w = {length}, all")
        entropies.plot(rows["entropy"], marker, color=colour, markersize=3.5, label="sampled")
        ranks.plot(rows["rank"], label=f"w = {length}", color=colour, linewidth=1.6, drawstyle="steps-pre")
    # Equal courses lie on each other: every other variant has a colour and dashes of its own.
    others = first[~first["variant"].isin(usual)].set_index("iteration").groupby("variant", sort=False)
    for (_, rows), other, line in zip(others, itertools.cycle(COLOURS), itertools.cycle(LINES), strict=False):
        label = rows["label"].iloc[0]
        ranks.plot(rows["rank"], label=label, color=other, linestyle=line, drawstyle="steps-pre")
    entropies.set(title="mean entropy of a window, stage 0", ylabel="entropy (nats)")
    values = first["rank"].dropna()
    ranks.set(title="rank, stage 0" + (f": always {values.min():g}" if values.nunique() == 1 else ""), ylabel="rank r")
    if values.empty:
        texts.message(ranks, "never compressed")
    ranks.set_ylim(bottom=0)
    for ax, columns in ((entropies, 3), (ranks, 2)):
        # As many ticks in any height: the layout counts on those of its first pass.
        ax.yaxis.set_major_locator(MaxNLocator(5, integer=ax is ranks))
        ax.set_xlim(left=0)
        ax.set_xlabel("iteration")
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=columns, columnspacing=0.8)
    extra = "(b), (c): first seed."
    every = sorted(table.loc[table["samples"] == table["iterations"], "window"].unique())
    if every:  # so that their CC tells of the entries alone
        extra += f" Sampled at every iteration: w = {', '.join(map(str, every))}."
    if reasons := sorted({str(text) for text in table["cc_note"].dropna() if text}):
        extra += " Missing points in (a): " + "; ".join(reasons[:2]) + "."
    counts = table[table["status"] == "ok"].groupby("window").size()
    note = texts.count_note(counts, extra, bars=f"(a) {texts.INTERVAL}", scale=results.name)
    return texts.finish(fig, [top, entropies, ranks], agreement(table), note)


def agreement(table: pd.DataFrame) -> str:
    """Sentence on how well the sampled entropy follows the full one after warm-up, over windows of each length."""
    means = table[table["status"] == "ok"].groupby("window")["cc_after_warmup"].mean().dropna()
    if means.empty:
        return "Sampled and full entropy by window length"
    ends = "–".join(dict.fromkeys(f"{value:.2f}" for value in (means.min(), means.max())))
    return f"After warm-up the sampled entropy follows the full one with CC {ends}"


def correlation(ax: Axes, table: pd.DataFrame) -> None:
    """CC by window length, mean over seeds with its 95 % t interval, of the whole run and after warm-up."""
    fine = table[table["status"] == "ok"]
    for column, label, colour, marker, line in KINDS:
        rows = fine.dropna(subset=[column]).groupby("window")[column]
        mean = rows.mean()
        if len(mean):
            # A correlation ends at 1, which a t interval does not know.
            half = rows.apply(style.half_interval)
            error = [half, np.minimum(half, 1 - mean)]
            ax.errorbar(mean.index, mean, yerr=error, color=colour, marker=marker, linestyle=line, label=label)
    ax.axhline(PAPER_CC, color="#444444", linewidth=0.9, linestyle=":", label=f"paper: {PAPER_CC} at w = 1000")
    style.log_x(ax, sorted(fine["window"].unique()), room=1.4)
    ax.set_ylim(top=1.02)
    ax.set(xlabel="window w (iterations)", ylabel="CC (Pearson, no unit)", title="sampled against full")
    texts.legend_below(ax, 0.45, 0.24)


def window_correlation(results: Path) -> Figure:
    """A panel for the windows after warm-up and one for the whole run: CC against samples in a window."""
    tables = inputs.tables(results, TABLES["window_correlation"])
    runs, means = (table.query("stage == 0") for table in tables)
    spans = list(dict.fromkeys(runs["span"])) or ["after warm-up"]
    fig, axes = style.figure(len(spans), 1, height=0.8 + 2.1 * len(spans), sharex=True, sharey=True)
    for ax, span in zip(axes, spans, strict=True):
        by_samples(ax, runs[runs["span"] == span], means[means["span"] == span])
        ax.set(title=span, ylabel="CC (Pearson, no unit)")
    axes[-1].set_xlabel("samples in a window")
    measured = runs[(runs["alpha"] == ALPHA) & (runs["kind"] == "measured")]
    seeds = list(measured.groupby(["span", "samples"])["seed"].nunique()) or 0
    extra = "" if len(runs) else "No run has enough windows."
    note = texts.count_note(seeds, extra, bars="dots: runs, bars: 95 % t interval", scale=results.name)
    return texts.finish(fig, axes, growth(means), note, style.handles(*axes))


def growth(means: pd.DataFrame) -> str:
    """Sentence on whether CC grew with the samples in a window, where that was measured at ``ALPHA``."""
    rows = means[(means["alpha"] == ALPHA) & (means["kind"] == "measured")].sort_values(["span", "samples"])
    courses = [span["cc_mean"].dropna() for _, span in rows.groupby("span")]
    if any(len(course) > 1 for course in courses) and all(course.is_monotonic_increasing for course in courses):
        return "The more samples in a window, the better sampled and full entropy agree"
    return "Agreement of sampled and full entropy by samples in a window"


def by_samples(ax: Axes, runs: pd.DataFrame, means: pd.DataFrame) -> None:
    """One span: what was measured at the paper's share of the iterations and at others, and the extrapolation."""
    if runs.empty:
        texts.message(ax, "no run has enough windows")
    measured, extrapolated = (runs[runs["kind"] == kind] for kind in ("measured", "extrapolated"))
    others, usual = measured[measured["alpha"] != ALPHA], measured[measured["alpha"] == ALPHA]
    ax.plot(others["samples"], others["cc"], "s", label="measured, other α", color=OTHER, mfc="white", markersize=3)
    ax.plot(usual["samples"], usual["cc"], ".", color=COLOUR, markersize=4, alpha=0.6)
    means = means[means["alpha"] == ALPHA].sort_values("samples")
    solid, dashed = (means[means["kind"] == kind] for kind in ("measured", "extrapolated"))
    error = [solid["cc_mean"] - solid["cc_low"], solid["cc_high"] - solid["cc_mean"]]
    ax.errorbar(solid["samples"], solid["cc_mean"], yerr=error, color=COLOUR, marker="o", label="measured, α = 0.1")
    start = solid[solid["window"] == extrapolated["from_window"].min()]
    line = pd.concat([start.assign(cc_mean=start["cc_model_mean"]), dashed])
    ax.plot(line["samples"], line["cc_mean"], "--", color=COLOUR, label="extrapolated, α = 0.1")
    ax.plot(extrapolated["samples"], extrapolated["cc"], ".", color=COLOUR, markersize=2.5, alpha=0.6)
    if dashed["cc_low"].notna().any():
        ax.fill_between(dashed["samples"], dashed["cc_low"], dashed["cc_high"], color=COLOUR, alpha=0.15, linewidth=0)
    dotted: dict[str, Any] = {"color": "#444444", "linewidth": 0.9, "linestyle": ":"}
    ax.axhline(PAPER_CC, label="paper: 0.94 at 100 samples", **dotted)
    ax.axvline(PAPER_SAMPLES, **dotted)
    style.log_x(ax, TICKS)
    ax.set_ylim(top=1.02)
