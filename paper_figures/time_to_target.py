"""Time to a fixed validation loss against uncompressed, by bandwidth: measured work, modelled network."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import inputs, names, style, texts

TABLES = ("methods/time_to_target.csv", "methods/table.csv")
CAPTION = """\
**Time to a fixed validation loss, by bandwidth.** The network is modelled, everything else was measured: of
every step the compute time of uncompressed training, compression and decompression of the slowest stage,
and its bytes divided by the bandwidth, with no latency and nothing hidden behind backward. The target is
what the uncompressed run of the same seed reaches after 90 % of its iterations; runs that never reach it
are counted in words. Left of 100 % a method arrives earlier than uncompressed training. Markers are means
over the seeds that arrive, bars 95 % t intervals, drawn where every seed arrives: the other means
leave out the seeds that do not. The times are of small models on a CPU:
a GPU computes and compresses faster, and the bandwidths shift with it."""
TICKS = (1, 3, 10, 30, 100, 300, 1000)


def draw(results: Path) -> Figure:
    """A panel per bandwidth, a line per variant: mean over seeds, in % of uncompressed, and its 95 % t interval where
    every seed arrives."""
    times = inputs.read(results, "methods", "time_to_target.csv")
    runs = inputs.read(results, "methods").drop_duplicates("variant").set_index("variant")
    times["percent"] = 100 * times["of_uncompressed"]
    bandwidths = sorted(times["megabits"].unique())
    # One order for all panels, the quickest over the slowest network on top; what never arrives is named below.
    slowest = times[times["megabits"] == bandwidths[0]].groupby("variant")["percent"].mean().sort_values()
    variants = list(slowest.dropna().index)
    fig, axes = style.figure(1, len(bandwidths), height=2.0 + 0.3 * len(variants), sharey=True, sharex=True)
    for ax, megabits in zip(axes, bandwidths, strict=True):
        panel(ax, times[times["megabits"] == megabits], variants, runs)
        speed = f"{megabits / 1000:g} Gbit/s" if megabits >= 1000 else f"{megabits:g} Mbit/s"
        ax.set(title=speed, xlabel="time (%)")
    shown = times["percent"].dropna()
    low, high = (min(100, shown.min()) / 1.3, max(100, shown.max()) * 1.3) if len(shown) else (50.0, 200.0)
    axes[0].set_xlim(low, high)
    axes[0].set_xscale("log")
    for ax in axes:
        style.plain(ax.xaxis, [tick for tick in TICKS if low <= tick <= high])
    # Whether a run arrives does not depend on the network.
    rows = times[times["megabits"] == bandwidths[0]]
    rivals = [label(str(runs.loc[name, "label"]), rows[rows["variant"] == name]) for name in variants]
    names.above(fig, axes, rivals, f"MODELLED networks: {seen(slowest[arrive(times)], runs)}")
    reached = rows.groupby("variant")["percent"].count()
    texts.annotate(
        fig,
        list(reached[reached > 0]),
        scale=results.name,
        bars=f"{texts.INTERVAL} where every seed arrives",
        extra="Time of uncompressed training: 100 %. Modelled network: measured compute and compression, "
        "bytes / bandwidth, no latency, no overlap. Target: "
        "the uncompressed run's validation loss after 90 % of its iterations."
        + never([str(runs.loc[name, "label"]) for name in slowest[slowest.isna()].index]),
    )
    return fig


def arrive(times: pd.DataFrame) -> list[str]:
    """The variants all runs of which reach the target."""
    found = times.groupby("variant")["percent"].apply(lambda values: bool(values.notna().all()))
    return list(found[found].index)


def seen(slowest: pd.Series, runs: pd.DataFrame) -> str:
    """In words: the quickest method over the slowest network, of those that always arrive."""
    if slowest.dropna().empty:
        return "Time in % of uncompressed training"
    best = slowest.idxmin()
    return f"{runs.loc[best, 'label']} takes {slowest.min():.0f} % of the time of uncompressed over the slowest"


def never(names: list[str]) -> str:
    """The variants of which no run reaches the target, in words."""
    return textwrap.fill(f"Never reached by {', '.join(names)}.", 120, initial_indent="\n") if names else ""


def label(name: str, runs: pd.DataFrame) -> str:
    """A variant's name, with how many of its runs never reach the target."""
    lost = int(runs["percent"].isna().sum())
    return name if not lost else f"{name} ({lost} of {len(runs)} never)"


def panel(ax: Axes, times: pd.DataFrame, variants: list[str], runs: pd.DataFrame) -> None:
    """One bandwidth: a marker with its interval for each variant that reaches the target."""
    ax.axvline(100, color="#444444", linewidth=0.6)
    for place, variant in enumerate(variants):
        mine = times[times["variant"] == variant]
        found = mine["percent"].dropna()
        look = style.look(runs.loc[variant])
        if len(found):
            bar = style.half_interval(found) if len(found) == len(mine) else math.nan
            ax.errorbar(found.mean(), place, xerr=bar, **look.marks())
