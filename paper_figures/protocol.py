"""Deviation over seeds of the difference between two runs, by the estimate of the loss at the end."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.equivalence import LEAST_SEEDS, smallest_seen
from paper_figures import inputs, style, texts

TABLES = ("protocol/spread.csv",)
CAPTION = """\
**How much a comparison varies over seeds.** Standard deviation of the paired difference in validation loss between two
runs of the same seed and learning rate, by the estimate of the loss at the end: of the last weights, the mean of the
losses of the last evaluations, or the loss of the mean of their weights, each over some or all of the validation text.
All estimates are of the same runs. Below the dashed line six seeds see the difference that is named with 80 %
probability. A rank redrawn differs from its twin in the first Q alone, so its difference is nothing but spread. Pairs
of three seeds are in ``protocol/spread.csv`` alone."""
EFFECT, SEEDS = 0.0025, 6  # nats that this many seeds are to see
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#4B0F6B", "#888888"]
ENDS = {"last": "last", "evaluations": "losses", "weights": "weights"}


def draw(results: Path) -> Figure:
    """A panel a learning rate, a line a pair, a place an estimate."""
    table = inputs.read(results, "protocol", "spread.csv")
    table = table[table["n"] > LEAST_SEEDS]
    table = table.assign(pair=table["label"] + " minus " + table["against"])
    names = list(dict.fromkeys(table["pair"]))
    rates = sorted(set(table["lr"]), reverse=True)
    fig, axes = style.figure(len(rates), 1, height=2.0 + 1.8 * len(rates), sharex=True, sharey=True)
    for ax, rate in zip(axes, rates, strict=True):
        spreads(ax, table[table["lr"] == rate], names)
        ax.set_title(f"highest learning rate {rate:g}")
    axes[-1].set_xlabel("of the last weights, mean of losses, mean of\nweights; k: thousand tokens of text")
    title = finding(table)
    note = texts.count_note(
        table["n"],
        f"Dashed: {SEEDS} seeds see {EFFECT:g} nats with 80 % probability.",
        "Bars: 95 % interval of the deviation, for normal differences.",
        bars="",
        scale=results.name,
    )
    return texts.finish(fig, axes, title, note, legend=style.handles(*axes), ncols=1)


def spreads(ax: Axes, table: pd.DataFrame, names: list[str]) -> None:
    """Deviations of the pairs of one rate, side by side at every estimate."""
    places = list(dict.fromkeys(zip(table["tokens"], table["end"], strict=True)))
    for index, (pair, rows) in enumerate(table.groupby("pair", sort=False)):
        look = names.index(str(pair))
        x = np.arange(len(rows)) + 0.1 * (index - 1.5)
        bars = np.abs(rows[["sd_low", "sd_high"]].to_numpy().T - rows["sd_nats"].to_numpy())
        marks: dict[str, Any] = {"color": COLOURS[look % len(COLOURS)], "marker": style.MARKERS[look], "markersize": 3}
        ax.errorbar(x, rows["sd_nats"], bars, label=str(pair), linestyle="-", linewidth=0.8, elinewidth=0.5, **marks)
    ax.axhline(resolved(), color="#444444", linestyle="--", linewidth=0.7)
    ax.set_xticks(range(len(places)), [f"{ENDS[end]}\n{tokens / 1000:.0f}k" for tokens, end in places])
    ax.set_ylabel("sd over seeds (nats)")
    style.log_y(ax)


def resolved() -> float:
    """The largest deviation at which ``SEEDS`` see ``EFFECT``, in nats."""
    return EFFECT / smallest_seen(1.0, SEEDS)


def finding(table: pd.DataFrame) -> str:
    """Sentence on the estimate with the least spread, in the median over pairs."""
    shares = table.groupby(["tokens", "end"])["sd_of_today"].median()
    if not shares.notna().any():
        return "Spread over seeds by estimate"
    tokens, end = shares.idxmin()
    words = {"last": "Last weights", "evaluations": "Mean of losses", "weights": "Mean of weights"}[end]
    return f"{words}, {tokens / 1000:.0f}k tokens: {100 * shares.min():.0f} % of the spread so far"
