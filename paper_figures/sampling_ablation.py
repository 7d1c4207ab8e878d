"""Sampling rates of the entropy estimate: agreement, error and cost over the grid of alpha and beta, and every rule on
the gradients of one run."""

from pathlib import Path

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
    table, timings, *of_one_run = inputs.tables(results, TABLES)
    sampling = "diagonal" if "diagonal" in set(table["sampling"]) else str(table["sampling"].iloc[0])
    fine, cost = (rows[(rows["status"] == "ok") & (rows["sampling"] == sampling)] for rows in (table, timings))
    cost = cost.assign(percent=100 + cost["change_percent"])
    fig, (above, *below) = style.stacked([1.3, 2.3, 2.0, 2.3])
    grids = above.subplots(1, 3, sharex=True, sharey=True)
    worst = min(WORST_CC, fine["cc"].min()), max(WORST_NATS, fine["rmse_nats"].max())
    grid(grids[0], fine, "cc", "CC\n(no unit)", "{:.3f}", (1.0, worst[0]))
    grid(grids[1], fine, "rmse_nats", "RMSE\n(nats)", "{:.3f}", (0.0, worst[1]))
    grid(grids[2], cost, "percent", "time\n(%)", "{:.1f}", (0.0, 100.0))
    grids[0].set_ylabel("α, share of\niterations")
    grids[1].set_xlabel("β, share of entries read (no unit)")
    for part, panel, rows in zip(below, (error, windows, seconds), of_one_run, strict=True):
        ax = part.subplots()
        panel(ax, rows)
        style.log_x(ax, RATES)
        ax.set_xlabel("β, share of entries read (no unit)")
        # Six lines of text hide data wherever they are put inside.
        part.legend(*style.handles(ax), loc="outside lower center", ncols=2, columnspacing=0.8)
    decided = fine.dropna(subset=["decisions_differing"])
    first = decided[(decided["seed"] == decided["seed"].min()) & ((decided["alpha"] < 1) | (decided["beta"] < 1))]
    text = ", ".join(
        f"α={row['alpha']:g} β={row['beta']:g}: {row['decisions_differing']:g} of {row['decisions_compared']:g}"
        for _, row in first.head(4).iterrows()
    )
    note = texts.count_note(
        fine.groupby(["alpha", "beta"]).size(),
        f"(a) to (c): {sampling} sampling, (a), (b) stage 0, (c) 100 %: α = β = 1; one scale of colours, "
        f"from dark (CC 1, no error, no time) to light (CC {worst[0]:.2g}, {worst[1]:.2g} nats, 100 %). "
        "(d) to (f): one run per seed, means.",
        f"Decisions unlike α = β = 1 (first seed): {text}." if text else "",
        bars="cells: mean over seeds",
        scale=results.name,
    )
    return texts.finish(fig, fig.axes, finding(fine, cost), note)


def finding(fine: pd.DataFrame, cost: pd.DataFrame) -> str:
    """Sentence on what the smallest share of iterations and entries that ran costs and how well it agrees."""
    least = fine.groupby(["alpha", "beta"])["cc"].mean().dropna().sort_index()
    if least.empty:
        return "What sampling costs and saves"
    (alpha, beta), cc = least.index[0], least.iloc[0]
    percent = cost.loc[(cost["alpha"] == alpha) & (cost["beta"] == beta), "percent"].mean()
    return f"At α = {alpha:g} and β = {beta:g} the estimate takes {percent:.1f} % of the time, at CC {cc:.2f}"


def plot_rule(
    ax: Axes, estimator: object, rule: object, means: pd.Series, lines: tuple[style.Line, style.Line]
) -> None:
    """An estimator under a rule of sampling; the diagonal is filled and has the first of ``lines``."""
    look, diagonal = style.ESTIMATORS[str(estimator)], rule == "diagonal"
    marks = look._replace(marker=MARKERS[str(rule)]).marks(lines[not diagonal], filled=diagonal)
    ax.plot(means.index, means, label=f"{look.label}, {rule}", **marks)


def error(ax: Axes, measurements: pd.DataFrame) -> None:
    """Error of one measurement of one matrix, median over the matrices; the line is the formula for the Gaussian."""
    for (estimator, rule), rows in measurements.groupby(["estimator", "rule"]):
        plot_rule(ax, estimator, rule, rows.groupby("rate")["measured_nats"].mean(), ("", ""))
    formula = measurements[measurements["estimator"] == "gaussian"].groupby("rate")["formula_nats"].mean()
    ax.plot(formula, color="#444444", linewidth=0.9, label="formula, Gaussian")
    style.log_y(ax)
    ax.set(title="error of a measurement", ylabel="RMSE to all\nentries (nats)")


def windows(ax: Axes, rules: pd.DataFrame) -> None:
    """RMSE of window means by the share of iterations, histogram."""
    rows = rules[(rules["estimator"] == "histogram") & rules["rule"].isin(["all", "diagonal"])]
    alphas = sorted(rows["alpha"].unique(), reverse=True)
    for alpha, marker, colour in zip(alphas, style.MARKERS, style.stage_colours(len(alphas)), strict=False):
        means = rows[rows["alpha"] == alpha].groupby("beta")["rmse_nats"].mean()
        if (means > 0).any():
            ax.plot(means[means > 0], marker=marker, color=colour, label=f"α = {alpha:g}")
    style.log_y(ax)
    ax.set(title="windows, diagonal, histogram", ylabel="RMSE of window\nmeans (nats)")


def seconds(ax: Axes, timings: pd.DataFrame) -> None:
    """Time of each estimate as a share of the histogram of all entries."""
    percent = timings.assign(percent=100 * timings["of_histogram"])
    for (estimator, rule), rows in percent[percent["rule"] != "all"].groupby(["estimator", "rule"]):
        whole = percent[(percent["rule"] == "all") & (percent["estimator"] == estimator)]
        plot_rule(ax, estimator, rule, pd.concat([rows, whole]).groupby("rate")["percent"].mean(), ("-", ":"))
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
    ax.imshow(np.ma.masked_invalid(shares), cmap="cividis", vmin=0, vmax=1, aspect="auto")
    ax.set_xticks(range(cells.shape[1]), [f"{beta:g}" for beta in cells.columns])
    ax.set_yticks(range(cells.shape[0]), [f"{alpha:g}" for alpha in cells.index])
    ax.grid(False)
    for (i, j), value in np.ndenumerate(values):
        text = number.format(value) if np.isfinite(value) else "–"
        colour = "white" if np.isfinite(value) and shares[i, j] < 0.5 else "black"
        ax.text(j, i, text, ha="center", va="center", color=colour, fontsize=style.FONT)
    ax.set_title(title)
