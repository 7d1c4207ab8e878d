"""Window length: agreement of sampled and full entropy (CC), the trajectories themselves, and the ranks that follow."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from paper_figures import inputs, style, texts

TABLES = ("window_ablation/table.csv", "window_ablation/trajectories.csv")
CAPTION = """\
**How long a window must be.** (a): Pearson correlation (CC) between windowed means of the sampled entropy
and of the entropy of all entries at every iteration, for the whole run and for the windows after warm-up
alone; the whole run contains the steep fall at the start, which any estimator follows. The dotted line is
the paper's 0.94. Undefined values (fewer than three windows) are named below the figure. (b): the
trajectories that are correlated; lines: all entries, markers: sampled. (c): the rank of the first stage
that follows. Window lengths are scaled with the length of the run; the paper's 500, 1000 and 2500 are of
230 000 iterations."""
PAPER = 0.94
COLOURS = ("#D55E00", "#000000", "#CC79A7", "#0072B2", "#8C6D00")
LINES: tuple[style.Line, ...] = ("--", ":", "-.", (0, (6, 2)), (0, (3, 1, 1, 1, 1, 1)))
KINDS = (("cc", "whole run", "#0072B2", "o", "-"), ("cc_after_warmup", "after warm-up", "#D55E00", "s", "--"))


def draw(results: Path) -> Figure:
    """CC against window length; windowed entropy of stage 0; rank of stage 0, of all variants."""
    everything, paths = (inputs.read(results, *name.split("/")) for name in TABLES)
    # A window's first variant stands for it; of others, such as other step limits, only the ranks are of interest.
    usual = everything.drop_duplicates("window")["variant"]
    table = everything[everything["variant"].isin(usual)]
    fig, axes = style.figure(3, 1, height=7.8)
    correlation(axes[0], table)
    first = paths[(paths["stage"] == 0) & (paths["seed"] == paths["seed"].min())]
    lengths = sorted(table["window"].unique())
    colours = sns.color_palette("viridis", len(lengths) + 1)
    for length, colour, marker in zip(lengths, colours, style.MARKERS, strict=False):
        rows = first[(first["length"] == length) & first["variant"].isin(usual)]
        steps, label = rows["iteration"], f"w = {length}"
        axes[1].plot(steps, rows["entropy_full"], color=colour, linewidth=1.0, label=f"{label}, all")
        marks: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 3.5, "linestyle": ""}
        axes[1].plot(steps, rows["entropy"], label="sampled", **marks)
        axes[2].plot(steps, rows["rank"], label=label, color=colour, linewidth=1.6, drawstyle="steps-pre")
    # Equal courses lie on each other: every other variant has a colour and dashes of its own.
    others = first[~first["variant"].isin(usual)].groupby("variant", sort=False)
    for (_, rows), colour, line in zip(others, itertools.cycle(COLOURS), itertools.cycle(LINES), strict=False):
        label = rows["label"].iloc[0]
        axes[2].plot(rows["iteration"], rows["rank"], label=label, color=colour, linestyle=line, drawstyle="steps-pre")
    axes[1].set(title="mean entropy of a window, stage 0", ylabel="entropy (nats)")
    # As many in any height: the layout counts on the ticks of its first pass.
    axes[1].yaxis.set_major_locator(MaxNLocator(5))
    ranks = first["rank"].dropna()
    same = f": always {ranks.min():g}" if ranks.nunique() == 1 else ""
    axes[2].set(title=f"rank, stage 0{same}", ylabel="rank r")
    if ranks.empty:
        texts.message(axes[2], "never compressed")
    else:
        axes[2].set_ylim(bottom=0)
        axes[2].yaxis.set_major_locator(MaxNLocator(5, integer=True))
    for ax, columns in zip(axes[1:], (3, 2), strict=True):
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
    return texts.finish(fig, axes, finding(table), note)


def finding(table: pd.DataFrame) -> str:
    """In words: how well the sampled entropy follows the full one after warm-up, over windows of each length."""
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
    ax.axhline(PAPER, color="#444444", linewidth=0.9, linestyle=":", label=f"paper: {PAPER} at w = 1000")
    style.log_x(ax, sorted(fine["window"].unique()), room=1.4)
    ax.set_ylim(top=1.02)
    ax.set(xlabel="window w (iterations)", ylabel="CC (Pearson, no unit)", title="sampled against full")
    texts.legend_below(ax, 0.45, 0.24)
