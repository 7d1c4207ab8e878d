"""Predicted against measured seconds of training steps over links of limited bandwidth."""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import inputs, style, texts

TABLES = ("steps.csv",)  # and pipeline.csv where pipelines were measured
CAPTION = """\
**Predicted against measured training steps**: data-parallel workers in network namespaces, each method at
each limit. Predicted over measured seconds, less one: below zero the prediction is too low. It is told the step
without communication, what the method costs where nothing limits the network, and the speed of single all-reduces at
the limit; no step at a limit. Shaded: within 10 and 25 %. Medians over rounds, bars: prediction over the quartiles."""
BANDS = ((25, 0.08), (10, 0.16))  # percent, opacity
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)


def draw(results: Path) -> Figure:
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
        style.log_x(ax, [tick for tick in TICKS if low < tick < high])
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
