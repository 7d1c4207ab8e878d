"""Entropy and rank over the run, for each EDGC variant whose rank follows something."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from edgc.errors import UserError
from paper_figures import inputs, style, texts

TABLES = {
    "edgc_course": ("methods/curves.csv", "methods/table.csv"),
    "edgc_course_long": ("policies_long/curves.csv", "policies_long/table.csv"),
}
WORDS = {"edgc_course": {"over": "the run"}, "edgc_course_long": {"over": "eight million tokens"}}
CAPTION = """\
**Entropy and the rank that follows it, over {over}.** Above: mean of the sampled entropies over the last
window (nats), per stage. Below: the rank in use; grey: no rank is in use yet; thin grey lines: r_max and r_min. The
paper says that the entropy of gradients falls through training; CQM then lowers the rank. The paper's own courses are
described here, not drawn: this project has no numbers of them."""
GIVEN = ("fixed", "schedule")


def draw(results: Path, name: str) -> Figure:
    """Two panels per variant: entropy (above) and rank (below) against iteration, a line per stage and seed."""
    study = TABLES[name][0].partition("/")[0]
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


def seen(curves: pd.DataFrame, stages: list[int]) -> str:
    """In words: in how many of the runs the rank of a stage falls, and in how many one rises again."""
    found = [moves(run[[f"rank_{stage}" for stage in stages]]) for _, run in curves.groupby(["variant", "seed"])]
    fell, rose = (sum(each) for each in zip(*found, strict=True))
    return f"The rank falls in {fell} of {len(found)} runs and rises again in {rose}"


def moves(ranks: pd.DataFrame) -> tuple[bool, bool]:
    """Whether the rank of a stage (a column, by iteration) falls below an earlier one, and rises after that."""
    steps = ranks.ffill().diff()
    fell = (steps < 0).cumsum() > 0
    return bool(fell.any(axis=None)), bool(((steps > 0) & fell).any(axis=None))


def course(curves: pd.DataFrame, stages: list[int]) -> str:
    """In words: which ranks all stages and seeds used."""
    ranks = curves[[f"rank_{stage}" for stage in stages]].stack().dropna()
    if ranks.empty:
        return "never compressed"
    low, high = ranks.min(), ranks.max()
    return f"always {low:g}" if low == high else f"{low:g} to {high:g}"


def limits(ax: Axes, runs: pd.DataFrame) -> None:
    """r_min and r_max of the controller, where all seeds agree on them."""
    for column in ("r_max", "r_min"):
        values = runs[column].dropna().unique()
        if len(values) == 1:
            ax.axhline(values[0], color="#777777", linewidth=0.6, zorder=1, label="r_max, r_min")


def panel(ax: Axes, curves: pd.DataFrame, stages: list[int]) -> None:
    """Later stages are drawn thinner on top, so that equal ranks stay visible; grey: sent uncompressed."""
    colours = style.stage_colours(len(stages))
    columns = [f"rank_{stage}" for stage in stages]
    dense = curves.groupby("iteration")[columns].count().sum(axis=1) == 0
    if dense.any():
        first = dense[~dense].index.min() if (~dense).any() else dense.index.max()
        ax.axvspan(dense.index.min(), first, color="#dddddd", alpha=0.7, linewidth=0, label="no rank yet")
    for index, stage in enumerate(stages):
        for number, (_, run) in enumerate(curves.groupby("seed")):
            ax.step(
                run["iteration"],
                run[f"rank_{stage}"],
                where="post",
                color=colours[index],
                linewidth=2.4 - 1.4 * index / max(1, len(stages) - 1),
                linestyle=("-", "--", ":", "-.")[number % 4],
                label=f"stage {stage}" if number == 0 else None,
            )
