"""Wall-clock time to a fixed validation loss over links of limited bandwidth, as a share of uncompressed training's."""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import inputs, names, style, texts

TABLES = ("race_summary.csv", "race.csv")
CAPTION = """\
**Time to a fixed validation loss over slow links, by the clock**: the ci model with two data-parallel
workers in network namespaces. The loss is what the uncompressed run of the same seed has after three
quarters of its iterations; time is that of the steps, without start-up and evaluation. Markers are means
over seeds, dots the runs, numbers the means. A method of which a run never got there says so and comes
last."""


def draw(results: Path) -> Figure:
    """A panel per limit; methods by their time at the slowest; a dot per seed."""
    summary, runs = (inputs.read_benchmark(results / name, "the race", "bench-race (root only)") for name in TABLES)
    rates = sorted(summary["mbit_per_s"].unique())
    slowest = summary[summary["mbit_per_s"] == rates[0]]
    order = list(slowest.sort_values(["of_uncompressed", "place"], na_position="last", kind="stable")["method"])
    fig, axes = style.figure(1, len(rates), height=0.3 * len(order) + 2.0, sharey=True)
    for ax, rate in zip(axes, rates, strict=True):
        panel(ax, summary[summary["mbit_per_s"] == rate], runs[runs["mbit_per_s"] == rate], order)
        ax.set(title=f"{rate:g} Mbit/s", xlabel="relative time")
    labels = dict(zip(summary["method"], summary["label"], strict=True))
    names.name_rows(fig, axes, [labels[name] for name in order])
    note = texts.count_note(
        summary.loc[summary["reached"] > 0, "reached"],
        "measured, two workers, uncompressed = 1; order: time at the slowest limit; "
        "the loss: what the uncompressed run of the seed has at three quarters of its iterations",
        f"{runs['machine'].iloc[0]}; torch {runs['torch'].iloc[0]}",
        bars="dots: runs, markers and numbers: means",
    )
    return texts.finish(fig, axes, finding(summary, rates), note)


def finding(summary: pd.DataFrame, rates: list[float]) -> str:
    """In words: the quickest at the slowest link and at the fastest; of methods whose seeds overlap no one is."""
    words = []
    for rate in (rates[0], rates[-1]):
        rows = summary[summary["mbit_per_s"] == rate]
        best = rows.nsmallest(1, "of_uncompressed").iloc[0]
        overlapping = int((rows["lowest"] <= best["highest"]).sum())
        who = str(best["label"]) if overlapping == 1 else f"{overlapping} methods overlap"
        words.append(f"{rate:g} Mbit/s: {who}")
    return "Quickest at " + ", at ".join(words)


def panel(ax: Axes, summary: pd.DataFrame, runs: pd.DataFrame, order: list[str]) -> None:
    for place, name in enumerate(order):
        row, look = summary[summary["method"] == name].iloc[0], style.by_name(name)
        times = runs[runs["method"] == name]["of_uncompressed"].dropna()
        ax.plot(times, [place] * len(times), ".", color=look.colour, markersize=3, alpha=0.7)
        text = ""
        if len(times):
            ax.plot(row["of_uncompressed"], place, markersize=6, **look.marks())
            text = f"{row['of_uncompressed']:.2f}"
        if not row["reached"]:
            text += "never there"
        elif row["reached"] < row["seeds"]:
            text += f" ({row['seeds'] - row['reached']:.0f} of {row['seeds']:.0f} never)"
        texts.label_point(ax, text.strip(), (max([*times, 0.02]), place), (7, 0))
    ax.axvline(1, color="#444444", linewidth=0.8, linestyle=":")
    ax.set_xlim(0, 1.35 * max(1.0, summary["highest"].max()))
