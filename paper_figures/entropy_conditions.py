"""Conditions under which the entropy of gradients falls: its course under each condition, one changed at a time."""

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import inputs, style, texts

TABLES = ("entropy_trend/trend.csv", "entropy_trend/table.csv")
CAPTION = """\
**What makes the entropy of gradients fall.** (a) Entropy of the gradients since the first probe (nats;
histogram estimate, mean over the matrices weighted by size, before clipping). At workstation scale each
variant changes one condition of GPT: batch size, learning-rate schedule, clipping, width, vocabulary. (b)
Where it was lowest and where it ended: left of zero it has fallen, a last value right of the lowest says
that it rose again. CQM lowers its rank only while the entropy falls."""
ESTIMATOR = "histogram"
# Of conditions other than an architecture.
OTHERS: tuple[tuple[str, style.Line], ...] = (
    ("#009E73", "--"),
    ("#CC79A7", "-."),
    ("#000000", ":"),
    ("#8C6D00", (0, (6, 2))),
    ("#56B4E9", (0, (3, 1, 1, 1, 1, 1))),
)
POINTS = (("minimum", "lowest", "v"), ("end", "at the end", "o"))


def draw(results: Path) -> Figure:
    """Entropy since the first probe (a), and where it was lowest and ended in numbers (b); a colour per variant."""
    trend = inputs.read(results, "entropy_trend", "trend.csv")
    table = inputs.read(results, "entropy_trend")
    trend = trend[trend["group"] == "<all>"]
    table = table[(table["group"] == "<all>") & (table["estimator"] == ESTIMATOR) & (table["status"] == "ok")]
    labels = dict(zip(trend["variant"], trend["label"], strict=True))
    looks = looks_of(list(labels))
    fig, (curves, ends) = style.figure(2, 1, height=3.9 + 0.32 * len(labels))
    for place, (variant, label) in enumerate(labels.items()):
        line(curves, trend[trend["variant"] == variant], looks[variant], label)
        row, colour = table[table["variant"] == variant], looks[variant][0]
        for column, name, marker in POINTS:
            change = row[column] - row["start"]
            face, label = colour if column == "end" else "white", None if place else name
            places = [place] * len(change)
            ends.scatter(change, places, label=label, edgecolors=[colour], facecolors=[face], marker=marker)
    curves.axhline(0, color="#444444", linewidth=0.6)
    curves.set(title="course", xlabel="iteration", ylabel="entropy since\nthe first probe (nats)")
    ends.axvline(0, color="#444444", linewidth=0.6)
    ends.set(title="lowest and last", xlabel="entropy since the first probe (nats)", ylabel="condition")
    ends.set_yticks(range(len(labels)), [textwrap.fill(label, 16) for label in labels.values()])
    ends.set_ylim(len(labels) - 0.5, -0.5)
    texts.legend_below(ends, 0.5, 0.2)
    extra = "Histogram estimate, mean over the matrices weighted by size, before clipping. (b): of the smoothed course."
    seeds = trend.groupby("variant")["seed"].nunique()
    note = texts.count_note(seeds, extra, bars="lines: mean over seeds, markers: runs", scale=results.name)
    return texts.finish(fig, [curves, ends], finding(table), note, style.handles(curves), columnspacing=0.8)


def finding(table: pd.DataFrame) -> str:
    """In words: in how many runs the entropy rose again, by the rule of the table."""
    rose = (table["rises_again"] == "yes").sum()
    return f"Entropy falls, and rises again in {rose} of {len(table)} runs"


def looks_of(variants: Sequence[str]) -> dict[str, tuple[str, style.Line]]:
    """Colour and dashes of each condition: GPT and BERT as in every figure, the others told apart by both."""
    own = {name: (look.colour, "-") for name, look in style.ARCHITECTURES.items() if name in variants}
    others = [name for name in variants if name not in own]
    return own | dict(zip(others, itertools.cycle(OTHERS), strict=False))


def line(ax: Axes, rows: pd.DataFrame, look: tuple[str, style.Line], label: str) -> None:
    """The mean over seeds of the change since the first probe."""
    colour, dashes = look
    values = rows.pivot_table(index="iteration", columns="seed", values=f"entropy_{ESTIMATOR}")
    mean = (values - values.iloc[0]).mean(axis=1)
    ax.plot(mean.index, mean, color=colour, linestyle=dashes, label=label)
