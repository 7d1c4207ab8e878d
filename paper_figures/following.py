"""Is it worth following the entropy of the gradients? EDGC against its rivals: first figure, ranks, every setting."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.acting import NOT_TESTED
from experiments.common.equivalence import CANNOT_TELL
from experiments.common.files import atomic_write
from paper_figures import inputs, saving, style, texts

TABLES = {
    "hero": ("policies/comparisons.csv",),
    "policies": ("policies/comparisons.csv", "policies/pairs.csv", "policies/curves.csv"),
    "policies_settings": ("policies/comparisons.csv", "policies/pairs.csv"),
}
CAPTION = {
    "hero": """\
**Is it worth following the entropy?** EDGC against two rivals of the same bytes that follow nothing, in every
setting of the study ``policies``: validation loss of EDGC minus that of the rival of the same seed. Left of zero EDGC
is better. A difference of 0.01 nats is about 1 % of perplexity. Points are means over seeds, bars 95 % t intervals;
an open point says that the interval holds zero. Differences in the shaded band are too small to matter. What the rival
costs against no compression is what there was to win. Factors of fewer bits are shown where there are five seeds.""",
    "policies": """\
**Do ranks that follow the entropy beat the same ranks in another order?** All runs of a seed begin alike, without
compression. (a) The rank of stage 0: EDGC's, a line a seed, and below it for the first seed the same ranks reversed,
shuffled and falling, and the fixed rank that sends as many bytes. (b) Validation loss of EDGC minus that of each rival,
paired by seed (nats; left of zero EDGC is better; open: the bar holds zero); within the margin where the 90 % interval,
narrower than the bars, lies in the shaded band; "cannot tell" where the rival costs less than twice the margin against
no compression, so that nothing was to be won. *Placebos*: the mean of reversed and shuffled. A row that
says "not tested" is of a policy that hardly moved: the rule is in ``experiments/analyse/acting.py``.""",
    "policies_settings": """\
**The same question in every setting.** A panel a rival and a row a setting that has runs. Validation loss of EDGC
minus that of the rival, paired by seed (nats; left of zero EDGC is better); bars are 95 % t intervals, small dots
seeds; an open marker says that the bar holds zero. Two replicas of a GPT with one stage, unless the row says
otherwise; ranks *8 to 44* are the range that decides, *8 to 32* the one that was chosen first, *16 to 64* the paper's
own, by its share of bytes. *Reversed*, *falling*: EDGC's own ranks in reverse order, or sorted; *line*: straight down,
from 4/3 to 2/3 of its mean rank. Within the margin: the 90 % interval, narrower than the bars, lies in the shaded band.
No bar: fewer than three seeds. Cannot tell: the rival costs less than twice the margin against no compression.
Rows of int8 factors are shown where there are at least five seeds. Last: the difference from the fixed rank over
what that rank costs, a point a seed.""",
}
RIVALS = {"fixed rank": "fixed rank", "falling": "its ranks sorted"}
WIDE = 2.2  # columns, of a figure for a web page
SEEDS = 5  # that a row of quantised factors needs
SAME = "one fixed rank of the same bytes"
COSTS = "Costs: nats above no compression, which is what there was to win."
# page: its colour, that of text, that of the band of no difference
PAGES = {"light": ("#FFFFFF", "#222222", "#E3E3E3"), "dark": ("#0D1117", "#E6E6E6", "#2B323B")}
# rival: variant, colour, line, marker
ORDERS = {
    "fixed rank": ("even", "#0072B2", "-", "s"),
    "reversed": ("reversed", "#CC79A7", "--", "<"),
    "shuffled": ("shuffled_1", "#999933", ":", ">"),
    "falling": ("falling", "#117733", "-.", "v"),
    "line": ("line", "#332288", "--", "D"),
}
MARKS = {rival: (colour, marker) for rival, (_, colour, _, marker) in ORDERS.items()} | {
    "placebos": ("#882255", "P"),
    "no compression": (style.FAMILIES["none"].colour, style.FAMILIES["none"].marker),
}
SETTINGS = {
    "": "GPT",
    "one_": "one stage, 8 to 44",
    "one_low_": "one stage, 8 to 32",
    "one_wide_": "one stage, 16 to 64",
    "muon_": "Muon",
    "two_": "two stages",
    "bert_": "BERT",
    "eight_": "eight replicas",
}
PLAIN = "no compression"
MAIN_RIVALS = (PLAIN, "fixed rank", "reversed", "falling", "line")


def hero(results: Path, page: str = "light") -> Figure:
    """EDGC's validation loss minus each rival's, a row a rival and setting, as wide as a web page; ``page``: light or
    dark."""
    rows = every_setting(by_setting(inputs.read(results, "policies", "comparisons.csv")), list(RIVALS))
    rows = rows[(rows["rival"] == "fixed rank") | (rows["verdict"] != NOT_TESTED)].sort_values("order", kind="stable")
    fig, (ax,) = style.figure(height=1.25 + 0.2 * len(rows))
    fig.set_size_inches(WIDE * style.COLUMN, fig.get_figheight())
    names = [
        f"{RIVALS[row.rival]} (costs {row.rival_gap_nats:.3f}), {SETTINGS[row.setting]}"
        for row in rows.itertuples(index=False)
    ]
    forest(ax, rows, names, colour=style.FAMILIES["edgc"].colour)
    ax.set_xlabel("validation loss: EDGC minus the other (nats; 0.01: about 1 % of perplexity)")
    ax.set_ylabel("EDGC against")
    for words, offset, align in (("← EDGC better", -4, "right"), ("EDGC worse →", 4, "left")):
        ax.annotate(words, (0, 1.0), (offset, 2), ("data", "axes fraction"), "offset points",
                    ha=align, va="bottom", fontsize=style.FONT, fontweight="bold")  # fmt: skip
    fig.get_layout_engine().set(h_pad=0.02)  # type: ignore[union-attr, call-arg]
    shaded = "Shaded: too little to matter. Open: the bar holds zero."
    note = texts.count_note(rows["n"], shaded, COSTS, bars="bars: 95 % t interval", scale=results.name)
    texts.finish(fig, [], times_won(rows), note)
    recolour(fig, ax, *PAGES[page])
    return fig


def hero_pages(results: Path, out: Path) -> list[Path]:
    """Write ``hero-light.svg`` and ``hero-dark.svg`` to ``out``."""
    written = [out / f"hero-{page}.svg" for page in PAGES]
    for page, path in zip(PAGES, written, strict=True):
        fig = hero(results, page)
        atomic_write(path, saving.encoded(fig, "svg", facecolor=fig.get_facecolor()))
        plt.close(fig)
    return written


def recolour(fig: Figure, ax: Axes, ground: str, ink: str, grey: str) -> None:
    """Page, frame, band, open markers and text in the colours of the page."""
    for patch in (fig.patch, ax.patch):
        patch.set_facecolor(ground)
    ax.patches[0].set_facecolor(grey)
    ax.grid(axis="x", color=grey)
    ax.tick_params(colors=ink)
    for line in ax.lines:
        if line.get_markerfacecolor() == "white":
            line.set_markerfacecolor(ground)
    ax.lines[-1].set_color(ink)  # of zero
    plt.setp(list(ax.spines.values()), edgecolor=grey)
    plt.setp([ax.xaxis.label, ax.yaxis.label, *ax.texts, *fig.texts], color=ink)


def select(comparisons: pd.DataFrame, rivals: list[str], bits: str = "[0-9]+") -> pd.DataFrame:
    """EDGC's comparisons in the order of ``rivals``; those of quantised factors where they have seeds enough."""
    fp32 = comparisons["factor_dtype"] == "fp32"
    known = comparisons["variant"].str.fullmatch(f"cqm|cqm_int{bits}") & comparisons["rival"].isin(rivals)
    rows = comparisons.assign(
        quantised=~fp32, order=comparisons["rival"].map({rival: place for place, rival in enumerate(rivals)})
    )
    return rows[known & (fp32 | (comparisons["n"] >= SEEDS))].sort_values(["quantised", "order"], kind="stable")


def every_setting(comparisons: pd.DataFrame, rivals: list[str], bits: str = "[0-9]+") -> pd.DataFrame:
    """Those of every setting (:func:`by_setting`), one after another."""
    return pd.concat([select(rows, rivals, bits) for _, rows in comparisons.groupby("setting", sort=False)])


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
        return f"Ranks that follow entropy do worse than {SAME}"
    if row["verdict"] == CANNOT_TELL:
        return f"Cannot tell: {SAME} leaves too little to win"
    if row["difference_high"] < 0:
        return f"Ranks that follow entropy do better than {SAME}"
    if max(-row["difference_low"], row["difference_high"]) < row["margin_nats"]:
        return f"Ranks that follow entropy do as well as {SAME}"
    return f"Not decided: do ranks that follow entropy beat {SAME}?"


def forest(
    ax: Axes, rows: pd.DataFrame, names: list[str], pairs: pd.DataFrame | None = None, colour: str | None = None
) -> None:
    """A row a comparison: point with its interval, open where that holds zero; beside it seeds and verdict; a dot for
    each of ``pairs``. The shaded band is the margin of equality. ``colour``: of all, by default that of the rival.
    Two seeds have a t interval that says nothing, and no bar."""
    some = rows.loc[rows["n"] > 2, ["difference_low", "difference_high"]]
    reach = [rows["margin_nats"].max(), rows["difference_nats"].abs().max(), some.abs().max().max()]
    for place, row in enumerate(rows.itertuples(index=False)):
        low, high = row.difference_low, row.difference_high
        ink, marker = (colour, "o") if colour else MARKS[str(row.rival)]
        if pairs is not None:
            same = (pairs["variant"] == row.variant) & (pairs["rival"] == row.rival) & (pairs["setting"] == row.setting)
            values = pairs.loc[same, "difference_nats"].dropna()
            ax.plot(values, [place] * len(values), ".", color=ink, markersize=3, alpha=0.6)
            reach.append(values.abs().max())
        half = 0.0 if pd.isna(low) or row.n < 3 else high - row.difference_nats
        face = "white" if low <= 0 <= high else ink
        ax.errorbar(row.difference_nats, place, xerr=half, color=ink, marker=marker, markerfacecolor=face,
                    markersize=5, elinewidth=1.4)  # fmt: skip
        ax.annotate(f"n = {row.n:.0f}, {row.verdict}", (1.0, place), (3, 0), ("axes fraction", "data"),
                    "offset points", va="center", fontsize=style.MIN_FONT)  # fmt: skip
    margin = rows["margin_nats"].max()
    ax.axvspan(-margin, margin, color="#DDDDDD", zorder=0, linewidth=0)
    ax.axvline(0, color="#444444", linewidth=0.8)
    far = 1.15 * float(np.nanmax(reach))
    types = rows["factor_dtype"].where(rows["factor_dtype"] != "fp32")
    ax.set_yticks(range(len(rows)), [n if pd.isna(t) else f"{n}, {t}" for n, t in zip(names, types, strict=True)])
    ax.set(ylim=(len(rows) - 0.5, -0.5), xlim=(-far, far))
    ax.grid(axis="y", visible=False)
    style.plain_linear(ax.xaxis, 4)


def policies(results: Path) -> Figure:
    """(a) ranks of stage 0, (b) differences from every rival, EDGC with each type of factors."""
    comparisons, pairs, curves = map(inputs.first_setting, inputs.tables(results, TABLES["policies"]))
    fig, axes = style.figure(2, 1, height=5.8, height_ratios=[2, 3])
    courses(axes[0], curves)
    rows = comparisons[(comparisons["policy"] == "cqm") & comparisons["variant"].isin(["cqm", "cqm_int8"])]
    rows = rows[~rows["rival"].isin(["no compression", "fp32 factors"])]
    forest(axes[1], rows.assign(setting=""), list(rows["rival"]), pairs.assign(setting=""))
    axes[1].set(title="EDGC minus its rival", ylabel="rival")
    axes[1].set_xlabel("validation loss of EDGC\nminus that of the rival (nats)")
    note = texts.count_note(rows["n"], bars="(b) bars: 95 % t interval of the mean, dots: seeds", scale=results.name)
    title = answer(select(comparisons, list(RIVALS)))
    return texts.finish(fig, axes, title, note, style.handles(axes[0]), ncols=3)


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


def policies_settings(results: Path) -> Figure:
    """A panel a rival and a row a setting: differences, with the number of seeds."""
    comparisons, pairs = map(by_setting, inputs.tables(results, TABLES["policies_settings"]))
    every = every_setting(comparisons, list(MAIN_RIVALS), "8")
    counts = {rival: n for rival in MAIN_RIVALS if (n := int((every["rival"] == rival).sum()))}
    height = min(4.1 + sum(0.42 + 0.19 * n for n in counts.values()), style.TALLEST)
    fig, (*axes, last) = style.figure(len(counts) + 1, 1, height=height, height_ratios=[*counts.values(), 5])
    for ax, rival in zip(axes, counts, strict=True):
        rows = every[every["rival"] == rival]
        forest(ax, rows, [SETTINGS[setting] for setting in rows["setting"]], pairs)
        ax.set(title=f"EDGC minus {rival}")
    alike = [ax for ax, rival in zip(axes, counts, strict=True) if rival != PLAIN]  # of as many bytes
    far = max((ax.get_xlim()[1] for ax in alike), default=0)
    for ax in alike:
        ax.sharex(alike[0])
        ax.tick_params(labelbottom=ax is axes[-1])
        ax.set_xlim(-far, far)
    for ax in {axes[0], axes[-1]}:
        ax.set_xlabel("validation loss of EDGC minus that of the rival (nats)")
    by_room(last, pairs, every["margin_nats"].max())
    note = texts.count_note(every["n"], bars="bars: 95 % t interval, dots: seeds", scale=results.name)
    return texts.finish(fig, [*axes, last], times_won(every), note)


def by_room(ax: Axes, pairs: pd.DataFrame, margin: float) -> None:
    """EDGC minus the fixed rank of its bytes over what that rank costs, a point a seed, a marker a setting."""
    rows = pairs[(pairs["rival"] == "fixed rank") & (pairs["variant"] == "cqm")]
    ax.axhspan(-margin, margin, color="#DDDDDD", zorder=0, linewidth=0)
    ax.axhline(0, color="#444444", linewidth=0.7)
    colours = [family.colour for family in style.FAMILIES.values()]
    for place, (setting, group) in enumerate(rows.groupby("setting", sort=False)):
        ax.plot(group["rival_gap_nats"], group["difference_nats"], style.MARKERS[place], color=colours[place],
                markersize=4, linestyle="", label=SETTINGS[str(setting)])  # fmt: skip
    ax.set(title="what there was to win", ylabel="EDGC minus\nfixed rank (nats)")
    ax.set_xlabel("the fixed rank minus no compression (nats)")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def by_setting(table: pd.DataFrame) -> pd.DataFrame:
    """EDGC's rows, of every setting, with its name (``SETTINGS``); variants are called as if there was no other."""
    parts = table["variant"].str.extract(f"^({'|'.join(SETTINGS)})(cqm(?:_int[0-9]+)?)$")
    return table.assign(setting=parts[0], variant=parts[1])[parts[1].notna()]


def times_won(rows: pd.DataFrame) -> str:
    """Number of the settings in which EDGC beats the fixed rank that sends as many bytes, and of those not tested."""
    against = rows[(rows["rival"] == "fixed rank") & (rows["factor_dtype"] == "fp32")].dropna(subset="difference_high")
    if against.empty:
        return "EDGC against other ways to send as many bytes"
    if len(against) == 1:
        return answer(rows)
    idle = int((against["verdict"] == NOT_TESTED).sum())
    words = f"EDGC is shown to beat {SAME} in {(against['difference_high'] < 0).sum()} of {len(against)} settings"
    return words + (f"; {idle} not tested" if idle else "")
