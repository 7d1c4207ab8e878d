"""Entropies of the experts of a mixture, and what compressing the experts' gradients costs."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from paper_figures import inputs, style, texts

TABLES = ("moe/experts.csv", "moe/table.csv")
CAPTION = """\
**Mixture of experts.** A GPT with four experts per layer, two of them per token, on four data-parallel ranks of
which two share the experts. Left: entropy of the gradient of each expert's first matrix (fc1, nats, histogram),
one colour per layer and one line per expert, beside the mean over the attention's matrices; one uncompressed
run. Right: validation loss above the uncompressed run of the same seed against the bytes that a rank sends, as
a share of an fp32 all-reduce (of a bf16 one: twice that), with the experts' gradients compressed (filled) or
left dense (open); a dotted line joins the two. Which rank CQM would give each expert alone is in
``moe/fit.csv``."""
KIND = "fc1"


def draw(results: Path) -> Figure:
    """(a) entropy per expert over iterations, (b) gap to uncompressed training against bytes."""
    runs = inputs.read(results, "moe")
    fig, axes = style.figure(2, 1, height=5.6)
    entropies(axes[0], inputs.read(results, "moe", "experts.csv"))
    title = gaps(axes[1], runs)
    handles, labels = style.handles(*axes)
    for text, fill in (("experts compressed", "#888888"), ("experts dense", "white")):
        handles.append(Line2D([], [], color="#888888", marker="o", markerfacecolor=fill, linestyle=""))
        labels.append(text)
    seeds = runs[runs["status"] == "ok"].groupby("variant")["seed"].nunique()
    extra = ("(a): one uncompressed run, means over windows of 20 iterations", texts.untested(runs))
    return texts.finish(fig, axes, title, texts.count_note(seeds, *extra, scale=results.name), (handles, labels))


def entropies(ax: Axes, experts: pd.DataFrame) -> None:
    """One line per expert, in the colour of its layer; matrices that all ranks hold dashed, as their mean."""
    first = experts[experts["seed"] == experts["seed"].min()]
    rows = first[(first["kind"] == KIND) & first["expert"].notna()]
    layers = sorted(rows["layer"].unique())
    for colour, layer in zip(style.stage_colours(len(layers)), layers, strict=True):
        for index, (_, line) in enumerate(rows[rows["layer"] == layer].groupby("expert")):
            label = None if index else f"experts of layer {layer}"
            ax.plot(line["window"], line["entropy"], color=colour, linewidth=0.9, label=label)
    rest = first[first["expert"].isna()].groupby("window")["entropy"].mean()
    ax.plot(rest, color="#000000", linestyle="--", linewidth=1.2, label="attention, mean of all layers")
    apart = rows.groupby("window")["entropy"].agg(np.ptp).mean()
    ax.set(title=f"experts are {apart:.1f} nats apart\n(mean range)", xlabel="iteration")
    ax.set_ylabel(f"entropy of the gradient\n({KIND}, histogram, nats)")


def gaps(ax: Axes, runs: pd.DataFrame) -> str:
    """Mean and 95 % t interval over seeds; filled with the experts compressed, open with the experts dense. Returns
    what is seen, in words."""
    fine = runs[(runs["status"] == "ok") & (runs["method"] != "none")]
    costs = []
    for _, pair in fine.groupby(["method", "rank", "factor_dtype"], sort=False, dropna=False):
        look = style.look(pair.iloc[0])
        ends = []
        for compressed, rows in pair.groupby("compress_experts"):
            x, y = 100 * rows["bytes_ratio"].mean(), rows["gap_nats"].mean()
            ends.append((x, y))
            marks = look.marks(filled=bool(compressed)) | {"markersize": 6, "elinewidth": 0.8}
            half = style.half_interval(rows["gap_nats"])
            ax.errorbar(x, y, yerr=half, label=look.label if compressed else None, **marks)
        if len(ends) == 2:
            costs.append(ends[1][1] - ends[0][1])  # dense first
            ax.plot(*zip(*ends, strict=True), color=look.colour, linewidth=0.6, linestyle=":", zorder=0)
    ax.axhline(0, color="#444444", linewidth=0.6)
    ax.set(title="what it costs", xlabel=texts.SHARE_OF_BYTES, ylabel="validation loss above\nuncompressed (nats)")
    ax.set_xlim(0, 100 * fine["bytes_ratio"].max() * 1.1)
    if not costs:
        return "Entropies of experts, and what compressing them costs"
    span = f"{min(costs):+.2f} to {max(costs):+.2f} nats".replace("-", "−")
    return f"Compressing the experts' gradients, too, moves the mean loss by {span}"
