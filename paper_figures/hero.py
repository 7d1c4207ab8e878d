"""The first figure that a reader sees: is it worth following the entropy of the gradients?

``python -m paper_figures hero --results results/reference/workstation`` writes it for light and for dark pages too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.acting import NOT_TESTED
from experiments.common.equivalence import CANNOT_TELL
from experiments.common.files import atomic_write
from paper_figures import inputs, saving, style, texts
from paper_figures.families import FAMILIES

TABLES = ("policies/comparisons.csv",)
CAPTION = """\
**Is it worth following the entropy?** EDGC against no compression and against rivals that send as many bytes, in the
study ``policies``: validation loss of EDGC minus that of the rival of the same seed. Left of zero EDGC is better. A
difference of 0.01 nats is about 1 % of perplexity. Points are means over seeds, bars 95 % t intervals; an open point
says that the interval holds zero. Differences in the shaded band are so small that they count as none. What the fixed
rank itself costs is what there was to win. Factors of fewer bits are shown where there are at least five seeds."""
RIVALS = {
    "no compression": "no compression\n(sends all bytes)",
    "fixed rank": "one fixed rank\nof the same bytes",
    "falling": "the same ranks\nsorted to only fall",
    "shuffled": "the same ranks\nin random order",
    "reversed": "the same ranks\nin reverse order",
}
WIDE = 2.2  # columns, of a figure for a web page
MOST, SEEDS = 9, 5  # rows; seeds that a row of quantised factors needs
SAME = "one fixed rank of the same bytes"
PAGE = {"light": "#FFFFFF", "dark": "#0D1117"}
INK = {"light": "#222222", "dark": "#E6E6E6"}
GREY = {"light": "#E3E3E3", "dark": "#2B323B"}  # the band; on a light page also what lies behind


def draw(results: Path) -> Figure:
    """EDGC's validation loss minus each rival's (nats, mean and 95 % t interval), a row a rival."""
    return drawn(results, "light")


def drawn(results: Path, page: str, *, wide: bool = False) -> Figure:
    """As :func:`draw`, for a ``light`` or a ``dark`` page; ``wide``: low enough to fill the column of a web page, a
    line a row and the verdict beside it."""
    rows = chosen(inputs.read(results, "policies", "comparisons.csv"))
    fig, (ax,) = style.figure(height=1.5 + 0.3 * len(rows))
    if wide:
        fig.set_size_inches(WIDE * style.COLUMN, 1.25 + 0.2 * len(rows))
    forest(ax, rows, page, wide=wide)
    between = " " if wide else "\n"
    ax.set_xlabel(f"validation loss: EDGC minus the other (nats;{between}0.01 nats are about 1 % of perplexity)")
    ax.set_ylabel("EDGC against")
    texts.headline(fig, title(rows))
    fig.get_layout_engine().set(h_pad=0.02)  # type: ignore[union-attr, call-arg]
    texts.annotate(fig, list(rows["n"]), bars="bars: 95 % t interval", scale=results.name,
                   extra=("Shaded: counts as no difference. Open: the bar holds zero.", room(rows)))  # fmt: skip
    recolour(fig, ax, page)
    return fig


def chosen(found: pd.DataFrame) -> pd.DataFrame:
    """EDGC's comparisons in the order of ``RIVALS``; those of quantised factors where they have seeds enough."""
    mine = found[found["variant"].str.fullmatch("cqm|cqm_int[0-9]+") & found["rival"].isin(RIVALS)]
    mine = mine[(mine["factor_dtype"] == "fp32") | (mine["n"] >= SEEDS)]
    order = mine["rival"].map(list(RIVALS).index)
    return mine.assign(order=order).sort_values(["factor_dtype", "order"], key=fp32_first, kind="stable").head(MOST)


def fp32_first(column: pd.Series) -> pd.Series:
    """What to sort by, for the rows of fp32 factors come first."""
    return column != "fp32" if column.name == "factor_dtype" else column


def title(rows: pd.DataFrame) -> str:
    """What is seen against the fixed rank that sends as many bytes."""
    against = rows[(rows["rival"] == "fixed rank") & (rows["factor_dtype"] == "fp32")]
    if against.empty or pd.isna(against["difference_low"].iloc[0]):
        return "EDGC against other ways to send as many bytes"
    row = against.iloc[0]
    if row["verdict"] == NOT_TESTED:
        return "Not tested: EDGC's ranks hardly moved"
    if row["difference_low"] > 0:
        return f"Ranks that follow entropy do no better than {SAME}"
    if row["verdict"] == CANNOT_TELL:
        return f"Cannot tell: {SAME} leaves too little to win"
    if row["difference_high"] < 0:
        return f"Ranks that follow entropy do better than {SAME}"
    if max(-row["difference_low"], row["difference_high"]) < row["margin_nats"]:
        return f"Ranks that follow entropy do as well as {SAME}"
    return f"Not decided: do ranks that follow entropy beat {SAME}?"


def room(rows: pd.DataFrame) -> str:
    """What the fixed rank costs against no compression, in words; empty where that is not known."""
    against = rows[(rows["rival"] == "fixed rank") & (rows["factor_dtype"] == "fp32")]
    gap = against["rival_gap_nats"].iloc[0] if len(against) and "rival_gap_nats" in against else float("nan")
    few = gap < 2 * rows["margin_nats"].max()
    told = ", less than twice the margin: which of the two is better cannot be told" if few else ""
    return "" if pd.isna(gap) else f"To win: the fixed rank costs {gap:+.4f} nats against no compression{told}."


def forest(ax: Axes, rows: pd.DataFrame, page: str, *, wide: bool = False) -> None:
    """A point with its interval and its number of seeds a row; the side on which EDGC is better in words."""
    colour = FAMILIES["edgc"].colour
    names = []
    for place, (_, row) in enumerate(rows.iterrows()):
        low, high = row["difference_low"], row["difference_high"]
        half = 0.0 if pd.isna(low) else high - row["difference_nats"]
        face = PAGE[page] if low <= 0 <= high else colour
        marks: dict[str, Any] = {
            "color": colour,
            "marker": "o",
            "markersize": 5.5,
            "markerfacecolor": face,
            "elinewidth": 1.6,
        }
        ax.errorbar(row["difference_nats"], place, xerr=half, **marks)
        told = f", {row['verdict']}" if wide else ""
        ax.annotate(f"n = {row['n']:.0f}{told}", (1.0, place), (3, 0), ("axes fraction", "data"), "offset points",
                    va="center", fontsize=style.MIN_FONT)  # fmt: skip
        bits = "" if row["factor_dtype"] == "fp32" else f", {row['factor_dtype']}"
        name = RIVALS[row["rival"]] + bits
        names.append(name.replace("\n", " ") if wide else name)
    margin = rows["margin_nats"].max()
    ax.axvspan(-margin, margin, color=GREY[page], zorder=0, linewidth=0)
    ax.axvline(0, color=INK[page], linewidth=0.9)
    for words, to, align in (("← EDGC better", -4, "right"), ("EDGC worse →", 4, "left")):
        ax.annotate(words, (0, 1.0), (to, 2), ("data", "axes fraction"), "offset points",
                    ha=align, va="bottom", fontsize=style.FONT, fontweight="bold")  # fmt: skip
    ax.set_yticks(range(len(rows)), names)
    ends = rows[["difference_low", "difference_high"]].stack()
    far = 1.15 * max(margin, ends.abs().max()) if len(ends) else 2 * margin
    ax.set(ylim=(len(rows) - 0.5, -0.5), xlim=(-far, far))
    ax.grid(axis="y", visible=False)
    style.plain_linear(ax.xaxis)


def recolour(fig: Figure, ax: Axes, page: str) -> None:
    """Page, frame and text in the colours of the page."""
    fig.set_facecolor(PAGE[page])
    ax.set_facecolor(PAGE[page])
    ax.grid(axis="x", color=GREY[page])
    ax.tick_params(colors=INK[page])
    for spine in ax.spines.values():
        spine.set_edgecolor(GREY[page])
    for text in (ax.xaxis.label, ax.yaxis.label, *ax.texts, *fig.texts):
        text.set_color(INK[page])


def pages(results: Path, out: Path) -> list[Path]:
    """Write ``hero-light.svg`` and ``hero-dark.svg`` to ``out``."""
    written = []
    for page in PAGE:
        path = out / f"hero-{page}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, saving.svg(drawn(results, page, wide=True)))
        written.append(path)
    return written
