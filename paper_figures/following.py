"""Is it worth following the entropy of the gradients? EDGC against its rivals: first figure, ranks, every setting."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.acting import NOT_TESTED
from experiments.common.equivalence import CANNOT_TELL
from experiments.common.files import atomic_write
from experiments.common.written_tables import kept
from paper_figures import inputs, saving, style, texts
from paper_figures.edgc_course import course

TABLES = {
    "hero": ("policies/comparisons.csv",),
    "policies": ("policies/comparisons.csv", "policies/pairs.csv", "policies/curves.csv"),
    "policies_settings": (
        "policies/comparisons.csv",
        "policies/pairs.csv",
        "policies/curves.csv",
        "policies_late/comparisons.csv",
        "policies_late/pairs.csv",
        "policies_late/curves.csv",
        "policies_two_stages/comparisons.csv",
        "policies_two_stages/pairs.csv",
        "policies_two_stages/curves.csv",
        "policies_four_replicas/comparisons.csv",
        "policies_four_replicas/pairs.csv",
        "policies_four_replicas/curves.csv",
        "policies_bert/comparisons.csv",
        "policies_bert/pairs.csv",
        "policies_bert/curves.csv",
    ),
}
CAPTION = {
    "hero": """\
**Is it worth following the entropy?** EDGC against no compression and against rivals that send as many bytes, in the
study ``policies``: validation loss of EDGC minus that of the rival of the same seed. Left of zero EDGC is better. A
difference of 0.01 nats is about 1 % of perplexity. Points are means over seeds, bars 95 % t intervals; an open point
says that the interval holds zero. Differences in the shaded band are so small that they count as none. What the fixed
rank itself costs is what there was to win. Factors of fewer bits are shown where there are at least five seeds.""",
    "policies": """\
**Do ranks that follow the entropy beat the same ranks in another order?** All runs of a seed share one uncompressed
warm-up. (a) The rank of stage 0: EDGC's, a line a seed, and below it for the first seed the same ranks reversed,
shuffled and falling, and the fixed rank that sends as many bytes. (b) Validation loss of EDGC less that of each rival,
paired by seed (nats; left of zero EDGC is better); within the margin where the 90 % interval, narrower
than the bars, lies in the shaded band; "cannot tell" where the rival costs less than twice the margin against no
compression, so that nothing was to be won. *Placebos*: the mean of reversed and shuffled. A row that
says "not tested" is of a policy that hardly moved: the rule is in ``experiments/analyse/acting.py``.""",
    "policies_settings": """\
**The same question in every setting.** A panel a setting that has tables; those that have none yet are named below the
figure. Validation loss of EDGC less that of each rival, paired by seed (nats; left of zero EDGC is better); bars are
95 % t intervals, small dots seeds. *Placebos*: the mean of EDGC's own ranks reversed and shuffled; *falling*:
the same ranks sorted. Within the margin: the 90 % interval, narrower than the bars, lies in
the shaded band. Cannot tell: the rival costs less than twice the margin against no compression. Open markers
are int8 factors, shown where there are at least five seeds.""",
}
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
# rival: variant, colour, line, marker
ORDERS = {
    "fixed rank": ("even", "#0072B2", "-", "s"),
    "reversed": ("reversed", "#CC79A7", "--", "<"),
    "shuffled": ("shuffled_1", "#999933", ":", ">"),
    "falling": ("falling", "#117733", "-.", "v"),
}
STUDIES = {
    "policies": "GPT, one stage",
    "policies_late": "warm-up 20 %, rate doubled",
    "policies_two_stages": "two stages",
    "policies_four_replicas": "four replicas",
    "policies_bert": "BERT",
}
# A setting is drawn where its tables are; the target of this figure makes those of all.
OPTIONAL = ("policies_late", "policies_two_stages", "policies_four_replicas", "policies_bert")
MAIN_RIVALS = ("no compression", "fixed rank", "placebos", "falling")


def hero(results: Path, page: str = "light", *, wide: bool = False) -> Figure:
    """EDGC's validation loss minus each rival's (nats, mean and 95 % t interval), a row a rival.

    Args:
        page: the page to be drawn for, ``light`` or ``dark``.
        wide: low enough to fill the column of a web page, a line a row and the verdict beside it.
    """
    rows = select(inputs.read(results, "policies", "comparisons.csv")).head(MOST)
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
    texts.finish(fig, [], answer(rows), note)
    recolour(fig, ax, page)
    return fig


def select(comparisons: pd.DataFrame, rivals: Sequence[str] = tuple(RIVALS), bits: str = "[0-9]+") -> pd.DataFrame:
    """EDGC's comparisons in the order of ``rivals``; those of quantised factors where they have seeds enough."""
    fp32 = comparisons["factor_dtype"] == "fp32"
    known = comparisons["variant"].str.fullmatch(f"cqm|cqm_int{bits}") & comparisons["rival"].isin(rivals)
    order = comparisons["rival"].map({name: k for k, name in enumerate(rivals)})
    rows = comparisons.assign(quantised=~fp32, order=order)[known & (fp32 | (comparisons["n"] >= SEEDS))]
    return rows.sort_values(["quantised", "order"], kind="stable")


def against_fixed_rank(rows: pd.DataFrame) -> pd.Series | None:
    """The comparison with the fixed rank that sends as many bytes, of fp32 factors."""
    against = rows[(rows["rival"] == "fixed rank") & (rows["factor_dtype"] == "fp32")]
    return None if against.empty else against.iloc[0]


def answer(rows: pd.DataFrame) -> str:
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


def hero_pages(results: Path, out: Path) -> list[Path]:
    """Write ``hero-light.svg`` and ``hero-dark.svg`` to ``out``."""
    written = [out / f"hero-{page}.svg" for page in PAGE]
    for page, path in zip(PAGE, written, strict=True):
        fig = hero(results, page, wide=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, saving.encoded(fig, "svg", facecolor=fig.get_facecolor()))
        plt.close(fig)
    return written


def policies(results: Path) -> Figure:
    """(a) ranks of stage 0, (b) differences from every rival, EDGC with each type of factors."""
    comparisons, pairs, curves = inputs.tables(results, TABLES["policies"])
    fig, axes = style.figure(2, 1, height=5.8, height_ratios=[2, 3])
    courses(axes[0], curves)
    rows = comparisons[(comparisons["policy"] == "cqm") & comparisons["variant"].isin(["cqm", "cqm_int8"])]
    differences(axes[1], rows[~rows["rival"].isin(["no compression", "fp32 factors"])], pairs)
    note = texts.count_note(rows["n"], bars="(b) bars: 95 % t interval of the mean, dots: seeds", scale=results.name)
    return texts.finish(fig, axes, answer(select(comparisons)), note, style.handles(axes[0]), ncols=3)


def courses(ax: Axes, curves: pd.DataFrame) -> None:
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


def policies_settings(results: Path) -> Figure:
    """A panel a setting: differences from every rival, with the number of seeds."""
    needed = TABLES["policies_settings"]
    whole = {
        study: all(kept(results / table) for table in needed if table.startswith(f"{study}/")) for study in STUDIES
    }
    drawn = [study for study in STUDIES if study == "policies" or whole[study]]
    tables = {study: select(inputs.read(results, study, "comparisons.csv"), MAIN_RIVALS, "8") for study in drawn}
    counts = [len(rows) for rows in tables.values()]
    height = 1.7 + sum(0.42 + 0.2 * n for n in counts)
    fig, axes = style.figure(len(drawn), 1, height=height, sharex=True, height_ratios=[max(1, n) for n in counts])
    for ax, (study, rows) in zip(axes, tables.items(), strict=True):
        differences(ax, rows, inputs.read(results, study, "pairs.csv"))
        curves = inputs.read(results, study, "curves.csv")
        ax.set(title=f"{STUDIES[study]}: ranks {course(curves[curves['variant'] == 'cqm'])}", xlabel="")
    axes[-1].set_xlabel("validation loss of EDGC\nless that of the rival (nats)")
    style.plain_linear(axes[-1].xaxis)
    texts.letter(axes, from_the_left=True)
    missing = ", ".join(words for study, words in STUDIES.items() if study not in drawn)
    n = [n for rows in tables.values() for n in rows["n"]] or 0
    absent = f"No tables yet: {missing}." if missing else ""
    note = texts.count_note(n, absent, bars="bars: 95 % t interval, dots: seeds", scale=results.name)
    return texts.finish(fig, [], times_won(tables), note)


def times_won(tables: dict[str, pd.DataFrame]) -> str:
    """Number of the settings in which EDGC beats the fixed rank that sends as many bytes."""
    against = [row for rows in tables.values() if (row := against_fixed_rank(rows)) is not None]
    known = [row for row in against if pd.notna(row["difference_high"])]
    if not known:
        return "EDGC against other ways to send as many bytes"
    won = sum(row["difference_high"] < 0 for row in known)
    return f"EDGC beats {SAME} in {won} of {len(known)} settings"
