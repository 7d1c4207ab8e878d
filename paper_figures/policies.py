"""EDGC beside its own ranks in another order: the ranks over training, and what following them is worth."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import inputs, style, texts
from paper_figures.families import FAMILIES
from paper_figures.hero import chosen, title

TABLES = ("policies/comparisons.csv", "policies/pairs.csv", "policies/curves.csv")
CAPTION = """\
**Do ranks that follow the entropy beat the same ranks in another order?** All runs of a seed share one uncompressed
warm-up. (a) The rank of stage 0: EDGC's, a line a seed, and below it for the first seed the same ranks reversed,
shuffled and falling, and the fixed rank that sends as many bytes. (b) Validation loss of EDGC less that of each rival,
paired by seed (nats; left of zero EDGC is better); within the margin where the 90 % interval, narrower
than the bars, lies in the shaded band; "cannot tell" where the rival costs less than twice the margin against no
compression, so that nothing was to be won. *Placebos*: the mean of reversed and shuffled. A row that
says "not tested" is of a policy that hardly moved: the rule is in ``experiments/analyse/acting.py``."""
ORDERS = {
    "fixed rank": ("even", "#0072B2", "-"),
    "reversed": ("reversed", "#CC79A7", "--"),
    "shuffled": ("shuffled_1", "#999933", ":"),
    "falling": ("falling", "#117733", "-."),
}
MARKS = {"fixed rank": "s", "reversed": "<", "shuffled": ">", "falling": "v"}


def draw(results: Path) -> Figure:
    """(a) ranks of stage 0, (b) differences from every rival, EDGC with each type of factors."""
    found = inputs.read(results, "policies", "comparisons.csv")
    pairs = inputs.read(results, "policies", "pairs.csv")
    fig, axes = style.figure(2, 1, height=5.8, height_ratios=[2, 3])
    ranks(axes[0], inputs.read(results, "policies", "curves.csv"))
    mine = found[(found["policy"] == "cqm") & found["variant"].isin(["cqm", "cqm_int8"])]
    shown = mine[~mine["rival"].isin(["no compression", "fp32 factors"])]
    differences(axes[1], shown, pairs)
    seeds(axes[1], shown)
    texts.letter(axes)
    drawn, labels = style.handles(axes[0])
    texts.title_legend(fig, drawn, labels, title(chosen(found)), ncols=3, columnspacing=1.0)
    bars = "(b) bars: 95 % t interval of the mean, dots: seeds"
    texts.annotate(fig, list(mine["n"]), bars=bars, scale=results.name)
    return fig


def ranks(ax: Axes, curves: pd.DataFrame) -> None:
    """EDGC's of every seed; of the first seed those of the runs that follow it."""
    edgc, first = FAMILIES["edgc"], curves["seed"].min()
    for place, (_, mine) in enumerate(curves[curves["variant"] == "cqm"].groupby("seed")):
        label = edgc.label if place == 0 else None
        ax.step(mine["iteration"], mine["rank_0"], color=edgc.colour, alpha=1 if place == 0 else 0.4, label=label)
    for rival, (variant, colour, line) in ORDERS.items():
        mine = curves[(curves["variant"] == variant) & (curves["seed"] == first)]
        if len(mine):
            ax.step(mine["iteration"], mine["rank_0"], color=colour, linestyle=line, linewidth=0.9, label=rival)
    ax.set(title="rank of stage 0", xlabel="iteration", ylabel="rank r", ylim=(0, None))


def looks(rival: str) -> tuple[str, str]:
    """Colour and marker of a rival; the placebos together have a look of their own."""
    if rival in ORDERS:
        return ORDERS[rival][1], MARKS[rival]
    if rival == "placebos":
        return "#882255", "P"
    none = FAMILIES["none"]
    return none.colour, none.marker


def seeds(ax: Axes, rows: pd.DataFrame) -> None:
    """The number of seeds at the right of every row."""
    for place, n in enumerate(rows["n"]):
        ax.annotate(f"n = {n:.0f}", (1.0, place), (3, 0), ("axes fraction", "data"), "offset points",
                    va="center", fontsize=style.MIN_FONT)  # fmt: skip


def differences(ax: Axes, found: pd.DataFrame, pairs: pd.DataFrame) -> None:
    """A row a rival; the shaded band is the margin of equality."""
    for place, row in enumerate(found.itertuples(index=False)):
        colour, mark = looks(str(row.rival))
        values = pairs.loc[
            (pairs["variant"] == row.variant) & (pairs["rival"] == row.rival), "difference_nats"
        ].dropna()
        ax.plot(values, [place] * len(values), ".", color=colour, markersize=3, linewidth=0, alpha=0.6)
        half = 0.0 if pd.isna(row.difference_high) else row.difference_high - row.difference_nats
        face = colour if row.factor_dtype == "fp32" else "white"
        ax.errorbar(
            row.difference_nats, place, xerr=half, color=colour, marker=mark, markersize=4, markerfacecolor=face
        )
    margin = found["margin_nats"].max()
    ax.axvspan(-margin, margin, color="#DDDDDD", zorder=0)
    ax.axvline(0, color="#444444", linewidth=0.6)
    kinds = found["rival"] + found["factor_dtype"].map(lambda of: "" if of == "fp32" else f", {of}")
    ax.set_yticks(range(len(found)), [f"{kind}: {said}" for kind, said in zip(kinds, found["verdict"], strict=True)])
    ax.set(ylim=(len(found) - 0.5, -0.5), title="EDGC less its rival")
    ax.set(xlabel="validation loss of EDGC\nless that of the rival (nats)", ylabel="rival: EDGC is")
    style.plain_linear(ax.xaxis, 4)
