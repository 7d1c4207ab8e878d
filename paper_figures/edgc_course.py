"""Entropy and rank over the run, for each EDGC variant whose rank follows something."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from edgc.errors import UserError
from paper_figures import style
from paper_figures.ranks_over_time import course, limits, panel

TABLES = ("methods/curves.csv", "methods/table.csv")
CAPTION = """\
**Entropy and the rank that follows it, over the run.** Left: mean of the sampled entropies over the last
window (nats), per stage. Right: the rank in use; grey: no rank is in use yet; dashed and dotted: r_max
and r_min. The paper says that the entropy of gradients falls through training; CQM then lowers the rank.
Where entropy rises after warm-up instead, CQM asks for more than r_max and the rank stays there. The paper's
own courses are described here, not drawn: this project has no numbers of them."""
GIVEN = ("fixed", "schedule")


def draw(results: Path) -> Figure:
    """A row per variant: entropy (left) and rank (right) against iteration, a line per stage and seed."""
    curves = style.read(results, "methods", "curves.csv")
    runs = style.read(results, "methods")
    mine = runs[(runs["method"] == "edgc") & ~runs["policy"].isin(GIVEN)]
    variants = list(dict.fromkeys(mine["variant"]))
    if not variants:
        raise UserError("no EDGC run in the methods study", where=results / "methods" / "table.csv")
    stages = sorted(int(name.removeprefix("rank_")) for name in curves if name.startswith("rank_"))
    height = 1.0 + 1.15 * len(variants)
    fig, axes = style.figure(len(variants), 2, width=style.TEXT, height=height, sharex=True)
    for number, variant in enumerate(variants):
        left, right = axes[2 * number : 2 * number + 2]
        rows = curves[curves["variant"] == variant]
        label = str(mine.loc[mine["variant"] == variant, "label"].iloc[0])
        entropies(left, rows, stages)
        panel(right, rows, stages)
        limits(right, mine[mine["variant"] == variant])
        left.set(title=f"{label}, entropy", ylabel="entropy (nats)")
        right.set(title=f"{label}, rank: {course(rows, stages)}", ylabel="rank r")
        right.set_ylim(bottom=0)
    for ax in axes[-2:]:
        ax.set_xlabel("iteration")
    fig.legend(*style.handles(*axes), loc="outside upper center", ncols=5, columnspacing=1.0)
    style.letter(axes)
    seeds = mine.groupby("variant")["seed"].nunique()
    style.annotate(fig, list(seeds), bars="every seed is a line, the first one solid", scale=results.name)
    return fig


def entropies(ax: Axes, curves: pd.DataFrame, stages: list[int]) -> None:
    """The window mean of every stage and seed."""
    for stage, colour in zip(stages, style.stage_colours(len(stages)), strict=True):
        for number, (_, run) in enumerate(curves.groupby("seed")):
            line = ("-", "--", ":", "-.")[number % 4]
            ax.plot(run["iteration"], run[f"entropy_{stage}"], color=colour, linestyle=line, linewidth=1.0)
    if curves[[f"entropy_{stage}" for stage in stages]].isna().all(axis=None):
        style.message(ax, "no entropy was measured")
