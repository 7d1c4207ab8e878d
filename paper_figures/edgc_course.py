"""Entropy and rank over the run, for each EDGC variant whose rank follows something."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from edgc.errors import UserError
from paper_figures import inputs, style, texts
from paper_figures.ranks_over_time import course, limits, panel, seen

TABLES = ("methods/curves.csv", "methods/table.csv")
CAPTION = """\
**Entropy and the rank that follows it, over the run.** Above: mean of the sampled entropies over the last
window (nats), per stage. Below: the rank in use; grey: no rank is in use yet; thin grey lines: r_max
and r_min. The paper says that the entropy of gradients falls through training; CQM then lowers the rank.
Where entropy rises after warm-up instead, CQM asks for more than r_max and the rank stays there. The paper's
own courses are described here, not drawn: this project has no numbers of them."""
GIVEN = ("fixed", "schedule")


def draw(results: Path, study: str = "methods") -> Figure:
    """Two panels per variant: entropy (above) and rank (below) against iteration, a line per stage and seed."""
    curves = inputs.read(results, study, "curves.csv")
    runs = inputs.read(results, study)
    mine = runs[(runs["method"] == "edgc") & ~runs["policy"].isin(GIVEN)]
    variants = list(dict.fromkeys(mine["variant"]))
    if not variants:
        raise UserError(f"no EDGC run in study {study!r}", where=results / study / "table.csv")
    stages = sorted(int(name.removeprefix("rank_")) for name in curves if name.startswith("rank_"))
    fig, axes = style.figure(2 * len(variants), 1, height=1.3 + 2.1 * len(variants), sharex=True)
    for number, variant in enumerate(variants):
        above, below = axes[2 * number : 2 * number + 2]
        rows = curves[curves["variant"] == variant]
        label = str(mine.loc[mine["variant"] == variant, "label"].iloc[0])
        entropies(above, rows, stages)
        panel(below, rows, stages)
        limits(below, mine[mine["variant"] == variant])
        above.set(title=f"{label}, entropy", ylabel="entropy (nats)")
        below.set(title=f"its rank: {course(rows, stages)}", ylabel="rank r")
        below.set_ylim(bottom=0)
        below.locator_params(axis="y", nbins=6)  # or equal panels get other ticks, by the last digits of their limits
    axes[-1].set_xlabel("iteration")
    words = seen(curves[curves["variant"].isin(variants)], stages)
    texts.title_legend(fig, *style.handles(*axes), words, ncols=3, columnspacing=1.0)
    texts.letter(axes)
    seeds = mine.groupby("variant")["seed"].nunique()
    texts.annotate(fig, list(seeds), bars="every seed is a line, the first one solid", scale=results.name)
    return fig


def entropies(ax: Axes, curves: pd.DataFrame, stages: list[int]) -> None:
    """The window mean of every stage and seed."""
    for stage, colour in zip(stages, style.stage_colours(len(stages)), strict=True):
        for number, (_, run) in enumerate(curves.groupby("seed")):
            line = ("-", "--", ":", "-.")[number % 4]
            ax.plot(run["iteration"], run[f"entropy_{stage}"], color=colour, linestyle=line, linewidth=1.0)
    if curves[[f"entropy_{stage}" for stage in stages]].isna().all(axis=None):
        texts.message(ax, "no entropy was measured")
