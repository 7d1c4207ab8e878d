"""The ranks that EDGC chose over training, per pipeline stage."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from edgc.errors import UserError
from paper_figures import inputs, style, texts

TABLES = ("methods/curves.csv", "methods/table.csv")
CAPTION = """\
**Ranks that EDGC chose.** The rank that EDGC used at every iteration, per pipeline stage and policy. Grey:
no rank is in use yet: the warm-up, until the entropy is stable, in which gradients are sent whole, in int4 where the
label says so. Thin grey lines: the limits r_max
and r_min. Later stages are drawn thinner on top of earlier ones, so that equal ranks remain visible. A line
that stays at a limit means that the model asked for a rank outside it: the method then acts like a fixed
rank."""


def draw(results: Path) -> Figure:
    """One panel per EDGC policy: rank against iteration, a line per stage and seed."""
    curves = inputs.read(results, "methods", "curves.csv")
    runs = inputs.read(results, "methods")
    variants = list(dict.fromkeys(runs.loc[runs["method"] == "edgc", "variant"]))
    if not variants:
        raise UserError("no EDGC run in the methods study", where=results / "methods" / "table.csv")
    fig, axes = style.figure(len(variants), 1, height=1.0 + 1.05 * len(variants), sharex=True, sharey=True)
    stages = sorted(int(name.removeprefix("rank_")) for name in curves if name.startswith("rank_"))
    for ax, variant in zip(axes, variants, strict=True):
        panel(ax, curves[curves["variant"] == variant], stages)
        limits(ax, runs[runs["variant"] == variant])
        label = str(runs.loc[runs["variant"] == variant, "label"].iloc[0])
        title = textwrap.fill(f"{label}: {course(curves[curves['variant'] == variant], stages)}", 42)
        ax.set(title=title, ylabel="rank r")
    axes[-1].set_xlabel("iteration")
    axes[0].set_ylim(bottom=0)
    axes[0].yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    mine = curves[curves["variant"].isin(variants)]
    texts.title_legend(fig, *style.handles(*axes), seen(mine, stages), ncols=3, columnspacing=1.0)
    texts.letter(axes)
    seeds = runs[runs["variant"].isin(variants)].groupby("variant")["seed"].nunique()
    texts.annotate(fig, list(seeds), bars="every seed is a line, the first one solid", scale=results.name)
    return fig


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
