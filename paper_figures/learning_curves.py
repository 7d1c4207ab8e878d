"""Loss against iterations and against bytes, of every run of a study at any scale; its figures name the study."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure, SubFigure

from paper_figures import inputs, style, texts
from paper_figures.methods import lost
from paper_figures.policies import ORDERS

MOST = 6  # variants in a row of panels
BLACK, GREY = "#000000", "#8c8c8c"
THIN: dict[str, Any] = {"linewidth": 0.4, "alpha": 0.35}  # a run
THICK: dict[str, Any] = {"linewidth": 1.2, "zorder": 3}  # the mean over the runs
BYTES = "bytes sent ({unit})"
LOSS, ABOVE = "loss (nats)", "loss above\nuncompressed\n(nats)"
TICKS = (-0.3, -0.1, -0.03, -0.01, 0, 0.01, 0.03, 0.1, 0.3, 1)  # of ABOVE
LINES = ("-", "--", ":", "-.")  # of what has the same colour in a row
BETWEEN = (0.03, 0.3)  # left out of TICKS where all of them would touch
LINEAR = 0.01  # nats; the axis of differences is linear below and logarithmic above
OVERVIEW = 1.7  # inches
CUT = 0.1  # share of the run after which the loss axis starts


Look = tuple[str, Any, str]  # of a variant: label, colour, line


def draw(results: Path, study: str, rows_of: Callable[[pd.DataFrame], list[list[str]]] | None = None) -> Figure:
    """Loss over iterations of every run; then a row per group of variants, as ``rows_of`` puts them together: loss over
    bytes and, where the study has an uncompressed variant, which is drawn in every row, the training loss above that of
    the same seed."""
    curves = inputs.read(results, study, "curves.csv")
    runs = inputs.read(results, study)
    variants = runs.drop_duplicates("variant").set_index("variant")
    several = variants["method"].nunique() > 1
    plain = [name for name in variants.index if several and variants["method"][name] == "none"][:1]
    rows = (rows_of or groups)(variants.drop(plain))
    unit, size = ("GB", 1e9) if curves["bytes"].max() > 2e9 else ("MB", 1e6)
    curves = curves.assign(validation_loss=np.log(curves["validation_perplexity"]), sent=curves["bytes"] / size)
    curves["above"] = above(curves, plain)
    looks = [looks_of(variants, plain, row) for row in rows]
    fig, (overview, *parts) = style.stacked(heights([legend_lines(row, plain) for row in looks], bool(plain)))
    # What is compared with the same uncompressed runs has the same axes; other rows, as BERT and GPT, have their own.
    own = [curves if plain else curves[curves["variant"].isin(list(row))] for row in looks]
    low, high = (end(ends) for end, ends in zip((min, max), zip(*map(limits, own), strict=True), strict=True))
    every(overview, curves, plain, (low, high))
    for part, row, mine in zip(parts, looks, own, strict=True):
        pair(part, mine, row, plain)
        if not variants["label"].is_unique:
            part.legends[0].set_title(variants["label"][next(iter(row))])
        part.axes[0].set_xlabel(BYTES.format(unit=unit))
    if plain:
        share_across(parts)
    texts.letter(fig.axes)
    texts.headline(fig, seen(curves, variants, plain))
    extra = f"Training loss, trailing mean; thin: runs, thick: their mean. Losses above {high:.2f} are cut off."
    if missing := lost(runs):
        extra += f"\n{missing}"
    seeds = list(runs.groupby("variant")["seed"].nunique())
    texts.annotate(fig, seeds, bars="every run is a line", scale=results.name, extra=extra)
    return fig


def seen(curves: pd.DataFrame, variants: pd.DataFrame, plain: list[str]) -> str:
    """In words: how far from uncompressed training the variants end; without it, which ends lowest, of each label."""
    last = curves.groupby("variant")["iteration"].transform("max")
    late = curves[curves["iteration"] > 0.95 * last]
    if plain:
        ends = late[~late["variant"].isin(plain)].groupby("variant")["above"].mean().dropna()
        span = f"{ends.min():+.3f} to {ends.max():+.3f} nats".replace("-", "−")
        return f"At the end the training loss lies {span} from that of uncompressed training"
    ends = late.groupby("variant")["train_loss"].mean().dropna()
    best = ends.groupby(variants["label"].reindex(ends.index)).idxmin()
    names = [name_of(variants, str(best[label])) for label in variants["label"].unique() if label in best]
    said = ", ".join(names).replace(", learning rate ", ", ")
    return f"Lowest training loss at the end, row by row: {said}" if names else "Training loss"


def looks_of(variants: pd.DataFrame, plain: list[str], row: list[str]) -> dict[str, Look]:
    """How each variant of a row looks: as everywhere, but two of one colour are told apart, methods by their lines,
    trials of one method by other colours. Uncompressed is black."""
    own = dict.fromkeys(plain, (BLACK, "-")) | {name: look_of(variants, name) for name in row}
    free = sns.color_palette("dark").as_hex()
    looks: dict[str, Look] = {}
    for name, (colour, line) in own.items():
        label = re.sub(r"^shuffled \d", "shuffled", name_of(variants, name))  # several draws of one thing
        alike = next((look for look in looks.values() if look[0] == label), None)
        used = [look[1] for look in looks.values()]
        if not alike and colour in used and variants["label"].is_unique:
            line = LINES[used.count(colour) % len(LINES)]
        elif not alike and colour in used:
            taken = [to_rgb(other) for other in (*used, *(other for other, _ in own.values()))]
            colour = max(free, key=lambda one: min(math.dist(to_rgb(one), other) for other in taken))
        looks[name] = alike or (label, colour, line)
    return looks


def order_of(variant: str) -> tuple[str, str] | None:
    """Colour and line of the order in which a variant has EDGC's ranks, if it has."""
    first = variant.partition("_")[0]
    looks = ((colour, line) for name, colour, line in ORDERS.values() if first == name.partition("_")[0])
    return next(looks, None)


def look_of(variants: pd.DataFrame, variant: str) -> tuple[str, str]:
    """The colour and line that a variant has in every figure: those of its order of ranks, else of its method."""
    if order := order_of(variant):
        return order
    run = variants.loc[variant]
    known = {"policy", "factor_dtype", "one_sided"} <= set(run.index)  # not in every study's table
    return (style.look(run) if known else style.family(str(run["method"]))).colour, "-"


def legend_columns(labels: Iterable[str]) -> int:
    """As many columns of a legend as fit a column of a page."""
    longest = max(len(label) for label in labels)
    return 3 if longest < 17 else 2 if longest < 26 else 1


def legend_lines(looks: dict[str, Look], plain: list[str]) -> int:
    """Lines of text that the legend of a row is high; uncompressed is explained above all rows."""
    labels = {label for name, (label, _, _) in looks.items() if name not in plain}
    return 1 + -(-len(labels) // legend_columns(labels))


def heights(legends: list[int], once: bool) -> list[float]:
    """Of the overview and of every row, in inches, by the lines of its legend, so that all fit a page; ``once``: the
    last row alone has the ticks and the label of x."""
    more = [0.13 * lines + (0.0 if once else 0.35) for lines in legends]
    more[-1] += 0.35 if once else 0.0
    panel = min(1.3, (style.TALLEST - OVERVIEW - style.MARGIN - sum(more)) / len(legends))
    return [OVERVIEW, *(panel + own for own in more)]


def share_across(parts: list[SubFigure]) -> None:
    """Rows with the same axes have the ticks and the label of x under the last row alone."""
    for above in parts[:-1]:
        for ax, last in zip(above.axes, parts[-1].axes, strict=True):
            ax.sharex(last)
            ax.set_xlabel("")
            ax.tick_params(labelbottom=False)


def every(part: SubFigure, curves: pd.DataFrame, plain: list[str], shown: tuple[float, float]) -> None:
    """Training loss of every run over iterations, and its validation losses: how alike the variants are."""
    ax = part.subplots()
    others = ~curves["variant"].isin(plain)
    name = "every other run" if plain else "every run"
    for label, colour, mine in ((name, GREY, curves[others]), ("no compression", BLACK, curves[~others])):
        if mine.empty:
            continue
        for number, (_, run) in enumerate(mine.groupby(["variant", "seed"])):
            ax.plot(run["iteration"], run["train_loss"], color=colour, linewidth=0.5, label=None if number else label)
        at = mine.dropna(subset=["validation_loss"])
        ax.plot(at["iteration"], at["validation_loss"], "o", color=colour, markersize=2.5, label=f"{label}, validation")
    ax.set(title="training loss", xlabel="iteration", ylabel=LOSS, ylim=shown)
    part.legend(*style.handles(ax), loc="outside upper center", ncols=2, columnspacing=0.8)


def pair(part: SubFigure, curves: pd.DataFrame, looks: dict[str, Look], plain: list[str]) -> None:
    """One group of variants, left: loss over bytes sent; right: loss above uncompressed, or loss, over iterations. The
    axes have room for all ``curves``."""
    left, right = part.subplots(1, 2)
    excess = bool(plain)
    for look in dict.fromkeys(looks.values()):
        mine = curves[curves["variant"].isin([name for name, other in looks.items() if other == look])]
        lines(left, mine, "sent", "train_loss", look)
        lines(right, mine, "iteration", "above" if excess else "train_loss", look)
    late = curves[curves["iteration"] >= CUT * curves["iteration"].max()]
    log_bytes(left, 0.8 * late["sent"].min(), 1.2 * curves["sent"].max())
    for ax in (left, right):
        ax.set(ylabel=LOSS, ylim=limits(curves))
    right.set_xlabel("iteration")
    if excess:
        least, most = curves["above"].min(), min(curves["above"].max(), 3.0)
        right.set_ylabel(ABOVE)
        right.set_yscale("symlog", linthresh=LINEAR, linscale=0.5)
        low, high = min(1.3 * least, -LINEAR), max(1.3 * most, LINEAR)
        ticks = [tick for tick in TICKS if low <= tick <= high]
        if len(ticks) > 6:
            ticks = [tick for tick in ticks if abs(tick) not in BETWEEN]
        right.set_yticks(ticks, [f"{tick:g}".replace("-", "−") for tick in ticks])
        right.set_ylim(low, high)
    black = {looks[name][0] for name in plain}
    entries = {label: drawn for drawn, label in zip(*style.handles(left), strict=True) if label not in black}
    options: dict[str, Any] = {"ncols": legend_columns(entries), "columnspacing": 0.8, "handlelength": 1.6}
    part.legend(list(entries.values()), list(entries), loc="outside upper center", **options)


def log_bytes(ax: Axes, low: float, high: float) -> None:
    """A log axis from ``low`` to ``high`` with powers of ten as ticks, and their double and fivefold where few fit."""
    ax.set_xscale("log")
    powers = [10.0**k for k in range(-3, 7)]
    all_ticks = [step * power for power in powers for step in (1, 2, 5) if low <= step * power <= high]
    style.plain(ax.xaxis, all_ticks if len(all_ticks) < 6 else [tick for tick in powers if low <= tick <= high])
    ax.set_xlim(low, high)


def above(curves: pd.DataFrame, plain: list[str]) -> pd.Series:
    """Training loss minus that of the uncompressed run of the same seed at the same iteration; nan without one."""
    place = ["seed", "iteration"]
    own = curves[curves["variant"].isin(plain)].drop_duplicates(place).set_index(place)["train_loss"]
    found = curves.join(own.rename("uncompressed"), on=place)
    return found["train_loss"] - found["uncompressed"]


def name_of(variants: pd.DataFrame, variant: str) -> str:
    """Its label, or what tells it apart from others of the same label."""
    row = variants.loc[variant]
    if variants["label"].is_unique:
        return str(row["label"])
    return f"learning rate {row['lr']:g}" if "lr" in row else variant


def groups(variants: pd.DataFrame) -> list[list[str]]:
    """Variants by method, or by label where there is one method; few of one kind together; at most ``MOST`` a row."""
    trials = variants["method"].nunique() == 1 and not variants["label"].is_unique
    by = [list(group.index) for _, group in variants.groupby("label" if trials else "method", sort=False)]
    many = [names for names in by if trials or len(names) > 2]
    few = [name for names in by if names not in many for name in names]
    rows = []
    for names in (*many, few):
        count = math.ceil(len(names) / MOST)
        rows += [list(part) for part in np.array_split(names, count)] if count else []
    return rows


def lines(ax: Axes, curves: pd.DataFrame, x: str, y: str, look: Look) -> None:
    """The runs of variants that look alike, a thin line each, and the mean over them."""
    label, colour, line = look
    rows = curves.dropna(subset=[y])
    runs = rows.groupby(["variant", "seed"])
    for _, run in runs:
        ax.plot(run[x], run[y], color=colour, **THIN)
    # Where a run has stopped, the mean of the others would jump.
    by = rows.groupby("iteration")
    means = by[sorted({x, y} - {"iteration"})].mean()[by.size() == runs.ngroups].reset_index()
    ax.plot(means[x], means[y], color=colour, linestyle=line, label=label, **THICK)


def limits(curves: pd.DataFrame) -> tuple[float, float]:
    """The range of losses from ``CUT`` of the run on, without what lies far above the others (diverging runs)."""
    late = curves[curves["iteration"] >= CUT * curves["iteration"].max()]
    high = late.groupby(["variant", "seed"])["train_loss"].max().median()
    low = min(late["train_loss"].min(), late["validation_loss"].min())
    return low - 0.05 * (high - low), high + 0.05 * (high - low)
