"""EDGC beside its own ranks in another order: the ranks over training, and what following them is worth."""

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import inputs, style, texts
from paper_figures.hero import count, select, title

TABLES = ("policies/comparisons.csv", "policies/pairs.csv", "policies/curves.csv")
CAPTION = """\
**Do ranks that follow the entropy beat the same ranks in another order?** All runs of a seed share one uncompressed
warm-up. (a) The rank of stage 0: EDGC's, a line a seed, and below it for the first seed the same ranks reversed,
shuffled and falling, and the fixed rank that sends as many bytes. (b) Validation loss of EDGC less that of each rival,
paired by seed (nats; left of zero EDGC is better); within the margin where the 90 % interval, narrower
than the bars, lies in the shaded band; "cannot tell" where the rival costs less than twice the margin against no
compression, so that nothing was to be won. *Placebos*: the mean of reversed and shuffled. A row that
says "not tested" is of a policy that hardly moved: the rule is in ``experiments/analyse/acting.py``."""
# rival: variant, colour, line, marker
ORDERS = {
    "fixed rank": ("even", "#0072B2", "-", "s"),
    "reversed": ("reversed", "#CC79A7", "--", "<"),
    "shuffled": ("shuffled_1", "#999933", ":", ">"),
    "falling": ("falling", "#117733", "-.", "v"),
}


def draw(results: Path) -> Figure:
    """(a) ranks of stage 0, (b) differences from every rival, EDGC with each type of factors."""
    comparisons = inputs.read(results, "policies", "comparisons.csv")
    pairs = inputs.read(results, "policies", "pairs.csv")
    fig, axes = style.figure(2, 1, height=5.8, height_ratios=[2, 3])
    ranks(axes[0], inputs.read(results, "policies", "curves.csv"))
    rows = comparisons[(comparisons["policy"] == "cqm") & comparisons["variant"].isin(["cqm", "cqm_int8"])]
    differences(axes[1], rows[~rows["rival"].isin(["no compression", "fp32 factors"])], pairs)
    note = texts.count_note(rows["n"], bars="(b) bars: 95 % t interval of the mean, dots: seeds", scale=results.name)
    return texts.finish(fig, axes, title(select(comparisons)), note, style.handles(axes[0]), ncols=3)


def ranks(ax: Axes, curves: pd.DataFrame) -> None:
    """EDGC's of every seed; of the first seed those of the runs that follow it."""
    edgc, first = style.FAMILIES["edgc"], curves["seed"].min()
    for place, (_, run) in enumerate(curves[curves["variant"] == "cqm"].groupby("seed")):
        label = edgc.label if place == 0 else None
        ax.step(run["iteration"], run["rank_0"], color=edgc.colour, alpha=1 if place == 0 else 0.4, label=label)
    for rival, (variant, colour, line, _) in ORDERS.items():
        run = curves[(curves["variant"] == variant) & (curves["seed"] == first)]
        if len(run):
            ax.step(run["iteration"], run["rank_0"], color=colour, linestyle=line, linewidth=0.9, label=rival)
    ax.set(title="rank of stage 0", xlabel="iteration", ylabel="rank r", ylim=(0, None))


def differences(ax: Axes, rows: pd.DataFrame, pairs: pd.DataFrame) -> None:
    """A row a rival, with its number of seeds; the shaded band is the margin of equality."""
    none = style.FAMILIES["none"]
    looks = {rival: (colour, marker) for rival, (_, colour, _, marker) in ORDERS.items()} | {
        "placebos": ("#882255", "P")
    }
    for place, row in enumerate(rows.itertuples(index=False)):
        colour, marker = looks.get(str(row.rival), (none.colour, none.marker))
        mine = (pairs["variant"] == row.variant) & (pairs["rival"] == row.rival)
        values = pairs.loc[mine, "difference_nats"].dropna()
        ax.plot(values, [place] * len(values), ".", color=colour, markersize=3, linewidth=0, alpha=0.6)
        half = 0.0 if pd.isna(row.difference_high) else row.difference_high - row.difference_nats
        face = colour if row.factor_dtype == "fp32" else "white"
        look: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "markerfacecolor": face}
        ax.errorbar(row.difference_nats, place, xerr=half, **look)
        count(ax, place, f"n = {row.n:.0f}")
    margin = rows["margin_nats"].max()
    ax.axvspan(-margin, margin, color="#DDDDDD", zorder=0)
    ax.axvline(0, color="#444444", linewidth=0.6)
    kinds = rows["rival"] + rows["factor_dtype"].map(lambda dtype: "" if dtype == "fp32" else f", {dtype}")
    ax.set_yticks(range(len(rows)), [f"{kind}: {word}" for kind, word in zip(kinds, rows["verdict"], strict=True)])
    ax.set(ylim=(len(rows) - 0.5, -0.5), title="EDGC less its rival", ylabel="rival: EDGC is")
    ax.set_xlabel("validation loss of EDGC\nless that of the rival (nats)")
    style.plain_linear(ax.xaxis, 4)
