"""Training over links of limited bandwidth: steps measured and predicted, and runs raced to a loss."""

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import inputs, style, texts
from paper_figures.bench import TORCH

TABLES = {
    "bench_network": ("network.csv",),
    "bench_race": ("race_summary.csv", "race.csv"),
    "bench_steps": ("steps.csv",),  # and pipeline.csv where pipelines were measured
}
CAPTION = {
    "bench_network": """\
**Training steps over a link of limited bandwidth**: two ranks in network namespaces, each method beside
torch's hook and uncompressed averaging in the same round. Medians over rounds, quartiles as bars.""",
    "bench_race": """\
**Time to a fixed validation loss over slow links, by the clock**: the ci model with two data-parallel
workers in network namespaces. The loss is what the uncompressed run of the same seed has after three
quarters of its iterations; time is that of the steps, without start-up and evaluation. Markers are means
over seeds, dots the runs. A method of which a run never got there says so and comes last.""",
    "bench_steps": """\
**Predicted against measured training steps**: data-parallel workers in network namespaces, each method at
each limit. Predicted over measured seconds, less one: below zero the prediction is too low. It is told the step
without communication, what the method costs where nothing limits the network, and the speed of single all-reduces at
the limit; no step at a limit. Shaded: within 10 and 25 %. Medians over rounds, bars: prediction over the quartiles.""",
}
LOOKS = {
    "compute": style.Family("compute", "no communication", "#999999", "|"),
    "dense": style.FAMILIES["none"],
    "bf16": style.FAMILIES["bf16"],
    "torch": TORCH,
}
LABELS = {"compute": "no communication", "dense": "no compression", "dense, one bucket": "no compression, one bucket"}
BANDS = ((25, 0.08), (10, 0.16))  # percent, opacity
SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)


def bench_network(results: Path) -> Figure:
    """A panel per limit, the slowest link first; medians over rounds with quartiles."""
    table = inputs.read_benchmark(results / "network.csv", "the network benchmark", "bench-network (root only)")
    rates = sorted(table["mbit_per_s"].unique(), key=lambda rate: rate or float("inf"))
    methods = list(dict.fromkeys(table["method"]))
    fig, axes = style.figure(1, len(rates), height=0.3 * len(methods) + 1.4, sharey=True)
    for ax, rate in zip(axes, rates, strict=True):
        step_times(ax, table[table["mbit_per_s"] == rate].set_index("method"), methods)
        ax.set(title=f"{rate:g} Mbit/s" if rate else "no limit", xlabel="s per step")
    texts.name_rows(fig, axes, [label(name) for name in methods])
    note = texts.count_note(
        table.loc[table["status"] == "ok", "rounds"],
        "two ranks training a small GPT (sizes: network.json); dashed: no compression, DDP's own buckets; "
        "dotted: no communication",
        f"{table['machine'].iloc[0]}; torch {table['torch'].iloc[0]}",
        what="rounds",
        bars="bars: quartiles",
    )
    return texts.finish(fig, axes, finding(table, rates), note)


def label(method: str) -> str:
    """A row's name for people: who computes PowerSGD, its rank and its factors."""
    who, _, rest = method.partition(" r")
    if who in ("edgc", "torch") and rest:
        rank, _, more = rest.replace(",", "").partition(" ")
        return f"PowerSGD rank {rank} {more}".strip() + (" (ours)" if who == "edgc" else " (torch's hook)")
    return LABELS.get(method, method)


def finding(table: pd.DataFrame, rates: list[float]) -> str:
    """Sentence on the quickest method over the slowest link, and whether any beats dense averaging without a limit."""
    fine = table[(table["status"] == "ok") & (table["hook"] != "compute")]
    slow, free = (fine[fine["mbit_per_s"] == rate] for rate in (rates[0], rates[-1]))
    text = f"Quickest at {rates[0]:g} Mbit/s: {label(str(slow.loc[slow['seconds'].idxmin(), 'method']))}."
    if rates[-1] == 0:
        low_rank = free[~free["hook"].isin(["dense", "bf16"])]
        wins = int((low_rank["speedup_over_dense_q1"] > 1).sum())
        text += f"\nWithout a limit {wins} of {len(low_rank)} low ranks beat no compression."
    return text


def step_times(ax: Axes, rows: pd.DataFrame, methods: list[str]) -> None:
    """One dot a method; a method that failed says so in its line."""
    for place, name in enumerate(methods):
        row = rows.loc[name]
        look = LOOKS.get(row["hook"]) or style.by_name(f"powersgd_{row['factor_dtype']}")
        if row["status"] == "ok":
            error = [[row["seconds"] - row["seconds_q1"]], [row["seconds_q3"] - row["seconds"]]]
            ax.errorbar(row["seconds"], place, xerr=error, markersize=5, **look.marks())
        else:
            beside = ax.get_yaxis_transform()
            texts.outline(ax.annotate("failed", (0.06, place), xycoords=beside, va="center", color=look.colour))
    for name, line in (("dense", (0, (4, 2))), ("compute", (0, (1, 1)))):
        if name in rows.index:
            ax.axvline(rows.loc[name, "seconds"], color="#444444", linewidth=0.8, linestyle=line, zorder=0)
    ax.set_xlim(0, 1.08 * rows["seconds_q3"].max())


def bench_race(results: Path) -> Figure:
    """A row per method, by its time at the slowest limit; a marker per limit, a dot per seed."""
    files = TABLES["bench_race"]
    summary, runs = (inputs.read_benchmark(results / name, "the race", "bench-race (root only)") for name in files)
    rates = sorted(summary["mbit_per_s"].unique())
    slowest = summary[summary["mbit_per_s"] == rates[0]]
    order = slowest.sort_values(["of_uncompressed", "place"], na_position="last", kind="stable")
    fig, (ax,) = style.figure(height=0.26 * len(order) + 1.5)
    for rate, colour, marker in zip(rates, style.stage_colours(len(rates)), style.MARKERS, strict=False):
        race_times(ax, summary[summary["mbit_per_s"] == rate], runs[runs["mbit_per_s"] == rate], list(order["method"]),
                   label=f"{rate:g} Mbit/s", color=colour, marker=marker)  # fmt: skip
    never = summary[summary["reached"] == 0].groupby("method")["mbit_per_s"].agg(list)
    for place, name in enumerate(order["method"]):
        if limits := never.get(name):
            words = "never there" if len(limits) == len(rates) else f"never at {', '.join(f'{r:g}' for r in limits)}"
            ax.annotate(words, (0.02, place), va="center", fontsize=style.MIN_FONT)
    ax.axvline(1, color="#444444", linewidth=0.8, linestyle=":")
    ax.set_yticks(range(len(order)), order["label"])
    ax.set(xlabel="time to the loss (uncompressed = 1)", xlim=(0, None), ylim=(len(order) - 0.5, -0.5))
    note = texts.count_note(
        summary.loc[summary["reached"] > 0, "reached"],
        "measured, two workers; order: time at the slowest limit; "
        "the loss: what the uncompressed run of the seed has at three quarters of its iterations",
        f"{runs['machine'].iloc[0]}; torch {runs['torch'].iloc[0]}",
        bars="dots: runs, markers: means",
    )
    return texts.finish(fig, [], quickest(summary, rates), note, style.handles(ax), ncols=len(rates))


def quickest(summary: pd.DataFrame, rates: list[float]) -> str:
    """Sentence on the quickest at the slowest link and at the fastest; of methods whose seeds overlap no one is."""
    words = []
    for rate in (rates[0], rates[-1]):
        rows = summary[summary["mbit_per_s"] == rate]
        best = rows.nsmallest(1, "of_uncompressed").iloc[0]
        overlapping = int((rows["lowest"] <= best["highest"]).sum())
        who = str(best["label"]) if overlapping == 1 else f"{overlapping} methods overlap"
        words.append(f"{rate:g} Mbit/s: {who}")
    return "Quickest at " + ", at ".join(words)


def race_times(ax: Axes, summary: pd.DataFrame, runs: pd.DataFrame, order: list[str], **marks: Any) -> None:
    """The methods' times at one limit; a method of which some runs never got there says how many."""
    means = summary.set_index("method").loc[order]
    ax.plot(means["of_uncompressed"], range(len(order)), linestyle="", markersize=4.5, **marks)
    for place, (name, row) in enumerate(means.iterrows()):
        times = runs[runs["method"] == name]["of_uncompressed"].dropna()
        ax.plot(times, [place] * len(times), ".", color=marks["color"], markersize=3, alpha=0.7)
        if 0 < row["reached"] < row["seeds"]:
            lost = f"({row['seeds'] - row['reached']:.0f} of {row['seeds']:.0f} never)"
            texts.label_point(ax, lost, (times.max(), place), (5, 0))


def bench_steps(results: Path) -> Figure:
    """A panel per layout: error of the prediction (%) against the measured seconds; slower links are darker."""
    paths = [results / "steps.csv", *results.glob("pipeline.csv")]
    tables = [inputs.read_benchmark(path, "predicted steps", "bench-steps (root only)") for path in paths]
    table = pd.concat(tables, ignore_index=True)
    steps = table[table["used"] == "validation"]
    layouts = list(dict.fromkeys(steps["layout"]))
    fig, axes = style.figure(len(layouts), 1, height=1.6 + 2.0 * len(layouts), sharey=True, sharex=True)
    low, high = 0.8 * steps["seconds"].min(), 1.25 * steps["seconds"].max()
    for ax, layout in zip(axes, layouts, strict=True):
        rows = steps[steps["layout"] == layout]
        residuals(ax, rows)
        style.log_x(ax, [tick for tick in SECONDS if low < tick < high])
        ax.set(xlim=(low, high), ylabel="predicted / measured − 1 (%)", title=f"{layout}, {len(rows)} steps")
    axes[-1].set_xlabel("measured seconds per step")
    least = min(-BANDS[0][0], 100 * steps["error"].min())
    axes[0].set_ylim(1.1 * least, max(1.1 * BANDS[0][0], 115 * steps["error"].max()))
    errors = steps["error"].abs()
    title = f"The prediction is too low in {100 * (steps['error'] < 0).mean():.0f} % of the {len(steps)} steps"
    note = texts.count_note(
        steps["rounds"],
        f"{len(errors)} steps, error of the prediction: median {steps['error'].median():+.1%}, its size "
        f"{errors.median():.1%} and at worst {errors.max():.1%}; the slower the link the darker",
        f"{table['machine'].iloc[0]}; torch {table['torch'].iloc[0]}",
        what="rounds",
        bars="bars: quartiles",
    )
    return texts.finish(fig, axes, title, note, style.handles(*axes), columnspacing=0.8)


def residuals(ax: Axes, steps: pd.DataFrame) -> None:
    """A marker a step, of its method's look, with the quartiles of what was measured."""
    rates = sorted(steps["mbit_per_s"].unique())
    for band, alpha in BANDS:
        ax.axhspan(-band, band, color="#888888", alpha=alpha, lw=0)
    ax.axhline(0, color="#444444", linewidth=0.8)
    for name, rows in steps.groupby("method", sort=False):
        look = style.by_name(str(name))
        for _, row in rows.iterrows():
            shade = 0.35 + 0.65 * (1 - rates.index(row["mbit_per_s"]) / max(1, len(rates) - 1))
            low, error, high = (
                100 * (row["seconds_predicted"] / row[f"seconds{end}"] - 1) for end in ("_q3", "", "_q1")
            )
            bars = [[max(0.0, error - low)], [max(0.0, high - error)]]
            ax.errorbar(row["seconds"], error, yerr=bars, color=look.colour, alpha=shade, linewidth=0.8)
            label = "uncompressed" if look.key == "none" else look.label
            (point,) = ax.plot(row["seconds"], error, markersize=5, alpha=shade, label=label, **look.marks())
            point.set_gid("step")
