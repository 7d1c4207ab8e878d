"""Timeline of one training iteration per pipeline stage: work, communication and idle time, three ways to compress."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from paper_figures import inputs, style, texts
from paper_figures.stage_spread import LABELS, seen

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
    stages = stages.set_index("variant")
    ranks = stages["ranks"]
    settings = json.loads((results / "stages.json").read_text())["settings"]
    spans[["start", "end"]] *= 1e3
    variants = [name for name in LABELS if name in set(spans["variant"])]
    height = 1.7 + len(variants) * (0.42 + 0.2 * spans["stage"].nunique())
    fig, axes = style.figure(len(variants), 1, height=height, sharex=True)
    last = float(spans["end"].max())
    for ax, variant in zip(axes, variants, strict=True):
        chosen = spans[(spans["variant"] == variant) & (spans["replica"] == 0)]
        of_variant = shares[(shares["variant"] == variant) & (shares["replica"] == 0)]
        panel(ax, chosen, of_variant[of_variant["iteration"] == chosen["iteration"].iloc[0]], last)
        ax.set_title(f"{LABELS[variant]}, {_ranks(str(ranks[variant]))}: {chosen['end'].max():.0f} ms")
    axes[-1].set_xlabel("time in the iteration (ms)")
    texts.letter(axes)
    shown = [Patch(color=colour, label=label) for label, colour in KINDS.values()]
    shown.append(Patch(fc="white", ec="#888888", lw=0.5, label="idle"))
    title = f"Links of injected delay: {seen(stages)}"
    texts.title_legend(fig, shown, [str(patch.get_label()) for patch in shown], title, columnspacing=0.8)
    counted = sorted(set(shares.groupby("variant")["iteration"].nunique()))
    slow, fast = settings["megabytes"] / settings["slowdown"], settings["megabytes"]
    texts.note(
        fig,
        f"Measured; links slowed down by INJECTED delays: stage 0 to {slow:g} MB/s, the others to {fast:g} MB/s. "
        f"One replica of {settings['data']}. "
        f"Of {'/'.join(map(str, counted))} iterations the one with the median duration; ticks: end of each stage's "
        "reduction. "
        f"{spans['machine'].iloc[0]}, shared by {settings['pipeline'] * settings['data']} processes; "
        f"torch {spans['torch'].iloc[0]}",
    )
    return fig


def panel(ax: Axes, spans: pd.DataFrame, shares: pd.DataFrame, last: float) -> None:
    """Rows of boxes, stage 0 on top; the idle share at the right edge, the end of a stage's reduction as a tick."""
    stages = sorted(spans["stage"].unique())
    for kind, (_, colour) in KINDS.items():
        for stage, own in spans[spans["kind"] == kind].groupby("stage"):
            boxes = list(zip(own["start"], own["end"] - own["start"], strict=True))
            ax.broken_barh(boxes, (stage - 0.38, 0.76), facecolors=colour, edgecolor="white", linewidth=0.15)
    ends = spans[spans["kind"].isin(("reduce", "compress"))].groupby("stage")["end"].max()
    for stage, end in ends.items():
        ax.plot([end, end], [stage - 0.5, stage + 0.5], color="black", linewidth=1.2)
    idle = shares.set_index("stage")["idle"]
    for stage in stages:
        text = f"{100 * idle[stage]:.0f} % idle"
        ax.text(1.01, stage, text, transform=ax.get_yaxis_transform(), va="center", fontsize=style.MIN_FONT)
    ax.axvline(float(spans["end"].max()), color="#888888", linewidth=0.6, linestyle=":")
    ax.set_yticks(stages, [str(stage) for stage in stages])
    ax.set(ylim=(len(stages) - 0.4, -0.6), xlim=(0, last), ylabel="pipeline stage")
    ax.grid(visible=False, axis="y")


def _ranks(ranks: str) -> str:
    parts = ranks.split("/")
    if set(parts) == {"dense"}:
        return "all gradients dense"
    return f"rank {parts[0]} on every stage" if len(set(parts)) == 1 else f"ranks {', '.join(parts)} by stage"
