"""Entropy of gradients through training, its conditions, and the shape of the gradients' distribution."""

import itertools
import textwrap
from pathlib import Path
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import inputs, style, texts

TABLES = {
    "entropy_trend": ("entropy_trend/trend.csv", "entropy_trend/parameters.csv"),
    "entropy_conditions": ("entropy_trend/trend.csv", "entropy_trend/table.csv"),
    "entropy_moments": ("entropy_trend/trend.csv",),
}
CAPTION = {
    "entropy_trend": """\
**Entropy of gradients through training, GPT and BERT.** Top: change of the entropy since the first probe, mean over
parameters weighted by their size, one line per estimator; the differential estimators (histogram, Gaussian, Vasicek)
follow the gradient's scale, the discrete entropy of the authors' released code cannot, because it is computed over
[min, max]. Below: log σ of every parameter (thin) and the mean of its group (thick). Everything was measured before
clipping. How to read it: a line that falls and stays down supports the paper's observation; a line that falls first
and rises later does so only for the first part of training. The verdict in ``entropy_trend/table.csv`` follows rules
fixed before the runs.""",
    "entropy_conditions": """\
**What makes the entropy of gradients fall.** (a) Entropy of the gradients since the first probe (nats;
histogram estimate, mean over the matrices weighted by size, before clipping). At workstation scale each
variant changes one condition of GPT: batch size, learning-rate schedule, clipping, width, vocabulary. (b)
Where it was lowest and where it ended: left of zero it has fallen, a last value right of the lowest says
that it rose again. CQM lowers its rank only while the entropy falls.""",
    "entropy_moments": """\
**Shape of the gradient distribution through training.** Thick lines: mean over the matrices of the
transformer layers, weighted by size, with the range over query-key-value, projection and the two
feed-forward groups as a band. Thin dotted lines: the word embedding, most of whose entries receive no
gradient in a step. (a), (b): a normal distribution has zero skewness and zero excess kurtosis; the further
from zero, the worse a Gaussian link between entropy and σ. (c): share of entries smaller than a thousandth
of the standard deviation that the same parameter's gradient had at the first probe; a rising line means
centring on zero, which includes a mere fall of σ. (d): mean absolute Pearson correlation between gradient
matrices of the same shape in different layers of a stage.""",
}
PLAIN = ("gpt", "bert")  # the other variants change one condition each, see entropy_conditions
GROUP_ORDER = ("embedding", "position", "qkv", "projection", "fc1", "fc2", "head", "norm", "other")
ESTIMATOR = "histogram"
# Of conditions other than an architecture.
OTHERS: tuple[tuple[str, style.Line], ...] = (
    ("#009E73", "--"),
    ("#CC79A7", "-."),
    ("#000000", ":"),
    ("#8C6D00", (0, (6, 2))),
    ("#56B4E9", (0, (3, 1, 1, 1, 1, 1))),
)
POINTS = (("minimum", "lowest", "v"), ("end", "at the end", "o"))
LAYER_GROUPS = ("qkv", "projection", "fc1", "fc2")
PANELS = (
    ("skewness", "skewness (log beyond ±1)", "no unit", 1.0),
    ("excess_kurtosis", "excess kurtosis (log above 1)", "no unit", 1.0),
    ("near_zero", "|g| < 0.001 σ₀ (log above 1 %)", "% of the entries", 100.0),
    ("correlation_layers", "correlation between layers", "mean |Pearson|, no unit", 1.0),
)


def entropy_trend(results: Path) -> Figure:
    """Change of the entropy, then log sigma, a panel per run variant (GPT, BERT)."""
    trend, parameters = inputs.tables(results, TABLES["entropy_trend"])
    trend = trend[trend["variant"].isin(PLAIN)]
    variants = list(dict.fromkeys(trend["variant"]))
    fig, axes = style.figure(2 * len(variants), 1, height=8.4)
    above, below = axes[: len(variants)], axes[len(variants) :]
    moves = []
    for top, bottom, variant in zip(above, below, variants, strict=True):
        rows = trend[trend["variant"] == variant]
        whole, label = rows[rows["group"] == "<all>"], rows["label"].iloc[0]
        moves.append(f"{label} {moved(whole)}")
        by_estimator(top, whole)
        sigmas(bottom, parameters[parameters["variant"] == variant])
        top.set(title=f"{label}, entropy", xlabel="iteration", ylabel="change since the\nfirst probe (nats)")
        bottom.set(title=f"{label}, log σ", xlabel="iteration", ylabel="log σ (σ in units of\nthe gradient)")
    for row in (above, below):
        texts.legend_below(row[-1], 0.45, 0.4, style.handles(*row))
    note = texts.count_note(
        trend.groupby("variant")["seed"].nunique(),
        "Measured before clipping. Entropy: mean over parameters weighted by size. Log σ: thin lines are single "
        "parameters (first seed), thick lines the mean of their group.",
        bars="lines: mean, bands: 95 % t interval of the mean",
        scale=results.name,
    )
    return texts.finish(fig, axes, f"How entropy moves in the second half: {', '.join(moves)}", note)


def moved(rows: pd.DataFrame) -> str:
    """Sentence on how far the histogram entropy, mean over seeds, has moved in the second half of the run."""
    mean = rows.groupby("iteration")["entropy_histogram"].mean().dropna()
    if len(mean) < 2:
        return "not known"
    change = mean.iloc[-1] - mean[mean.index >= mean.index[-1] / 2].iloc[0]
    return f"{change:+.2g} nats".replace("-", "−")


def by_estimator(ax: Axes, rows: pd.DataFrame) -> None:
    """Change since the first probe, per estimator: the estimators' levels differ, their movement is compared."""
    for name, look in style.ESTIMATORS.items():
        table = rows.pivot_table(index="iteration", columns="seed", values=f"entropy_{name}")
        if table.empty:
            continue
        table = table - table.iloc[0]
        mean = table.mean(axis=1)
        wide = 2.4 if name == "histogram" else 1.2  # Vasicek's lies on it
        ax.plot(mean.index, mean, label=look.label, color=look.colour, linestyle=look.line, linewidth=wide)
        if table.shape[1] > 1:
            half = table.apply(style.half_interval, axis=1)
            ax.fill_between(mean.index, mean - half, mean + half, color=look.colour, alpha=0.2, linewidth=0)
    ax.axhline(0, color="#444444", linewidth=0.6)


def sigmas(ax: Axes, rows: pd.DataFrame) -> None:
    """Thin lines: parameters of the first seed; thick: mean of their group over parameters and seeds."""
    colours = dict(zip(GROUP_ORDER, sns.color_palette("colorblind", len(GROUP_ORDER)), strict=True))
    first = rows[rows["seed"] == rows["seed"].min()]
    for (_, _, group), line in first.groupby(["stage", "parameter", "group"]):
        ax.plot(line["iteration"], line["log_sigma"], color=colours[group], linewidth=0.4, alpha=0.5)
    for place, group in enumerate(GROUP_ORDER):
        if group in set(rows["group"]):
            mean = rows[rows["group"] == group].groupby("iteration")["log_sigma"].mean()
            look: dict[str, Any] = {"linewidth": 1.6, "linestyle": ("-", "--", "-.", ":")[place % 4]}
            ax.plot(mean.index, mean, color=colours[group], label=group, **look)


def entropy_conditions(results: Path) -> Figure:
    """Entropy since the first probe (a), and where it was lowest and ended in numbers (b); a colour per variant."""
    trend, table = inputs.tables(results, TABLES["entropy_conditions"])
    trend = trend[trend["group"] == "<all>"]
    table = table[(table["group"] == "<all>") & (table["estimator"] == ESTIMATOR) & (table["status"] == "ok")]
    labels = dict(zip(trend["variant"], trend["label"], strict=True))
    # GPT and BERT as in every figure, the others told apart by colour and dashes.
    looks = {name: (look.colour, "-") for name, look in style.ARCHITECTURES.items()}
    others = [name for name in labels if name not in looks]
    looks |= dict(zip(others, itertools.cycle(OTHERS), strict=False))
    fig, (curves, ends) = style.figure(2, 1, height=3.9 + 0.32 * len(labels))
    for place, (variant, label) in enumerate(labels.items()):
        row, (colour, line) = table[table["variant"] == variant], looks[variant]
        rows = trend[trend["variant"] == variant]
        values = rows.pivot_table(index="iteration", columns="seed", values=f"entropy_{ESTIMATOR}")
        curves.plot((values - values.iloc[0]).mean(axis=1), color=colour, linestyle=line, label=label)
        for column, name, marker in POINTS:
            change = row[column] - row["start"]
            face, label = colour if column == "end" else "white", None if place else name
            places = [place] * len(change)
            ends.scatter(change, places, label=label, edgecolors=[colour], facecolors=[face], marker=marker)
    curves.axhline(0, color="#444444", linewidth=0.6)
    curves.set(title="course", xlabel="iteration", ylabel="entropy since\nthe first probe (nats)")
    ends.axvline(0, color="#444444", linewidth=0.6)
    ends.set(title="lowest and last", xlabel="entropy since the first probe (nats)", ylabel="condition")
    ends.set_yticks(range(len(labels)), [textwrap.fill(label, 16) for label in labels.values()])
    ends.set_ylim(len(labels) - 0.5, -0.5)
    texts.legend_below(ends, 0.5, 0.2)
    extra = "Histogram estimate, mean over the matrices weighted by size, before clipping. (b): of the smoothed course."
    seeds = trend.groupby("variant")["seed"].nunique()
    note = texts.count_note(seeds, extra, bars="lines: mean over seeds, markers: runs", scale=results.name)
    return texts.finish(fig, [curves, ends], rises(table), note, style.handles(curves), columnspacing=0.8)


def rises(table: pd.DataFrame) -> str:
    """Sentence on the number of runs in which the entropy rose again, by the rule of the table."""
    rose = (table["rises_again"] == "yes").sum()
    return f"Entropy falls, and rises again in {rose} of {len(table)} runs"


def entropy_moments(results: Path) -> Figure:
    """Skewness, excess kurtosis, share near zero, correlation between layers; a line per variant."""
    trend = inputs.read(results, "entropy_trend", "trend.csv")
    trend = trend[trend["variant"].isin(PLAIN)]
    fig, axes = style.figure(4, 1, height=6.6, sharex=True)
    for ax, (column, title, unit, factor) in zip(axes, PANELS, strict=True):
        for index, (_, rows) in enumerate(trend.groupby("variant", sort=False)):
            shape(ax, rows, column, factor, style.MARKERS[index])
        ax.set(title=title, ylabel=unit)
    drawn = trend[trend["group"].isin([*LAYER_GROUPS, "embedding"])]
    symmetric_log(axes[0], drawn["skewness"], low=-2, high=2)
    symmetric_log(axes[1], drawn["excess_kurtosis"], low=0, high=10)
    axes[-1].set_xlabel("iteration")
    # Most of an embedding is near zero: on one scale with it the layers would lie on the axis.
    symmetric_log(axes[2], 100 * drawn["near_zero"], low=0, high=10)
    axes[3].set_ylim(bottom=0)
    note = texts.count_note(
        trend.groupby("variant")["seed"].nunique(),
        "Thick: mean over the matrices of the layers, weighted by size; bands: range over qkv, projection, "
        "fc1, fc2. Thin dotted: word embedding. "
        "σ₀: standard deviation of the same parameter's gradient at the first probe.",
        bars="mean over seeds",
        scale=results.name,
    )
    return texts.finish(fig, axes, kurtosis(trend), note, style.handles(axes[0]))


def kurtosis(trend: pd.DataFrame) -> str:
    """Sentence on how far from normal the layers' gradients are."""
    layers = trend[trend["group"] == "<layers>"].groupby(["variant", "iteration"])["excess_kurtosis"].mean().dropna()
    if layers.empty:
        return "Shape of the gradient distribution"
    return f"Layers' gradients are not normal: mean excess kurtosis {layers.min():.1f} to {layers.max():.0f}, not 0"


def symmetric_log(ax: Axes, values: pd.Series, *, low: float, high: float) -> None:
    """Linear within ±1 and logarithmic beyond: embeddings are orders of magnitude from normal, layers are not."""
    low, high = min(low, 1.6 * float(values.min())), max(high, 1.6 * float(values.max()))
    decades = [10.0**k for k in range(7)]
    ax.set_yscale("symlog", linthresh=1)
    style.plain(ax.yaxis, [t for t in (*(-d for d in reversed(decades)), 0.0, *decades) if low <= t <= high])
    ax.set_ylim(low, high)


def shape(ax: Axes, rows: pd.DataFrame, column: str, factor: float, marker: str) -> None:
    """A variant; GPT and BERT keep their colours, further variants of one architecture differ by marker."""
    family = style.ARCHITECTURES.get(str(rows["architecture"].iloc[0]), style.FAMILIES["other"])
    label = str(rows["label"].iloc[0])
    groups = factor * rows.pivot_table(index="iteration", columns="group", values=column, dropna=False)
    parts = groups.reindex(columns=list(LAYER_GROUPS))
    ax.fill_between(parts.index, parts.min(axis=1), parts.max(axis=1), color=family.colour, alpha=0.2, linewidth=0)
    look: dict[str, Any] = {"color": family.colour, "marker": marker, "linestyle": family.line}
    layers = groups["<layers>"]
    ax.plot(layers.index, layers, markevery=max(1, len(layers) // 8), label=f"{label}, layers", **look)
    if "embedding" in groups and groups["embedding"].notna().any():
        look = {"color": family.colour, "linewidth": 0.8, "linestyle": ":"}
        ax.plot(groups.index, groups["embedding"], label=f"{label}, embedding", **look)
