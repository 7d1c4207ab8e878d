"""The engine beside torch's hook on one machine: time, speed-up, and where the time goes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from paper_figures import inputs, style, texts

TABLES = ("engine.csv",)
CAPTION = """\
**The compression engine beside torch's PowerSGD hook**, on the gradients of a GPT, same rank, same error:
(a) time, (b) speed-up, (c) where the time goes. Medians over rounds, quartiles as bars."""
# What is compared here is who computes PowerSGD: torch is grey, ours looks as its factors do everywhere.
TORCH = style.Family("torch", "torch", "#8C8C8C", "X")
OURS = {
    dtype: style.FAMILIES[key]._replace(label=f"ours, {dtype} factors")
    for dtype, key in (("fp32", "powersgd"), *((dtype, f"factors_{dtype}") for dtype in ("bf16", "int8", "int4")))
}
ALLOCATORS = {"default": ("-", "default allocator"), "thp": ("--", "huge pages"), "kept": (":", "heap kept")}
PARTS = ("compress", "communicate", "decompress")
COPY: dict[str, Any] = {"color": "#999999", "linewidth": 0.9, "linestyle": (0, (1, 1))}


def draw(results: Path) -> Figure:
    """Medians over rounds with quartiles; processor time where one thread runs, else wall time."""
    table = inputs.read_benchmark(results / "engine.csv", "the engine benchmark", "bench")
    table = table[table["gradient_dtype"] == table["gradient_dtype"].iloc[0]]
    good = table[(table["status"] == "ok") & (table["products"] != "bf16")]
    alone = good[good["network"] == "none"]
    threads = sorted(alone["threads"].unique())
    first = alone[alone["allocator"] == alone["allocator"].iloc[0]]
    fig, axes = style.figure(3, 1, height=7.2)
    times(axes[0], alone[alone["threads"] == threads[0]])
    ratios = speedups(axes[1], first, threads)
    shares(axes[-1], good)
    for ax in axes[:-1]:
        style.log_x(ax, sorted(good["rank"].unique()), room=1.2)
        ax.set_xlabel("rank (log scale)")
    spread = f"{min(ratios):.1f} to {max(ratios):.1f} times" if ratios else ""
    title = f"Torch's hook takes {spread} as long as ours" if ratios else "The engine"
    note = texts.count_note(
        good["repeats"],
        f"{table['machine'].iloc[0]}; torch {table['torch'].iloc[0]}; caches of a core: {table['caches'].iloc[0]}",
        f"(a) {count_of(threads[0])}; (b) 1 is torch's time; medians of ratios within rounds",
        what="rounds",
        bars="bars: quartiles",
    )
    return texts.finish(fig, axes, title, note, style.handles(axes[0]))


def clock_of(rows: pd.DataFrame, threads: int) -> str:
    """Processor time is what one thread of a CPU is timed by."""
    return "cpu" if rows["device"].iloc[0] == "cpu" and threads == 1 else "wall"


def count_of(threads: int) -> str:
    return f"{threads} thread" if threads == 1 else f"{threads} threads"


def bars(
    ax: Axes, rows: pd.DataFrame, column: str, look: style.Family, label: str | None = None, line: str | None = None
) -> None:
    """Medians over the rank, with their quartiles."""
    rows = rows.sort_values("rank")
    quartiles = [rows[column] - rows[f"{column}_q1"], rows[f"{column}_q3"] - rows[column]]
    marks = look.marks(look.line if line is None else line)
    ax.errorbar(rows["rank"], rows[column], yerr=quartiles, elinewidth=0.8, label=label, **marks)


def times(ax: Axes, rows: pd.DataFrame) -> None:
    """Time of a step: torch under each allocator, ours, and a dense copy."""
    clock = clock_of(rows, rows["threads"].iloc[0])
    column = f"{clock}_ms"
    for allocator, (line, words) in ALLOCATORS.items():
        torch = rows[(rows["engine"] == "torch") & (rows["allocator"] == allocator)]
        if not torch.empty:
            bars(ax, torch, column, TORCH, f"{TORCH.label}, {words}", line)
    first = rows[rows["allocator"] == rows["allocator"].iloc[0]].sort_values("rank")
    for dtype, look in OURS.items():
        bars(ax, first[first["factor_dtype"] == dtype], column, look, look.label)
    copied = first[first["engine"] == "copy"]
    ax.plot(copied["rank"], copied[column], label="dense copy", **COPY)
    style.log_y(ax)
    ax.set_ylabel(f"{'processor' if clock == 'cpu' else 'wall'} time (ms, log scale)")
    ax.set_title("compress + decompress")


def speedups(ax: Axes, first: pd.DataFrame, threads: Sequence[int]) -> list[float]:
    """Torch's time over ours with fp32 factors, each allocator of torch's, per number of threads; returns them all."""
    ours = first[first["factor_dtype"] == "fp32"]
    ratios: list[float] = []
    for count, marker in zip(threads, "oDsv", strict=False):
        rows = ours[ours["threads"] == count]
        look = style.Family("", "", "#000000" if count == threads[0] else "#888888", marker)
        for allocator, (line, words) in ALLOCATORS.items():
            other = "" if allocator == first["allocator"].iloc[0] else f"over_{allocator}_"
            column = f"speedup_{other}{clock_of(rows, count)}"
            if column in rows and rows[column].notna().any():
                bars(ax, rows, column, look, f"{words.removesuffix(' allocator')}, {count_of(count)}", line)
                ratios += list(rows[column].dropna())
    ax.axhline(1, color="#444444", linewidth=0.6)
    ax.set(ylabel="torch's time / ours (no unit)", title="speed-up")
    texts.legend_below(ax, 0.45, 0.26)
    return ratios


def shares(ax: Axes, good: pd.DataFrame) -> None:
    """Parts of the wall time of a step with two ranks and gloo, at the rank nearest 32, over loopback."""
    gloo = good[good["network"] == "gloo"]
    ax.set(xlabel="wall time of a step (ms)", ylabel="engine")
    if gloo.empty:
        texts.message(ax, "two ranks were not timed")
        return
    rank = min(gloo["rank"].unique(), key=lambda value: abs(value - 32))
    gloo = gloo[gloo["rank"] == rank]
    engines = {"copy": "uncompressed", "torch": "torch"}
    names = [engines.get(row["engine"], f"ours, {row['factor_dtype']}") for _, row in gloo.iterrows()]
    left = pd.Series(0.0, gloo.index)
    patches = []
    for part, colour in zip(PARTS, sns.color_palette("colorblind", len(PARTS)), strict=True):
        ax.barh(names, gloo[f"{part}_ms"], left=left, color=colour)
        left += gloo[f"{part}_ms"]
        patches.append(Patch(color=colour, label=part))
    hatch: dict[str, Any] = {"edgecolor": "black", "hatch": "////"}
    ax.barh(names, gloo["pack_ms"], color="none", height=0.35, linewidth=0.4, **hatch)
    ax.invert_yaxis()  # from the top down
    patches.append(Patch(facecolor="none", label="of which packing", **hatch))
    texts.legend_below(ax, 0.4, 0.26, (patches, [*PARTS, "of which packing"]))
    ax.set_title(f"two ranks, gloo, rank {rank}")
