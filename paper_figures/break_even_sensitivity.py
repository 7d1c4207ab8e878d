"""How far the simulated saving hangs on each assumption: what it becomes when one of them is changed."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import inputs, style, texts
from paper_figures.break_even import STUDY, label
from paper_figures.families import by_name

TABLES = ("break_even/sensitivity.csv",)
CAPTION = """\
**What the simulated saving hangs on.** Per assumption the step time saved when it alone is changed, for
EDGC and for a fixed rank with int8 factors. Drawn are the assumptions that move one of the two by at least three
percentage points in some cluster. All of them, every method and both ways of reducing:
``break_even/sensitivity.csv``."""
MATTERS = 3.0  # percentage points
METHODS = ("edgc", "factors_int8_r64")
WORDS = {
    "step_efficiency": "share of the peak in a step",
    "backward_ratio": "backward to forward",
    "bucket_elements": "bucket size",
    "latency_seconds": "latency of a hop",
    "gemm_efficiency": "share of the peak in products",
    "memory_efficiency": "share of memory bandwidth",
    "orthogonalise_efficiency": "speed of the QR",
    "seconds_per_matrix": "launches per matrix",
    "mean_rank_position": "EDGC's mean rank",
    "micro_batches": "micro-batches",
}


def draw(results: Path) -> Figure:
    """A panel per cluster: per assumption and method, from its low to its high value; reductions beside backward."""
    table = inputs.read(results, STUDY, "sensitivity.csv")
    table = table[table["overlap"] & table["method"].isin(METHODS)]
    clusters = list(table["cluster"].unique())
    moved = (table["saved_percent_high"] - table["saved_percent_low"]).abs().groupby(table["assumption"]).max()
    names = [name for name in WORDS if moved[name] >= MATTERS]
    fig, axes = style.figure(len(clusters), 1, height=2.2 + (0.3 + 0.14 * len(names)) * len(clusters), sharex=True)
    for ax, cluster in zip(axes, clusters, strict=True):
        panel(ax, table[table["cluster"] == cluster], names)
    axes[-1].set_xlabel("step time saved (%)")
    texts.letter(axes, from_the_left=True)
    texts.title_legend(fig, *style.handles(axes[0]), title(table))
    ranges = table.drop_duplicates("assumption").set_index("assumption")[["low", "high"]]
    said = {name: f"{WORDS[name]} {ranges.at[name, 'low']} to {ranges.at[name, 'high']}" for name in WORDS}
    little = [words for name, words in said.items() if name not in names]
    texts.note(
        fig,
        "Model, not measured. Dotted: as assumed; open marker: low value, full: high. Reductions beside backward, "
        f"at the bandwidth in the title; scale {results.name}\n"
        + ", ".join(said[name] for name in names)
        + (f".\nLess than {MATTERS:g} points in every cluster: {', '.join(little)}" if little else ""),
    )
    return fig


def title(table: pd.DataFrame) -> str:
    """In how many cases EDGC saves less than the other method, one assumption changed to either of its ends."""
    ends = table.melt(["cluster", "method", "assumption"], ["saved_percent_low", "saved_percent_high"], "end", "saved")
    saved = ends.pivot(index=["cluster", "assumption", "end"], columns="method", values="saved")
    less = (saved[METHODS[0]] < saved[METHODS[1]]).sum()
    said = f"EDGC saves less than {label(METHODS[1])} in {less} of {len(saved)} cases"
    return f"SIMULATED: one assumption changed, {said}"


def panel(ax: Axes, rows: pd.DataFrame, names: list[str]) -> None:
    """One line per assumption, the methods side by side."""
    for index, name in enumerate(names):
        for place, method in zip((-0.18, 0.18), METHODS, strict=True):
            row = rows[(rows["assumption"] == name) & (rows["method"] == method)].iloc[0]
            family = by_name(method)
            ends = [row["saved_percent_low"], row["saved_percent_high"]]
            ax.plot(ends, [index + place] * 2, color=family.colour, linewidth=1.2)
            for end, fill in zip(ends, ("white", family.colour), strict=True):
                shown = label(method) if index == 0 and fill != "white" else None
                marks = family.marks(filled=fill != "white")
                ax.plot(end, index + place, markersize=4, label=shown, **marks)
    for method in METHODS:
        base = rows[rows["method"] == method]["saved_percent"].iloc[0]
        ax.axvline(base, color=by_name(method).colour, linewidth=0.8, linestyle=":")
    ax.set_yticks(range(len(names)), [WORDS[name] for name in names])
    ax.set(ylim=(len(names) - 0.5, -0.5), ylabel="assumption\nchanged")
    first = rows.iloc[0]
    words = f"SIMULATED: {first['label']}, {first['gbits_per_second']:g} Gbit/s"
    ax.set_title(words)
