"""Shape of the gradients' distribution through training, mass near zero, and correlation between layers."""

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import inputs, style, texts
from paper_figures.entropy_trend import PLAIN

TABLES = ("entropy_trend/trend.csv",)
CAPTION = """\
**Shape of the gradient distribution through training.** Thick lines: mean over the matrices of the
transformer layers, weighted by size, with the range over query-key-value, projection and the two
feed-forward groups as a band. Thin dotted lines: the word embedding, most of whose entries receive no
gradient in a step. (a), (b): a normal distribution has zero skewness and zero excess kurtosis; the further
from zero, the worse a Gaussian link between entropy and σ. (c): share of entries smaller than a thousandth
of the standard deviation that the same parameter's gradient had at the first probe; a rising line means
centring on zero, which includes a mere fall of σ. (d): mean absolute Pearson correlation between gradient
matrices of the same shape in different layers of a stage."""
LAYER_GROUPS = ("qkv", "projection", "fc1", "fc2")
PANELS = (
    ("skewness", "skewness (log beyond ±1)", "no unit", 1.0),
    ("excess_kurtosis", "excess kurtosis (log above 1)", "no unit", 1.0),
    ("near_zero", "mass near zero: |g| < 0.001 σ₀", "% of the entries", 100.0),
    ("correlation_layers", "correlation between layers", "mean |Pearson|, no unit", 1.0),
)


def draw(results: Path) -> Figure:
    """Skewness, excess kurtosis, share near zero, correlation between layers; a line per variant."""
    trend = inputs.read(results, "entropy_trend", "trend.csv")
    trend = trend[trend["variant"].isin(PLAIN)]
    fig, axes = style.figure(4, 1, height=6.6, sharex=True)
    for ax, (column, title, unit, factor) in zip(axes, PANELS, strict=True):
        for index, (_, rows) in enumerate(trend.groupby("variant", sort=False)):
            line(ax, rows, column, factor, style.MARKERS[index])
        ax.set(title=title, ylabel=unit)
        if trend[column].isna().all():
            texts.message(ax, "not recorded in these runs")
    drawn = trend[trend["group"].isin([*LAYER_GROUPS, "embedding"])]
    symmetric_log(axes[0], drawn["skewness"], low=-2, high=2)
    symmetric_log(axes[1], drawn["excess_kurtosis"], low=0, high=10)
    axes[-1].set_xlabel("iteration")
    most = 100 * drawn["near_zero"].max()
    if most > 20:  # most of an embedding is near zero: on one scale with it the layers would lie on the axis
        axes[2].set_yscale("symlog", linthresh=1, linscale=0.6)
        style.plain(axes[2].yaxis, [tick for tick in (0, 1, 3, 10, 30, 100) if tick <= 1.6 * most])
        axes[2].set_title("|g| < 0.001 σ₀ (log above 1 %)")
    for ax in axes[2:]:
        ax.set_ylim(bottom=0)
    note = texts.count_note(
        trend.groupby("variant")["seed"].nunique(),
        "Thick: mean over the matrices of the layers, weighted by size; bands: range over qkv, projection, "
        "fc1, fc2. Thin dotted: word embedding. "
        "σ₀: standard deviation of the same parameter's gradient at the first probe.",
        bars="mean over seeds",
        scale=results.name,
    )
    return texts.finish(fig, axes, finding(trend), note, style.handles(axes[0]))


def finding(trend: pd.DataFrame) -> str:
    """In words: how far from normal the layers' gradients are."""
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


def line(ax: Axes, rows: pd.DataFrame, column: str, factor: float, marker: str) -> None:
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
