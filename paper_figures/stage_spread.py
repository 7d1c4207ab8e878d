"""When pipeline stages finish their gradient reductions: no compression, equal ranks and DAC."""

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
LOOKS = {name: style.FAMILIES[key] for name, key in (("none", "none"), ("equal", "powersgd"), ("dac", "edgc"))}


def draw(results: Path) -> Figure:
    """Finish times of the stages after the first of an iteration, and their spread; a dot is an iteration."""
    table, ends = (inputs.read_benchmark(results / name, "the stages benchmark", "bench-stages") for name in TABLES)
    table = table.set_index("variant")
    ends["finish_ms"] = 1e3 * ends["finish_seconds"]
    fig, axes = style.figure(2, 1, height=4.9)
    stages(axes[0], ends)
    spread(axes[1], ends, table)
    note = texts.count_note(
        table["iterations"],
        "Links slowed down by INJECTED delays, stage 0's most (stages.json); the rest is measured.",
        f"{ends['machine'].iloc[0]}; torch {ends['torch'].iloc[0]}",
        what="iterations",
        bars="bars: quartiles, dots: iterations",
    )
    words = finding(table)
    return texts.finish(fig, axes, words[0].upper() + words[1:], note)


def finding(table: pd.DataFrame) -> str:
    """In words, to go on in a sentence: how long after the first stage the last one ends, equal ranks and DAC."""
    equal, dac = (1e3 * table.loc[name, "spread_seconds"] for name in ("equal", "dac"))
    return f"the last stage ends {dac:.0f} ms after the first with DAC, {equal:.0f} ms with equal ranks"


def stages(ax: Axes, ends: pd.DataFrame) -> None:
    """Medians per stage, one line a variant."""
    medians = ends.groupby(["variant", "stage"])["finish_ms"].median()
    palette, markers = ({name: getattr(look, part) for name, look in LOOKS.items()} for part in ("colour", "marker"))
    look = {"dodge": 0.3, "markersize": 4, "linewidth": 1.2, "markers": list(markers.values()), "palette": palette}
    bars: dict[str, Any] = {"estimator": "median", "errorbar": ("pi", 50)}
    sns.pointplot(ends, x="stage", y="finish_ms", hue="variant", hue_order=list(LABELS), ax=ax, **look, **bars)
    handles, names = style.handles(ax)
    ax.legend(handles, [LABELS[name] for name in names], loc="best")
    ax.set(xlabel="pipeline stage (0: first)", ylabel="end of reductions\nafter the first (ms)")
    # Without compression stage 0 ends so much later that the others would lie on one line.
    top = 1.35 * medians.drop("none").max()
    ax.set_ylim(-0.06 * top, top)
    for stage, value in medians["none"][medians["none"] > top].items():
        line: dict[str, Any] = {"arrowstyle": "->", "color": LOOKS["none"].colour, "linewidth": 0.8}
        place = float(str(stage)) + 0.33, 0.97 * top
        ax.annotate(f"{value:.0f} ms", place, (8, -16), textcoords="offset points", arrowprops=line, va="top")
    ax.set_title("end of reductions, by stage")


def spread(ax: Axes, ends: pd.DataFrame, table: pd.DataFrame) -> None:
    """Last minus first stage, with the ratio to equal ranks in words."""
    spreads = ends.groupby(["variant", "iteration"])["finish_ms"].max()
    shift = np.random.default_rng(0)  # beside each other, the same at every drawing
    labels = []
    for place, (name, look) in enumerate(LOOKS.items()):
        dots = place + shift.uniform(-0.1, 0.1, len(spreads[name]))
        ax.plot(dots, spreads[name], "o", color=look.colour, alpha=0.4, markersize=3, markeredgewidth=0)
        row = table.loc[name]
        middle, low, high = 1e3 * row[["spread_seconds", "spread_q1", "spread_q3"]].astype(float)
        ax.errorbar(place, middle, yerr=[[middle - low], [high - middle]], **look.marks())
        words = f"{middle:.0f} ms\n{row['of_equal']:.2f} ×"
        texts.label_point(ax, words, (place, middle), (12, 0), fontsize=style.MIN_FONT)
        ranks = row["ranks"].split("/")
        labels.append(f"{LABELS[name]}\n{ranks[0] if len(set(ranks)) == 1 else row['ranks']}")
    ax.set_xticks(range(len(labels)), labels)
    ax.set_xlim(-0.5, len(labels) - 0.2)
    low = -0.06 * ax.get_ylim()[1]  # no marker and no text is cut off
    ax.set_ylim(2 * low, ax.get_ylim()[1] - low)
    title = f"DAC: {table.loc['dac', 'of_equal']:.2f} × equal ranks"
    ax.set(xlabel="ranks by stage", ylabel="last minus first stage (ms)", title=title)
