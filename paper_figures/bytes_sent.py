"""Bytes that each replica sends, by method and strategy, against the number of replicas."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from paper_figures import inputs, style, texts

TABLES = ("bytes_sent.csv",)
CAPTION = """\
**Bytes against the number of replicas.** What each of W replicas sends a step for the gradients of GPT-2
124M, as a share of an fp32 all-reduce among as many: (a) methods that compress the gradient of every step, (b)
strategies, with rounds of the length that they have by default. By the formulas that are compared with
what replicas send at W = 2, 4 and 8."""
# Beside the first example of every method and strategy; and first ones that others send as much as.
SHOWN, LEFT_OUT = ("int4", "int2", "powersgd int4", "diloco_powersgd", "muloco_int2"), ("edgc", "muloco")
LABELS = {
    "none": "no compression",
    "dynamiq": "DynamiQ, 5 bits",
    "majority": "majority vote",
    "powersgd": "PowerSGD, rank 8",
    "powersgd int4": "same, int4 factors",
    "randomk": "random-k, 5 %",
    "topk": "top-k, 5 %",
    "every_step": "every step",
    "demo": "DeMo",
    "dion": "Dion, r = n/4",
    "diloco": "DiLoCo, MuLoCo",
    "diloco_powersgd": "DiLoCo, rank 4",
    "muloco_int2": "MuLoCo, int2",
    "noloco": "NoLoCo",
    "onebit_adam": "1-bit Adam, half dense",
    "shared_mask": "shared mask",
    "sparseloco": "SparseLoCo",
    "streaming_diloco": "streaming DiLoCo",
}
# How the share changes from the fewest replicas to the most: Okabe-Ito colours.
GROWS, FALLS, STAYS = ("#D55E00", "grows with W"), ("#009E73", "falls with W"), ("#0072B2", "does not depend on W")
TICKS = (2, 4, 8, 16, 64, 256)
APART = 0.036  # of a panel's height, between labels


def draw(results: Path) -> Figure:
    """A line for every method and strategy, with its name at the end."""
    table = inputs.read_benchmark(results / "bytes_sent.csv", "bytes against replicas", "bytes")
    first = table.drop_duplicates(["what", "name"])["example"]
    table = table[table["example"].isin([*first, *SHOWN]) & ~table["example"].isin(LEFT_OUT)]
    fig, axes = style.figure(2, 1, height=7.0, sharex=True)
    titles = {"method": "gradients of every step", "strategy": "strategies"}
    growing = [name for ax, what in zip(axes, titles, strict=True) for name in lines(ax, table[table["what"] == what])]
    for ax, title in zip(axes, titles.values(), strict=True):
        ax.set(title=title, ylabel="bytes sent\n(% of an fp32 all-reduce, log scale)")
    axes[1].set_xlabel("replicas W (log scale)")
    entries = [Line2D([], [], color=colour) for colour, _ in (GROWS, STAYS, FALLS)]
    note = (
        "n = 1: bytes follow from shapes alone and always repeat. Formulas, equal to what a small model's replicas "
        "sent at W = 2, 4 and 8. Rounds have their default length: 30 steps, NoLoCo 50, streaming 100."
    )
    words = f"What goes by all-gather grows with W: {', '.join(growing)}"
    return texts.finish(fig, axes, words, note, (entries, [label for _, label in (GROWS, STAYS, FALLS)]), ncols=3)


def lines(ax: Axes, table: pd.DataFrame) -> list[str]:
    """Draw one panel; returns the names of what grows."""
    ends, growing = [], []
    for name, line in table.groupby("example", sort=False):
        line = line.sort_values("replicas")
        shares = 100 * line["share"].to_numpy()
        kind = GROWS if shares[-1] > 1.1 * shares[0] else FALLS if shares[-1] < 0.9 * shares[0] else STAYS
        ax.plot(line["replicas"], shares, color=kind[0], marker=".", markersize=3)
        label = LABELS.get(str(name), str(name))
        ends.append((shares[-1], label, kind[0]))
        growing += [label.partition(",")[0]] if kind is GROWS else []
    ax.axhline(100, color="#444444", linewidth=0.6)
    style.log_x(ax, TICKS, room=1.1)
    ax.set_yscale("log")
    style.plain(ax.yaxis, [10.0**power for power in range(-2, 4)])
    ax.margins(y=0.05)
    low, high = np.log10(ax.get_ylim())
    ends.sort()
    heights = [(np.log10(share) - low) / (high - low) for share, _, _ in ends]
    for (share, label, colour), height in zip(ends, spread(heights), strict=True):
        place, options = (1.09, height), {"fontsize": style.MIN_FONT, "color": colour, "va": "center"}
        # A thin line leads from the end of the curve to a name that had to move.
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.4, "shrinkA": 0, "shrinkB": 1}
        at = (TICKS[-1], share)
        ax.annotate(label, at, place, textcoords="axes fraction", arrowprops=arrow, annotation_clip=False, **options)
    return growing


def spread(heights: Sequence[float]) -> list[float]:
    """Ascending heights moved apart as little as need be: neighbours that are too near become a block around where
    they were."""
    blocks = [[height, 1] for height in heights]  # middle, number
    done = False
    while not done:
        done = True
        for index in range(len(blocks) - 1):
            (one, few), (other, more) = blocks[index], blocks[index + 1]
            if other - one < APART * (few + more) / 2 - 1e-12:
                blocks[index : index + 2] = [[(one * few + other * more) / (few + more), few + more]]
                done = False
                break
    return [middle + APART * (place - (count - 1) / 2) for middle, count in blocks for place in range(int(count))]
