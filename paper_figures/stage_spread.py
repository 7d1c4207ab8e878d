"""When pipeline stages finish their gradient reductions: no compression, equal ranks and DAC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import inputs, style, texts

TABLES = ("stages.csv", "stages_iterations.csv")
CAPTION = """\
**Stage alignment (DAC).** When the pipeline stages finish averaging their gradients, measured in training
steps of a small model over links of injected delay, stage 0's the slowest: (a) by stage, after the first
one to finish; (b) the spread between the last stage and the first, and in ``×`` its ratio to that of equal
ranks on all stages (below one: DAC aligns better). A smaller spread is not yet a shorter step: step times
are ``step_seconds`` in ``stages.csv``."""
LABELS = {"none": "no compression", "equal": "equal ranks", "dac": "DAC"}
FAMILY = {"none": "none", "equal": "powersgd", "dac": "edgc"}
COLOURS = {name: style.FAMILIES[family].colour for name, family in FAMILY.items()}


def draw(results: Path) -> Figure:
    """Finish times of the stages after the first of an iteration, and their spread; a dot is an iteration."""
    table, found = (inputs.read_benchmark(results / name, "the stages benchmark", "bench-stages") for name in TABLES)
    table = table.set_index("variant")
    found["finish_ms"] = 1e3 * found["finish_seconds"]
    fig, axes = style.figure(2, 1, height=4.9)
    stages(axes[0], found)
    spread(axes[1], found, table)
    texts.letter(axes)
    words = seen(table)
    texts.headline(fig, words[0].upper() + words[1:])
    texts.annotate(
        fig,
        list(table["iterations"]),
        what="iterations",
        bars="bars: quartiles, dots: iterations",
        extra="Links slowed down by INJECTED delays, stage 0's most (stages.json); the rest is measured."
        f"\n{found['machine'].iloc[0]}; torch {found['torch'].iloc[0]}",
    )
    return fig


def seen(table: pd.DataFrame) -> str:
    """In words, to go on in a sentence: how long after the first stage the last one ends, equal ranks and DAC."""
    equal, dac = (1e3 * table.loc[name, "spread_seconds"] for name in ("equal", "dac"))
    return f"the last stage ends {dac:.0f} ms after the first with DAC, {equal:.0f} ms with equal ranks"


def stages(ax: Axes, found: pd.DataFrame) -> None:
    """Medians per stage, one line a variant."""
    reach = found[found["variant"] != "none"].groupby(["variant", "stage"])["finish_ms"].median().max()
    sns.pointplot(
        found,
        x="stage",
        y="finish_ms",
        hue="variant",
        hue_order=list(LABELS),
        palette=COLOURS,
        estimator="median",
        errorbar=("pi", 50),
        markers=[style.FAMILIES[family].marker for family in FAMILY.values()],
        dodge=0.3,
        markersize=4,
        linewidth=1.2,
        ax=ax,
    )
    ax.legend(*_renamed(ax), loc="best")
    ax.set(xlabel="pipeline stage (0: first)", ylabel="end of reductions\nafter the first (ms)")
    # Without compression stage 0 ends so much later that the others would lie on one line.
    most = found[found["variant"] == "none"].groupby("stage")["finish_ms"].median()
    top = 1.35 * reach
    ax.set_ylim(-0.06 * top, top)
    for stage, value in most[most > top].items():
        line: dict[str, Any] = {"arrowstyle": "->", "color": COLOURS["none"], "linewidth": 0.8}
        at = float(str(stage)) + 0.33, 0.97 * top
        ax.annotate(f"{value:.0f} ms", at, (8, -16), textcoords="offset points", arrowprops=line, va="top")
    ax.set_title("end of reductions, by stage")


def spread(ax: Axes, found: pd.DataFrame, table: pd.DataFrame) -> None:
    """Last minus first stage, with the ratio to equal ranks in words."""
    spreads = found.groupby(["variant", "iteration"], as_index=False)["finish_ms"].max()
    shift = np.random.default_rng(0)  # beside each other, the same at every drawing
    for place, name in enumerate(LABELS):
        mark = style.FAMILIES[FAMILY[name]].marker
        own = spreads.loc[spreads["variant"] == name, "finish_ms"]
        dots = place + shift.uniform(-0.1, 0.1, len(own))
        ax.plot(dots, own, "o", color=COLOURS[name], alpha=0.4, markersize=3, markeredgewidth=0)
        row = 1e3 * table.loc[name, ["spread_seconds", "spread_q1", "spread_q3"]].astype(float)
        middle, low, high = row
        bars = [[middle - low], [high - middle]]
        ax.errorbar(place, middle, yerr=bars, color=COLOURS[name], marker=mark, linestyle="")
        ratio = ax.annotate(
            f"{middle:.0f} ms\n{table.loc[name, 'of_equal']:.2f} ×",
            (place, middle),
            xytext=(12, 0),
            textcoords="offset points",
            va="center",
            fontsize=style.MIN_FONT,
        )
        texts.outline(ratio)
    ax.set_xticks(range(len(LABELS)), [f"{LABELS[name]}\n{_shown(table.loc[name, 'ranks'])}" for name in LABELS])
    ax.set_xlim(-0.5, len(LABELS) - 0.2)
    low = -0.06 * ax.get_ylim()[1]  # no marker and no text is cut off
    ax.set_ylim(2 * low, ax.get_ylim()[1] - low)
    of_equal = table.loc["dac", "of_equal"]
    ax.set(xlabel="ranks by stage", ylabel="last minus first stage (ms)", title=f"DAC: {of_equal:.2f} × equal ranks")


def _shown(ranks: str) -> str:
    parts = ranks.split("/")
    return parts[0] if len(set(parts)) == 1 else "/".join(parts)


def _renamed(ax: Axes) -> tuple[list[Any], list[str]]:
    handles, labels = style.handles(ax)
    return handles, [LABELS[label] for label in labels]
