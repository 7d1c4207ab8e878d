"""The first figure that a reader sees: is it worth following the entropy of the gradients?

``python -m paper_figures hero --results results/reference/workstation`` writes it for light and for dark pages too.
"""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.acting import NOT_TESTED
from experiments.common.equivalence import CANNOT_TELL
from experiments.common.files import atomic_write
from paper_figures import inputs, saving, style, texts

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


def draw(results: Path, page: str = "light", *, wide: bool = False) -> Figure:
    """EDGC's validation loss minus each rival's (nats, mean and 95 % t interval), a row a rival.

    Args:
        page: the page to be drawn for, ``light`` or ``dark``.
        wide: low enough to fill the column of a web page, a line a row and the verdict beside it.
    """
    rows = select(inputs.read(results, "policies", "comparisons.csv"))
    fig, (ax,) = style.figure(height=1.5 + 0.3 * len(rows))
    if wide:
        fig.set_size_inches(WIDE * style.COLUMN, 1.25 + 0.2 * len(rows))
    forest(ax, rows, page, wide=wide)
    between = " " if wide else "\n"
    ax.set_xlabel(f"validation loss: EDGC minus the other (nats;{between}0.01 nats are about 1 % of perplexity)")
    ax.set_ylabel("EDGC against")
    fig.get_layout_engine().set(h_pad=0.02)  # type: ignore[union-attr, call-arg]
    shaded = "Shaded: counts as no difference. Open: the bar holds zero."
    note = texts.count_note(rows["n"], shaded, room(rows), bars="bars: 95 % t interval", scale=results.name)
    texts.finish(fig, [], title(rows), note)
    recolour(fig, ax, page)
    return fig


def select(comparisons: pd.DataFrame) -> pd.DataFrame:
    """EDGC's comparisons in the order of ``RIVALS``; those of quantised factors where they have seeds enough."""
    fp32 = comparisons["factor_dtype"] == "fp32"
    known = comparisons["variant"].str.fullmatch("cqm|cqm_int[0-9]+") & comparisons["rival"].isin(RIVALS)
    rows = comparisons.assign(
        quantised=~fp32, order=comparisons["rival"].map({name: k for k, name in enumerate(RIVALS)})
    )
    rows = rows[known & (fp32 | (rows["n"] >= SEEDS))]
    return rows.sort_values(["quantised", "order"], kind="stable").head(MOST)


def against_fixed_rank(rows: pd.DataFrame) -> pd.Series | None:
    """The comparison with the fixed rank that sends as many bytes, of fp32 factors."""
    against = rows[(rows["rival"] == "fixed rank") & (rows["factor_dtype"] == "fp32")]
    return None if against.empty else against.iloc[0]


def title(rows: pd.DataFrame) -> str:
    """Title by the comparison with the fixed rank that sends as many bytes."""
    row = against_fixed_rank(rows)
    if row is None or pd.isna(row["difference_low"]):
        return "EDGC against other ways to send as many bytes"
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
    """Cost of the fixed rank against no compression, in words; empty where that is not known."""
    row = against_fixed_rank(rows)
    if row is None or pd.isna(gap := row.get("rival_gap_nats")):
        return ""
    few = gap < 2 * rows["margin_nats"].max()
    told = ", less than twice the margin: which of the two is better cannot be told" if few else ""
    return f"To win: the fixed rank costs {gap:+.4f} nats against no compression{told}."


def forest(ax: Axes, rows: pd.DataFrame, page: str, *, wide: bool = False) -> None:
    """A point with its interval and its number of seeds a row; the side on which EDGC is better in words."""
    colour = style.FAMILIES["edgc"].colour
    names = []
    for place, (_, row) in enumerate(rows.iterrows()):
        low, high = row["difference_low"], row["difference_high"]
        half = 0.0 if pd.isna(low) else high - row["difference_nats"]
        face = PAGE[page] if low <= 0 <= high else colour
        look: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 5.5, "elinewidth": 1.6}
        ax.errorbar(row["difference_nats"], place, xerr=half, markerfacecolor=face, **look)
        count(ax, place, f"n = {row['n']:.0f}" + (f", {row['verdict']}" if wide else ""))
        name = RIVALS[row["rival"]] + ("" if row["factor_dtype"] == "fp32" else f", {row['factor_dtype']}")
        names.append(name.replace("\n", " ") if wide else name)
    margin = rows["margin_nats"].max()
    ax.axvspan(-margin, margin, color=GREY[page], zorder=0, linewidth=0)
    ax.axvline(0, color=INK[page], linewidth=0.9)
    for words, offset, align in (("← EDGC better", -4, "right"), ("EDGC worse →", 4, "left")):
        ax.annotate(words, (0, 1.0), (offset, 2), ("data", "axes fraction"), "offset points",
                    ha=align, va="bottom", fontsize=style.FONT, fontweight="bold")  # fmt: skip
    ax.set_yticks(range(len(rows)), names)
    ends = rows[["difference_low", "difference_high"]].stack()
    far = 1.15 * max(margin, ends.abs().max()) if len(ends) else 2 * margin
    ax.set(ylim=(len(rows) - 0.5, -0.5), xlim=(-far, far))
    ax.grid(axis="y", visible=False)
    style.plain_linear(ax.xaxis)


def count(ax: Axes, place: int, text: str) -> None:
    """Write the number of seeds at the right of a row."""
    ax.annotate(text, (1.0, place), (3, 0), ("axes fraction", "data"), "offset points",
                va="center", fontsize=style.MIN_FONT)  # fmt: skip


def recolour(fig: Figure, ax: Axes, page: str) -> None:
    """Page, frame and text in the colours of the page."""
    fig.set_facecolor(PAGE[page])
    ax.set_facecolor(PAGE[page])
    ax.grid(axis="x", color=GREY[page])
    ax.tick_params(colors=INK[page])
    plt.setp(list(ax.spines.values()), edgecolor=GREY[page])
    plt.setp([ax.xaxis.label, ax.yaxis.label, *ax.texts, *fig.texts], color=INK[page])


def pages(results: Path, out: Path) -> list[Path]:
    """Write ``hero-light.svg`` and ``hero-dark.svg`` to ``out``."""
    written = [out / f"hero-{page}.svg" for page in PAGE]
    for page, path in zip(PAGE, written, strict=True):
        fig = draw(results, page, wide=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, saving.encoded(fig, "svg", facecolor=fig.get_facecolor()))
        plt.close(fig)
    return written
