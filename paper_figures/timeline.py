"""Timeline of one training iteration per pipeline stage: work, communication and idle time, three ways to compress."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from paper_figures import inputs, style, texts
from paper_figures.stage_spread import LABELS, finding

TABLES = ("timeline.csv", "timeline_spans.csv", "stages.csv", "stages.json")
CAPTION = """\
**One iteration per pipeline stage.** Forward, backward, communication and idle time of each stage, without
compression, with equal ranks and with DAC, measured over links of injected delay. The iteration drawn is
the one whose length is nearest to the median; the shares of all iterations are in ``timeline.csv``."""
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


def draw(results: Path) -> Figure:
    """One panel per variant, one row per stage, for one replica; what is left blank is idle."""
    shares, spans, stages = (
        inputs.read_benchmark(results / name, "the stages benchmark", "bench-stages") for name in TABLES[:3]
    )
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
        panel(ax, rows, shares[drawn].set_index("stage")["idle"])
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


def panel(ax: Axes, spans: pd.DataFrame, idle: pd.Series) -> None:
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
