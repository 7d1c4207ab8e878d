"""Pipeline stages over links of injected delay: when each ends its gradient reductions, and one iteration."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from paper_figures import inputs, style, texts

TABLES = {
    "stage_spread": ("stages.csv", "stages_iterations.csv"),
    "timeline": ("timeline.csv", "timeline_spans.csv", "stages.csv", "stages.json"),
}
CAPTION = {
    "stage_spread": """\
**Stage alignment (DAC).** When the pipeline stages finish averaging their gradients, measured in training
steps of a small model over links of injected delay, stage 0's the slowest: (a) by stage, after the first
one to finish; (b) the spread between the last stage and the first, and in ``×`` its ratio to that of equal
ranks on all stages (below one: DAC aligns better). A smaller spread is not yet a shorter step: step times
are ``step_seconds`` in ``stages.csv``.""",
    "timeline": """\
**One iteration per pipeline stage.** Forward, backward, communication and idle time of each stage, without
compression, with equal ranks and with DAC, measured over links of injected delay. The iteration drawn is
the one whose length is nearest to the median; the shares of all iterations are in ``timeline.csv``.""",
}
LABELS = {"none": "no compression", "equal": "equal ranks", "dac": "DAC"}
LOOKS = {name: style.FAMILIES[key] for name, key in (("none", "none"), ("equal", "powersgd"), ("dac", "edgc"))}
# Pale for work, strong for what communication costs.
KINDS = {
    "forward": ("forward", "#A6CEE3"),
    "backward": ("backward", "#B2DF8A"),
    "pipeline": ("pipeline messages", "#E69F00"),
    "compress": ("compress, decompress", "#AA3377"),
    "reduce": ("gradient reduction (delayed link)", "#D55E00"),
    "embedding": ("embedding sync", "#0072B2"),
    "optimizer": ("optimizer", "#888888"),
}


def read(results: Path, names: Sequence[str]) -> list[pd.DataFrame]:
    return [inputs.read_benchmark(results / name, "the stages benchmark", "bench-stages") for name in names]


def stage_spread(results: Path) -> Figure:
    """Finish times of the stages after the first of an iteration, and their spread; a dot is an iteration."""
    table, ends = read(results, TABLES["stage_spread"])
    table = table.set_index("variant")
    ends["finish_ms"] = 1e3 * ends["finish_seconds"]
    fig, axes = style.figure(2, 1, height=4.9)
    ends_by_stage(axes[0], ends)
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
    """End of a sentence: how long after the first stage the last one ends, equal ranks and DAC."""
    equal, dac = (1e3 * table.loc[name, "spread_seconds"] for name in ("equal", "dac"))
    return f"the last stage ends {dac:.0f} ms after the first with DAC, {equal:.0f} ms with equal ranks"


def ends_by_stage(ax: Axes, ends: pd.DataFrame) -> None:
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


def timeline(results: Path) -> Figure:
    """One panel per variant, one row per stage, for one replica; what is left blank is idle."""
    shares, spans, stages = read(results, TABLES["timeline"][:3])
    counted = sorted(set(shares.groupby("variant")["iteration"].nunique()))
    machine = f"{spans['machine'].iloc[0]}, shared by {{}} processes; torch {spans['torch'].iloc[0]}"
    stages = stages.set_index("variant")
    settings = json.loads((results / "stages.json").read_text())["settings"]
    spans[["start", "end"]] *= 1e3
    shares, spans = shares[shares["replica"] == 0], spans[spans["replica"] == 0]
    variants = [name for name in LABELS if name in set(spans["variant"])]
    height = 1.7 + len(variants) * (0.42 + 0.2 * spans["stage"].nunique())
    fig, axes = style.figure(len(variants), 1, height=height, sharex=True)
    for ax, variant in zip(axes, variants, strict=True):
        rows = spans[spans["variant"] == variant]
        drawn = (shares["variant"] == variant) & (shares["iteration"] == rows["iteration"].iloc[0])
        boxes_of_stages(ax, rows, shares[drawn].set_index("stage")["idle"])
        ax.set_title(f"{LABELS[variant]}, {_ranks(str(stages.loc[variant, 'ranks']))}: {rows['end'].max():.0f} ms")
    axes[0].set_xlim(0, float(spans["end"].max()))
    axes[-1].set_xlabel("time in the iteration (ms)")
    patches = [Patch(color=colour) for _, colour in KINDS.values()] + [Patch(fc="white", ec="#888888", lw=0.5)]
    legend = patches, [*(label for label, _ in KINDS.values()), "idle"]
    slow, fast = settings["megabytes"] / settings["slowdown"], settings["megabytes"]
    note = (
        f"Measured; links slowed down by INJECTED delays: stage 0 to {slow:g} MB/s, the others to {fast:g} MB/s. "
        f"One replica of {settings['data']}. "
        f"Of {'/'.join(map(str, counted))} iterations the one with the median duration; ticks: end of each stage's "
        f"reduction. {machine.format(settings['pipeline'] * settings['data'])}"
    )
    title = f"Links of injected delay: {finding(stages)}"
    return texts.finish(fig, axes, title, note, legend, columnspacing=0.8)


def boxes_of_stages(ax: Axes, spans: pd.DataFrame, idle: pd.Series) -> None:
    """Rows of boxes, stage 0 on top; the idle share at the right edge, the end of a stage's reduction as a tick."""
    for kind, (_, colour) in KINDS.items():
        for stage, rows in spans[spans["kind"] == kind].groupby("stage"):
            boxes = list(zip(rows["start"], rows["end"] - rows["start"], strict=True))
            ax.broken_barh(boxes, (stage - 0.38, 0.76), facecolors=colour, edgecolor="white", linewidth=0.15)
    for stage, end in spans[spans["kind"].isin(("reduce", "compress"))].groupby("stage")["end"].max().items():
        ax.plot([end, end], [stage - 0.5, stage + 0.5], color="black", linewidth=1.2)
    stages = sorted(spans["stage"].unique())
    beside: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "va": "center", "fontsize": style.MIN_FONT}
    for stage in stages:
        ax.text(1.01, stage, f"{100 * idle[stage]:.0f} % idle", **beside)
    ax.axvline(float(spans["end"].max()), color="#888888", linewidth=0.6, linestyle=":")
    ax.set_yticks(stages, [str(stage) for stage in stages])
    ax.set(ylim=(len(stages) - 0.4, -0.6), ylabel="pipeline stage")
    ax.grid(visible=False, axis="y")


def _ranks(ranks: str) -> str:
    parts = ranks.split("/")
    if set(parts) == {"dense"}:
        return "all gradients dense"
    return f"rank {parts[0]} on every stage" if len(set(parts)) == 1 else f"ranks {', '.join(parts)} by stage"
