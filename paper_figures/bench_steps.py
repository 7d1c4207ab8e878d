"""Predicted against measured seconds of training steps over links of limited bandwidth."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from paper_figures import style
from paper_figures.families import by_name

TABLES = ("steps.csv",)  # and pipeline.csv where pipelines were measured
CAPTION = """\
**Predicted against measured training steps**: data-parallel workers in network namespaces, each method at
each limit. The prediction is told the step without communication, what the method costs where nothing
limits the network, and the speed of single all-reduces at the limit; no step at a limit. Shaded: within 10
and 25 %. Medians over rounds, quartiles as bars."""
BANDS = ((0.25, 0.08), (0.10, 0.16))  # relative error, opacity


def draw(results: Path) -> Figure:
    """A panel per layout; every limit's own shade of the method's colour."""
    paths = [results / "steps.csv", *results.glob("pipeline.csv")]
    table = pd.concat(
        [style.read_benchmark(path, "predicted steps", "bench-steps (root only)") for path in paths],
        ignore_index=True,
    )
    steps = table[table["used"] == "validation"]
    layouts = list(dict.fromkeys(steps["layout"]))
    fig, axes = style.figure(1, len(layouts), width=style.TEXT, height=3.6, sharey=True, sharex=True)
    low = 0.8 * min(steps["seconds_q1"].min(), steps["seconds_predicted"].min())
    high = 1.25 * max(steps["seconds_q3"].max(), steps["seconds_predicted"].max())
    for ax, layout in zip(axes, layouts, strict=True):
        own = steps[steps["layout"] == layout]
        rates = sorted(own["mbit_per_s"].unique())
        line = np.array([low, high])
        for band, alpha in BANDS:
            ax.fill_between(line, line * (1 - band), line * (1 + band), color="#888888", alpha=alpha, lw=0)
        ax.plot(line, line, color="#444444", linewidth=0.8)
        for name, rows in own.groupby("method", sort=False):
            look = by_name(str(name))
            for _, row in rows.iterrows():
                shade = 0.35 + 0.65 * (1 - rates.index(row["mbit_per_s"]) / max(1, len(rates) - 1))
                error = [[row["seconds"] - row["seconds_q1"]], [row["seconds_q3"] - row["seconds"]]]
                place = row["seconds"], row["seconds_predicted"]
                ax.errorbar(*place, xerr=error, color=look.colour, alpha=shade)
                label = "uncompressed" if look.key == "none" else look.label
                (point,) = ax.plot(*place, markersize=5, alpha=shade, label=label, **look.marks())
                point.set_gid("step")
        ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        ax.set_title(f"{layout}, {len(own)} steps")
        ax.set_xlabel("measured seconds per step")
        ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if low < tick < high]
        style.plain(ax.xaxis, ticks)
        style.plain(ax.yaxis, ticks)
    axes[0].set_ylabel("predicted seconds per step")
    found = dict(zip(*reversed(style.handles(*axes)), strict=True))
    fig.legend(found.values(), found.keys(), loc="outside right upper")
    style.letter(axes)
    errors = steps["error"].abs()
    style.annotate(
        fig,
        list(steps["rounds"].astype(int)),
        what="rounds",
        bars="bars: quartiles",
        extra=f"{len(errors)} steps, error of the prediction: median {errors.median():.1%}, worst {errors.max():.1%}; "
        "the slower the link the darker"
        f"\n{table['machine'].iloc[0]}; torch {table['torch'].iloc[0]}",
    )
    return fig
