"""Loss against iterations and against bytes, of every run of a study that has uncompressed ones."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure, SubFigure

from paper_figures import inputs, style, texts
from paper_figures.following import ORDERS
from paper_figures.methods import without_result

TABLES = {
    "learning_curves_methods": ("methods/curves.csv", "methods/table.csv"),
    "learning_curves_policies": ("policies/curves.csv", "policies/table.csv"),
    "learning_curves_long": ("policies_long/curves.csv", "policies_long/table.csv"),
}
WORDS = {
    "learning_curves_methods": {"title": "Learning curves: all methods", "rows": "a row per group of variants"},
    "learning_curves_policies": {
        "title": "Learning curves: policies and fixed ranks",
        "rows": "EDGC and its own ranks in other orders, with fp32 factors, then with int8 factors; then the other "
        "policies, likewise",
    },
    "learning_curves_long": {
        "title": "Learning curves over eight million tokens",
        "rows": "EDGC and its own ranks in other orders, with fp32 factors, then with int8 factors; then the other "
        "methods",
    },
}
CAPTION = """\
**{title}.** (a): training loss (trailing mean of ten steps) against iterations, of every run with compression and of
the mean of the uncompressed ones, and validation losses, which are of other text. Below, {rows}. Left: the training
loss against the gradient bytes sent so far; right: the training loss minus that of the uncompressed run of the same
seed at the same iteration, on the same batches (linear below 0.01 nats). Thin: a run; thick: mean over runs. Black:
uncompressed training. The steep start is cut off; runs without a result are named below the figure."""
MOST = 6  # variants in a row of panels
BLACK, GREY = "#000000", "#8c8c8c"
THIN: dict[str, Any] = {"linewidth": 0.4, "alpha": 0.35}  # a run
THICK: dict[str, Any] = {"linewidth": 1.2, "zorder": 3}  # the mean over the runs
LOSS, ABOVE = "loss (nats)", "loss above\nuncompressed\n(nats)"
TICKS = (-0.3, -0.1, -0.03, -0.01, 0, 0.01, 0.03, 0.1, 0.3, 1)  # of ABOVE
LINES = ("-", "--", ":", "-.")  # of what has the same colour in a row
BETWEEN = (0.03, 0.3)  # left out of TICKS where all of them would touch
LINEAR = 0.01  # nats; the axis of differences is linear below and logarithmic above
OVERVIEW = 1.7  # inches
CUT = 0.1  # share of the run after which the loss axis starts


Look = tuple[str, Any, Any]  # of a variant: label, colour, line


def draw(results: Path, name: str) -> Figure:
    """Loss over iterations of every run; then a row per group of variants: loss over bytes, and the training loss above
    that of the uncompressed run of the same seed, which is drawn in every row."""
    study = TABLES[name][0].partition("/")[0]
    curves, runs = inputs.read(results, study, "curves.csv"), inputs.read(results, study)
    variants = runs.drop_duplicates("variant").set_index("variant")
    plain = variants.index[variants["method"] == "none"][0]
    others = variants.drop(plain)
    unit, size = ("GB", 1e9) if curves["bytes"].max() > 2e9 else ("MB", 1e6)
    curves = curves.assign(validation_loss=np.log(curves["validation_perplexity"]), sent=curves["bytes"] / size)
    curves["above"] = above_uncompressed(curves, plain)
    looks = [looks_of(variants, row) for row in (groups(others) if study == "methods" else orders(others))]
    # All rows fit a page; the last one alone has the ticks and the label of x.
    room = [0.13 * (1 - len({label for label, *_ in row.values()}) // -legend_columns(row)) for row in looks]
    room[-1] += 0.35
    panel = min(1.3, (style.TALLEST - OVERVIEW - style.MARGIN - sum(room)) / len(room))
    fig, (overview, *parts) = style.stacked([OVERVIEW, *(panel + own for own in room)])
    shown = limits(curves)
    every(overview, curves, plain, shown)
    for part, row in zip(parts, looks, strict=True):
        pair(part, curves, {plain: ("", BLACK, "-")} | row, shown)
        part.axes[0].set_xlabel(f"bytes sent ({unit})")
    for ax, last in ((ax, last) for part in parts[:-1] for ax, last in zip(part.axes, parts[-1].axes, strict=True)):
        ax.sharex(last)
        ax.set_xlabel("")
        ax.tick_params(labelbottom=False)
    cut = f"Training loss, trailing mean; thin: runs, thick: their mean. Losses above {shown[1]:.2f} are cut off."
    extra = (cut, without_result(runs))
    seeds = runs.groupby("variant")["seed"].nunique()
    note = texts.count_note(seeds, *extra, bars="every run is a line", scale=results.name)
    return texts.finish(fig, fig.axes, finding(curves, plain), note)


def finding(curves: pd.DataFrame, plain: str) -> str:
    """Sentence on how far from uncompressed training the variants end."""
    last = curves.groupby("variant")["iteration"].transform("max")
    late = curves[(curves["iteration"] > 0.95 * last) & (curves["variant"] != plain)]
    ends = late.groupby("variant")["above"].mean().dropna()
    span = f"{ends.min():+.3f} to {ends.max():+.3f} nats".replace("-", "−")
    return f"At the end the training loss lies {span} from that of uncompressed training"


def looks_of(variants: pd.DataFrame, row: list[str]) -> dict[str, Look]:
    """Look of each variant of a row: as everywhere, but lines of one colour are told apart."""
    usual = {name: look_of(variants, name) for name in row}
    colours = [colour for colour, _ in usual.values()]
    free = sns.color_palette("dark").as_hex()
    looks: dict[str, Look] = {}
    for name, (colour, line) in usual.items():
        label = re.sub(r"^shuffled \d", "shuffled", variants["label"][name])  # several draws of one thing
        alike = next((look for look in looks.values() if look[0] == label), None)
        before = [look[1] for look in looks.values()].count(colour)
        if before >= len(LINES):
            used = [to_rgb(other) for other in (*(look[1] for look in looks.values()), *colours)]
            colour = max(free, key=lambda hue: min(math.dist(to_rgb(hue), other) for other in used))
        elif colours.count(colour) > 1 and order_of(name) is None:
            line = LINES[before]
        looks[name] = alike or (label, colour, line)
    return looks


def order_of(variant: str) -> tuple[str, str] | None:
    """Colour and line of the order in which a variant has EDGC's ranks, if it has."""
    first = variant.partition("_")[0]
    looks = ((colour, line) for name, colour, line, _ in ORDERS.values() if first == name.partition("_")[0])
    return next(looks, None)


def look_of(variants: pd.DataFrame, variant: str) -> tuple[str, Any]:
    """The colour and line that a variant has in every figure: those of its order of ranks, else of its method."""
    look = style.look(variants.loc[variant])
    return order_of(variant) or (look.colour, look.line)


def legend_columns(looks: dict[str, Look]) -> int:
    """Number of columns of a legend that fit a column of a page."""
    longest = max(len(label) for label, _, _ in looks.values())
    return 3 if longest < 17 else 2 if longest < 26 else 1


def every(part: SubFigure, curves: pd.DataFrame, plain: str, shown: tuple[float, float]) -> None:
    """Training loss over iterations, and validation losses: how alike the variants are."""
    ax = part.subplots()
    compressed, dense = (curves[(curves["variant"] == plain) == is_plain] for is_plain in (False, True))
    for number, (_, run) in enumerate(compressed.groupby(["variant", "seed"])):
        label = None if number else "every run with compression"
        ax.plot(run["iteration"], run["train_loss"], color=GREY, linewidth=0.5, label=label)
    means = dense.groupby("iteration", as_index=False)[["train_loss", "validation_loss"]].mean()
    ax.plot(means["iteration"], means["train_loss"], color=BLACK, label="no compression, mean", **THICK)
    for label, colour, rows in (("its validation", GREY, compressed), ("its validation ", BLACK, means)):
        rows = rows.dropna(subset=["validation_loss"])
        ax.plot(rows["iteration"], rows["validation_loss"], "o", color=colour, markersize=2.5, label=label)
    ax.set(title="training loss", xlabel="iteration", ylabel=LOSS, ylim=shown)
    handles, labels = style.handles(ax)
    order = [0, 2, 1, 3]  # a column each: compressed, uncompressed
    part.legend([handles[k] for k in order], [labels[k] for k in order], loc="outside upper center", ncols=2)


def pair(part: SubFigure, curves: pd.DataFrame, looks: dict[str, Look], shown: tuple[float, float]) -> None:
    """One group of variants, left: loss over bytes sent; right: loss above uncompressed over iterations. The axes have
    room for all ``curves``."""
    left, right = part.subplots(1, 2)
    for look in dict.fromkeys(looks.values()):
        rows = curves[curves["variant"].isin([name for name, other in looks.items() if other == look])]
        lines(left, rows, "sent", "train_loss", look)
        lines(right, rows, "iteration", "above", look)
    late = curves[curves["iteration"] >= CUT * curves["iteration"].max()]
    log_bytes(left, 0.8 * late["sent"].min(), 1.2 * curves["sent"].max())
    left.set(ylabel=LOSS, ylim=shown)
    right.set(xlabel="iteration", ylabel=ABOVE)
    right.set_yscale("symlog", linthresh=LINEAR, linscale=0.5)
    low = min(1.3 * curves["above"].min(), -LINEAR)
    high = max(1.3 * min(curves["above"].max(), 3.0), LINEAR)
    ticks = [tick for tick in TICKS if low <= tick <= high]
    if len(ticks) > 6:
        ticks = [tick for tick in ticks if abs(tick) not in BETWEEN]
    right.set_yticks(ticks, [f"{tick:g}".replace("-", "−") for tick in ticks])
    right.set_ylim(low, high)
    entries = {label: handle for handle, label in zip(*style.handles(left), strict=True) if label}
    options: dict[str, Any] = {"ncols": legend_columns(looks), "columnspacing": 0.8, "handlelength": 2.2}
    part.legend(list(entries.values()), list(entries), loc="outside upper center", **options)


def log_bytes(ax: Axes, low: float, high: float) -> None:
    """A log axis from ``low`` to ``high`` with powers of ten as ticks, and their double and fivefold where few fit."""
    powers = [10.0**k for k in range(-3, 7) if low <= 10.0**k <= high]
    ticks = [step * 10.0**k for k in range(-3, 7) for step in (1, 2, 5) if low <= step * 10.0**k <= high]
    style.log_x(ax, ticks if len(ticks) < 6 else powers)
    ax.set_xlim(low, high)


def above_uncompressed(curves: pd.DataFrame, plain: str) -> pd.Series:
    """Training loss minus that of the uncompressed run of the same seed at the same iteration; nan without one."""
    place = ["seed", "iteration"]
    base = curves[curves["variant"] == plain].drop_duplicates(place).set_index(place)["train_loss"]
    return curves["train_loss"] - curves.join(base.rename("uncompressed"), on=place)["uncompressed"]


def groups(variants: pd.DataFrame) -> list[list[str]]:
    """Variants by method; few of one method together; at most ``MOST`` a row."""
    by_method = [list(group.index) for _, group in variants.groupby("method", sort=False)]
    many = [names for names in by_method if len(names) > 2]
    few = [name for names in by_method if names not in many for name in names]
    return [list(part) for names in (*many, few) if names for part in np.array_split(names, -(-len(names) // MOST))]


def orders(variants: pd.DataFrame) -> list[list[str]]:
    """EDGC beside its own ranks in other orders, then the other policies; fp32 and int8 factors apart."""
    rows: dict[tuple[bool, bool], list[str]] = {}
    for variant in variants.index:
        name = variant.removesuffix("_int8")
        other = name != "cqm" and order_of(name) is None
        rows.setdefault((other, name != variant), []).append(variant)
    return [rows[key] for key in sorted(rows)]


def lines(ax: Axes, curves: pd.DataFrame, x: str, y: str, look: Look) -> None:
    """The runs of variants that look alike, a thin line each, and the mean over them."""
    label, colour, line = look
    rows = curves.dropna(subset=[y])
    runs = rows.groupby(["variant", "seed"])
    for _, run in runs:
        ax.plot(run[x], run[y], color=colour, **THIN)
    # Where a run has stopped, the mean of the others would jump.
    steps = rows.groupby("iteration")
    means = steps[sorted({x, y} - {"iteration"})].mean()[steps.size() == runs.ngroups].reset_index()
    ax.plot(means[x], means[y], color=colour, linestyle=line, label=label or None, **THICK)


def limits(curves: pd.DataFrame) -> tuple[float, float]:
    """The range of losses from ``CUT`` of the run on, without what lies far above the others (diverging runs)."""
    late = curves[curves["iteration"] >= CUT * curves["iteration"].max()]
    high = late.groupby(["variant", "seed"])["train_loss"].max().median()
    low = min(late["train_loss"].min(), late["validation_loss"].min())
    return low - 0.05 * (high - low), high + 0.05 * (high - low)
