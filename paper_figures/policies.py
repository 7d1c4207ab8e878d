"""Policies beside fixed ranks: gap against bytes, the excess at equal bytes, and the ranks over training."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.acting import NOT_TESTED
from paper_figures import style
from paper_figures.families import FAMILIES, Family

TABLES = ("policies/excess.csv", "policies/verdicts.csv", "policies/curves.csv")
CAPTION = """\
**Policies against fixed ranks at equal bytes.** All runs share one uncompressed warm-up. (a) Validation loss
above uncompressed training of the same seed (nats) against the bytes sent, as a share of an fp32 all-reduce (of
a bf16 one: twice that); lines join fixed ranks, open markers have quantised factors. (b) What each policy costs
beyond a fixed rank that sends as many bytes, read off the line of the same seed and type of factors; left of
zero a policy is better than standing still. The rule of the verdict is in ``experiments/analyse/policies.py``,
the verdicts are in ``policies/verdicts.csv``: an interval that contains zero says nothing. *Not tested*: the
policy did not act, so its runs are those of a fixed rank. (c) The ranks behind it."""
FIXED = {
    "fp32": (FAMILIES["powersgd"], "fixed ranks"),
    "int8": (FAMILIES["factors_int8"], "fixed ranks, int8 factors"),
    "int4": (FAMILIES["factors_int4"], "fixed ranks, int4 factors"),
}
LOOKS = {
    "cqm": "edgc",
    "released": "released",
    "loss": "loss",
    "spectral": "spectral",
    "schedule": "schedule",
}


def draw(results: Path) -> Figure:
    """(a) gap against bytes, (b) excess over fixed ranks at equal bytes, (c) ranks of stage 0."""
    runs = style.read(results, "policies", "excess.csv")
    found = style.read(results, "policies", "verdicts.csv")
    curves = style.read(results, "policies", "curves.csv")
    fig, axes = style.figure(1, 3, width=style.TEXT, height=3.4, width_ratios=[5, 4, 4])
    gaps(axes[0], runs)
    excesses(axes[1], found[found["policy"] != "fixed"], runs)
    ranks(axes[2], curves, runs)
    style.letter(axes)
    drawn, labels = style.handles(axes[0], axes[2])
    fig.legend(drawn, labels, loc="outside upper center", ncols=4, columnspacing=1.0)
    style.annotate(
        fig,
        list(found["n"]),
        bars="(a) small dots: runs; (b) bars: 95 % t interval of the mean, dots: runs",
        scale=results.name,
        extra="(b) only runs between the fewest and the most bytes of the fixed ranks; right of 0 is worse",
    )
    return fig


def look(policy: str, dtype: str) -> Family:
    """Colour and marker by policy; open markers stand for quantised factors."""
    return FIXED[dtype][0] if policy == "fixed" else FAMILIES[LOOKS[policy]]


def gaps(ax: Axes, runs: pd.DataFrame) -> None:
    """Means over seeds; fixed ranks are joined by a line, which the others are compared with."""
    fine = runs[runs["status"] == "ok"].assign(percent=100 * runs["bytes_ratio"])
    for dtype, mine in fine[fine["policy"] == "fixed"].groupby("factor_dtype"):
        family, label = FIXED[str(dtype)]
        means = mine.groupby("variant")[["percent", "gap_nats"]].mean().sort_values("percent")
        ax.plot(means["percent"], means["gap_nats"], label=label, zorder=2, **family.marks("-"))
    for (variant, policy, dtype), mine in fine.groupby(["variant", "policy", "factor_dtype"], sort=False):
        family = look(str(policy), str(dtype))
        ax.plot(mine["percent"], mine["gap_nats"], ".", color=family.colour, markersize=2, alpha=0.6)
        if policy == "fixed":
            continue
        x, y = mine["percent"].mean(), mine["gap_nats"].mean()
        shown = family.label if dtype == "fp32" else None
        ax.plot(x, y, label=shown, zorder=3, **family.marks(filled=dtype == "fp32"))
        if policy != "schedule":
            continue
        name, small = str(variant).removesuffix(f"_{dtype}"), style.MIN_FONT
        style.outline(ax.annotate(name, (x, y), (4, 3), textcoords="offset points", fontsize=small))
    ax.axhline(0, color="#444444", linewidth=0.6)
    ax.set(title="gap against bytes", xlabel=style.share_of_bytes(", warm-up included"))
    ax.set_ylabel("validation loss above uncompressed (nats)")


def excesses(ax: Axes, found: pd.DataFrame, runs: pd.DataFrame) -> None:
    """One row a policy; empty rows had no fixed rank of as many bytes."""
    for place, row in enumerate(found.itertuples(index=False)):
        family = look(row.policy, row.factor_dtype)
        values = runs.loc[runs["variant"] == row.variant, "excess_nats"].dropna()
        ax.plot(values, [place] * len(values), ".", color=family.colour, markersize=3, alpha=0.6)
        said = [word for word, so in (("outside", values.empty), (NOT_TESTED, row.verdict == NOT_TESTED)) if so]
        ax.text(0, place, "  " + ", ".join(said), va="center", fontsize=style.MIN_FONT, color="#444444")
        if not values.empty:
            half = 0.0 if pd.isna(row.excess_high) else row.excess_high - row.excess_nats
            ax.errorbar(row.excess_nats, place, xerr=half, color=family.colour, marker=family.marker)
    ax.axvline(0, color="#444444", linewidth=0.6)
    ax.set_yticks(range(len(found)), found["label"].tolist())
    ax.set(ylim=(len(found) - 0.5, -0.5), title="excess at equal bytes")
    ax.set(xlabel="gap minus that of fixed ranks\nat the same bytes (nats)", ylabel="policy")


def ranks(ax: Axes, curves: pd.DataFrame, runs: pd.DataFrame) -> None:
    """The first seed's ranks of stage 0, fp32 factors; nothing is drawn where nothing is compressed."""
    seed = curves["seed"].min()
    chosen = runs[(runs["policy"] != "fixed") & (runs["factor_dtype"] == "fp32") & (runs["seed"] == seed)]
    for row in chosen.itertuples(index=False):
        family = look(row.policy, row.factor_dtype)
        mine = curves[(curves["variant"] == row.variant) & (curves["seed"] == seed)]
        drawn = {"color": family.colour, "linestyle": family.line, "linewidth": 1.2}
        ax.step(mine["iteration"], mine["rank_0"], where="post", **drawn)
    ax.set_ylim(bottom=0)
    ax.set(title="rank of stage 0", xlabel="iteration", ylabel="rank r")
