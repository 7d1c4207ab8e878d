"""Validation loss against bytes for every compressor and option, with the Pareto front of the means."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.acting import idle
from paper_figures import inputs, names, style, texts

TABLES = ("equal_bytes/table.csv", "equal_bytes/pareto.csv")
CAPTION = """\
**Compressors at equal bytes.** Validation loss above uncompressed training of the same seed (nats) against the
bytes that a replica sends, scales and indices included, as a share of an fp32 all-reduce (of a bf16 one: twice
that); four data-parallel workers, each with its own error feedback. Left and down is better; the axis of the
gap is linear below 0.01 nats. The grey line is the Pareto front of the means over seeds: neighbours on it whose
bars overlap could change places. Numbers at the points are ranks, shares of entries sent or bits. Paired
differences at 3, 6 and 12 % are in ``equal_bytes/levels.csv``. Policies that did not act, so that nothing was
tested of them, are named below the figure."""
TICKS = (1, 2, 3, 6, 12, 25, 50, 100)
LINEAR = 0.01  # nats; the gap's axis is linear below and logarithmic above


def draw(results: Path) -> Figure:
    """Gap to uncompressed training (mean and 95 % t interval over seeds) against the share of the fp32 bytes sent."""
    runs = inputs.read(results, "equal_bytes")
    points = inputs.read(results, "equal_bytes", "pareto.csv")
    fig, (ax,) = style.figure(height=5.2)
    named: set[str] = set()
    words: list[tuple[pd.Series, str]] = []
    drawn = []
    for _, row in points[points["method"] != "none"].iterrows():
        mine = runs[(runs["variant"] == row.variant) & (runs["status"] == "ok")]
        look = style.look(mine.iloc[0])
        size = 6 if look.marker == "*" else 5
        label = None if look.label in named else look.label
        marks = look.marks() | {"markersize": size, "elinewidth": 0.8}
        half = style.half_interval(mine["gap_nats"])
        ax.errorbar(row.percent, row.gap_nats, yerr=half, label=label, **marks)
        ends = {"gap_nats_low": row.gap_nats - half, "gap_nats_high": row.gap_nats + half}
        drawn.append(pd.Series({"bytes_ratio_mean": row.percent / 100, "gap_nats_mean": row.gap_nats} | ends))
        named.add(look.label)
        if text := detail(mine.iloc[0]):
            words.append((drawn[-1], text))
    front(ax, points)
    ax.axhline(0, color="#444444", linewidth=0.6)
    ax.set_xscale("log")
    ax.set_yscale("symlog", linthresh=LINEAR, linscale=0.6)
    style.plain(ax.yaxis, ticks(runs["gap_nats"]))
    style.plain(ax.xaxis, TICKS)
    percent = points.loc[points["method"] != "none", "percent"]
    ax.set_xlim(percent.min() / 1.2, percent.max() * 1.3)
    ax.margins(y=0.06)
    ax.set_xlabel(texts.share_of_bytes())
    ax.set_ylabel("validation loss above uncompressed\n(nats; linear below 0.01)")
    texts.title_legend(fig, *style.handles(ax), seen(points, runs), columnspacing=1.0)
    texts.annotate(
        fig, list(points["n"]), scale=results.name, extra=("grey line: Pareto front of the means", texts.untested(runs))
    )
    names.write(ax, pd.DataFrame(drawn), words)
    return fig


def seen(points: pd.DataFrame, runs: pd.DataFrame) -> str:
    """In words: the variant of fewest bytes that loses no more than EDGC, of policies that acted."""
    points = points[~points["label"].isin(idle(runs))]
    edgc = runs.loc[(runs["method"] == "edgc") & (runs["policy"] == "cqm"), "variant"]
    means = {"bytes_ratio_mean": points["percent"] / 100, "gap_nats_mean": points["gap_nats"]}
    return names.seen(points.assign(edgc=points["variant"].isin(edgc), **means))


def detail(run: pd.Series) -> str:
    """Rank, density or bits of a run, in a few characters."""
    if run["method"] == "powersgd":
        return f"r{run['rank']:g}"
    if run["method"] in ("topk", "randomk"):
        return f"{100 * run['density']:g} %" + (", DGC" if "DGC" in run["label"] else "")
    if run["method"] == "quantize":
        return f"int{run['bits']:g}" + (" stoch." if run["rounding"] == "stochastic" else "")
    if run["method"] == "edgc":
        return str(run["label"])
    return ""


def front(ax: Axes, points: pd.DataFrame) -> None:
    """A stair through the points that no other point beats in both."""
    best = points[points["on_front"] & (points["method"] != "none")].sort_values("percent")
    ax.step(best["percent"], best["gap_nats"], where="post", color="#999999", linewidth=1.0, zorder=0)


def ticks(gaps: pd.Series) -> list[float]:
    """Round values of the gap between its extremes."""
    wanted = np.array([-0.1, -0.05, -0.02, -0.01, 0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
    return [float(t) for t in wanted if gaps.min() * 1.5 - LINEAR <= t <= gaps.max() * 1.5 + LINEAR]
