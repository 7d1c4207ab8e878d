"""Sampling rates of the entropy estimate: error and cost of every rule on the gradients of one run."""

from pathlib import Path

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
**How few gradients are enough to estimate the entropy.** α: share of the iterations that are measured; β: share
of the entries that are read. The title says what the lowest rates of the runs cost (the paper reports 6 % of the time
at α = 0.1, β = 0.25) and how well they agree with reading everything, over windows; below stands how many rank
decisions differ. The panels apply every rule to the same gradients of one uncompressed run: (a) error of one
measurement of one matrix beside the formula √((κ + 2)(1 − β) / 4βn); (b) error of a window's mean by the share of
iterations; (c) measured time of an estimate, and of an exact sum of squares, which needs no sample. How many ranks
each rule would change is in ``sampling_ablation/grid.csv``."""
RATES = (0.01, 0.05, 0.25, 1)
MARKERS = {"diagonal": "o", "strided": "s", "random": "^"}


def draw(results: Path) -> Figure:
    """Error of a measurement against its formula, RMSE of windows, and cost, by the share of entries read."""
    table, timings, *of_one_run = inputs.tables(results, TABLES)
    sampling = "diagonal" if "diagonal" in set(table["sampling"]) else str(table["sampling"].iloc[0])
    fine, cost = (rows[(rows["status"] == "ok") & (rows["sampling"] == sampling)] for rows in (table, timings))
    cost = cost.assign(percent=100 + cost["change_percent"])
    fig, axes = style.figure(3, 1, height=7.2)
    for ax, panel, rows in zip(axes, (error, windows, seconds), of_one_run, strict=True):
        panel(ax, rows)
        style.log_x(ax, RATES)
        ax.set_xlabel("β, share of entries read (no unit)")
        texts.legend_below(ax, 0.45, 0.3)
    decided = fine.dropna(subset=["decisions_differing"])
    first = decided[(decided["seed"] == decided["seed"].min()) & ((decided["alpha"] < 1) | (decided["beta"] < 1))]
    text = ", ".join(
        f"α={row['alpha']:g} β={row['beta']:g}: {row['decisions_differing']:g} of {row['decisions_compared']:g}"
        for _, row in first.head(4).iterrows()
    )
    note = texts.count_note(
        fine.groupby(["alpha", "beta"]).size(),
        "One run per seed, means. Title: of the runs of each rate, stage 0; 100 %: α = β = 1.",
        f"Decisions unlike α = β = 1 (first seed): {text}." if text else "",
        bars="",
        scale=results.name,
    )
    return texts.finish(fig, axes, finding(fine, cost), note)


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
