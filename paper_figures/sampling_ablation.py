"""Sampling rates of the entropy estimate: agreement, error and cost over the grid of alpha and beta, and every rule on
the gradients of one run."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import inputs, style, texts

TABLES = (
    "sampling_ablation/table.csv",
    "sampling_ablation/timings.csv",
    "sampling_ablation/sampling_error.csv",
    "sampling_ablation/grid.csv",
    "sampling_ablation/grid_timings.csv",
)
CAPTION = """\
**How few gradients are enough to estimate the entropy.** Rows: share α of the iterations that are measured;
columns: share β of the entries that are read. (a): correlation with the full measurement over windows. (b):
root mean square error of window means, in nats. (c): measured time of the estimate per step, in percent of
reading every entry at every iteration; the paper reports 6 % at α = 0.1, β = 0.25. Darker is better. Below:
how many rank decisions differ from those of the run that reads everything. (d) to (f) apply every rule to
the same gradients of one uncompressed run: (d) error of one measurement of one matrix beside the formula
√((κ + 2)(1 − β) / 4βn); (e) error of a window's mean by the share of iterations; (f) measured time of an
estimate, and of an exact sum of squares, which needs no sample. How many ranks each rule would change is in
``sampling_ablation/grid.csv``."""
WORST_CC, WORST_NATS = 0.9, 0.1  # at the light end of the colours, or what is worse in the table
RATES = (0.01, 0.05, 0.25, 1)
MARKERS = {"diagonal": "o", "strided": "s", "random": "^"}


def draw(results: Path) -> Figure:
    """Three grids of runs: CC, RMSE in nats, and seconds per step relative to reading everything; below, on the
    gradients of one run: error of a measurement against its formula, RMSE of windows, cost."""
    table = inputs.read(results, "sampling_ablation")
    timings = inputs.read(results, "sampling_ablation", "timings.csv")
    sampling = "diagonal" if "diagonal" in set(table["sampling"]) else str(table["sampling"].iloc[0])
    fine = table[(table["status"] == "ok") & (table["sampling"] == sampling)]
    cost = timings[(timings["status"] == "ok") & (timings["sampling"] == sampling)].copy()
    cost["percent"] = 100 + cost["change_percent"]
    fig, (above, *below) = style.stacked([1.3, 2.3, 2.0, 2.3])
    axes = [*above.subplots(1, 3, sharex=True, sharey=True), *(part.subplots() for part in below)]
    worst = min(WORST_CC, fine["cc"].min()), max(WORST_NATS, fine["rmse_nats"].max()), 100.0
    grid(axes[0], fine, "cc", "CC\n(no unit)", "{:.3f}", (1.0, worst[0]))
    grid(axes[1], fine, "rmse_nats", "RMSE\n(nats)", "{:.3f}", (0.0, worst[1]))
    grid(axes[2], cost, "percent", "time\n(%)", "{:.1f}", (0.0, worst[2]))
    axes[0].set_ylabel("α, share of\niterations")
    axes[1].set_xlabel("β, share of entries read (no unit)")
    error(axes[3], inputs.read(results, "sampling_ablation", "sampling_error.csv"))
    windows(axes[4], inputs.read(results, "sampling_ablation", "grid.csv"))
    seconds(axes[5], inputs.read(results, "sampling_ablation", "grid_timings.csv"))
    for part, ax in zip(below, axes[3:], strict=True):
        ax.set_xscale("log")
        style.plain(ax.xaxis, RATES)
        ax.set_xlabel("β, share of entries read (no unit)")
        # Six lines of text hide data wherever they are put inside.
        part.legend(*style.handles(ax), loc="outside lower center", ncols=2, columnspacing=0.8)
    texts.letter(axes)
    texts.headline(fig, seen(fine, cost))
    counts = list(fine.groupby(["alpha", "beta"]).size())
    decided = fine.dropna(subset=["decisions_differing"])
    first = decided[(decided["seed"] == decided["seed"].min()) & ((decided["alpha"] < 1) | (decided["beta"] < 1))]
    text = ", ".join(
        f"α={row['alpha']:g} β={row['beta']:g}: {row['decisions_differing']:g} of {row['decisions_compared']:g}"
        for _, row in first.head(4).iterrows()
    )
    texts.annotate(
        fig,
        counts,
        bars="cells: mean over seeds",
        scale=results.name,
        extra=f"(a) to (c): {sampling} sampling, (a), (b) stage 0, (c) 100 %: α = β = 1; one scale of colours, "
        f"from dark (CC 1, no error, no time) to light (CC {worst[0]:.2g}, {worst[1]:.2g} nats, 100 %). "
        "(d) to (f): one run per seed, means."
        + (f"\nDecisions unlike α = β = 1 (first seed): {text}." if text else ""),
    )
    return fig


def seen(fine: pd.DataFrame, cost: pd.DataFrame) -> str:
    """In words: what the smallest share of iterations and entries that ran costs and how well it agrees."""
    least = fine.groupby(["alpha", "beta"])["cc"].mean().dropna().sort_index()
    if least.empty:
        return "What sampling costs and saves"
    (alpha, beta), cc = least.index[0], least.iloc[0]
    percent = cost.loc[(cost["alpha"] == alpha) & (cost["beta"] == beta), "percent"].mean()
    return f"At α = {alpha:g} and β = {beta:g} the estimate takes {percent:.1f} % of the time, at CC {cc:.2f}"


def error(ax: Axes, found: pd.DataFrame) -> None:
    """Error of one measurement of one matrix, median over the matrices; the line is the formula for the Gaussian."""
    for (estimator, rule), rows in found.groupby(["estimator", "rule"]):
        means = rows.groupby("rate")["measured_nats"].mean()
        family = style.ESTIMATORS[str(estimator)]
        marks = family._replace(marker=MARKERS[str(rule)]).marks(filled=rule == "diagonal")
        ax.plot(means.index, means, label=f"{family.label}, {rule}", **marks)
    formula = found[found["estimator"] == "gaussian"].groupby("rate")["formula_nats"].mean()
    ax.plot(formula.index, formula, color="#444444", linewidth=0.9, label="formula, Gaussian")
    ax.set_yscale("log")
    style.plain(ax.yaxis)
    ax.set(title="error of a measurement", ylabel="RMSE to all\nentries (nats)")


def windows(ax: Axes, found: pd.DataFrame) -> None:
    """RMSE of window means by the share of iterations, histogram."""
    mine = found[(found["estimator"] == "histogram") & found["rule"].isin(["all", "diagonal"])]
    alphas = sorted(mine["alpha"].unique(), reverse=True)
    for index, alpha in enumerate(alphas):
        means = mine[mine["alpha"] == alpha].groupby("beta")["rmse_nats"].mean()
        if (means > 0).any():
            ax.plot(
                means[means > 0].index,
                means[means > 0],
                marker=style.MARKERS[index],
                color=style.stage_colours(len(alphas))[index],
                label=f"α = {alpha:g}",
            )
    ax.set_yscale("log")
    style.plain(ax.yaxis)
    ax.set(title="windows, diagonal, histogram", ylabel="RMSE of window\nmeans (nats)")


def seconds(ax: Axes, found: pd.DataFrame) -> None:
    """Time of each estimate as a share of the histogram of all entries."""
    percent = found.assign(percent=100 * found["of_histogram"])
    for (estimator, rule), rows in percent[percent["rule"] != "all"].groupby(["estimator", "rule"]):
        whole = percent[(percent["rule"] == "all") & (percent["estimator"] == estimator)]
        means = pd.concat([rows, whole]).groupby("rate")["percent"].mean()
        family = style.ESTIMATORS[str(estimator)]
        own, line = rule == "diagonal", "-" if rule == "diagonal" else ":"
        marks = family._replace(marker=MARKERS[str(rule)]).marks(line, filled=own)
        ax.plot(means.index, means, label=f"{family.label}, {rule}", **marks)
    squares = percent.loc[percent["estimator"] == "square_sum", "percent"]
    ax.axhline(squares.mean(), color="#444444", linestyle="--", linewidth=0.9, label="sum of all squares")
    ax.set_ylim(bottom=0)
    ax.set(title="time of an estimate", ylabel="% of the histogram\nof all entries")


def grid(ax: Axes, rows: pd.DataFrame, column: str, title: str, number: str, ends: tuple[float, float]) -> None:
    """A cell per (alpha, beta) with its number written in it; dark to light from the first of ``ends`` to the second,
    a dash marks what is undefined."""
    cells = rows.pivot_table(index="alpha", columns="beta", values=column, aggfunc="mean", dropna=False)
    cells = cells.sort_index(ascending=False)
    values = cells.to_numpy(dtype=float)
    shares = (values - ends[0]) / (ends[1] - ends[0])
    ax.imshow(np.ma.masked_invalid(shares), cmap=plt.get_cmap("cividis"), vmin=0, vmax=1, aspect="auto")
    ax.set_xticks(range(cells.shape[1]), [f"{beta:g}" for beta in cells.columns])
    ax.set_yticks(range(cells.shape[0]), [f"{alpha:g}" for alpha in cells.index])
    ax.grid(False)
    for (i, j), value in np.ndenumerate(values):
        dark = np.isfinite(value) and shares[i, j] < 0.5
        text = number.format(value) if np.isfinite(value) else "–"
        ax.text(j, i, text, ha="center", va="center", color="white" if dark else "black", fontsize=style.FONT)
    ax.set_title(title)
