"""The engine beside torch's hook on one machine: time, speed-up, distance to the floor, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from paper_figures import inputs, style, texts
from paper_figures.families import FAMILIES, Family, Line

TABLES = ("engine.csv",)
CAPTION = """\
**The compression engine beside torch's PowerSGD hook**, on the gradients of a GPT, same rank, same error:
(a) time, (b) speed-up, (c) time over what this machine needs for the products and passes alone, (d) where
the time goes. Medians over rounds, quartiles as bars."""
# What is compared here is who computes PowerSGD: torch is grey, ours looks as its factors do everywhere.
TORCH = Family("torch", "torch", "#8C8C8C", "X")
OURS = {
    dtype: FAMILIES[key]._replace(label=f"ours, {dtype} factors")
    for dtype, key in (("fp32", "powersgd"), *((dtype, f"factors_{dtype}") for dtype in ("bf16", "int8", "int4")))
}
ALLOCATORS = {"default": "-", "thp": "--", "kept": ":"}
ALLOCATOR_LABELS = {"default": "default allocator", "thp": "huge pages", "kept": "heap kept"}
PARTS = {"compress": "compress", "communicate": "communicate", "decompress": "decompress"}


def draw(results: Path) -> Figure:
    """Medians over rounds with quartiles; processor time where one thread runs, else wall time."""
    table = inputs.read_benchmark(results / "engine.csv", "the engine benchmark", "bench")
    table = table[table["gradient_dtype"] == table["gradient_dtype"].iloc[0]]
    good = table[(table["status"] == "ok") & (table["products"] != "bf16")]
    alone = good[good["network"] == "none"]
    threads = sorted(alone["threads"].unique())
    one = alone[alone["threads"] == threads[0]]
    clock = "cpu" if (one["device"].iloc[0] == "cpu" and threads[0] == 1) else "wall"
    fig, axes = style.figure(4, 1, height=9.6)
    times(axes[0], one, clock)
    found = speedups(axes[1], alone, threads)
    floors(axes[2], one)
    shares(axes[3], good)
    for ax in axes[:3]:
        ax.set(xlabel="rank (log scale)", xscale="log")
        style.plain(ax.xaxis, sorted(good["rank"].unique()))
        ax.set_xlim(good["rank"].min() / 1.2, good["rank"].max() * 1.2)
    texts.letter(axes)
    texts.title_legend(fig, *style.handles(axes[0], axes[2]), seen(found), columnspacing=1.0)
    machine = table["machine"].iloc[0]
    texts.annotate(
        fig,
        list(good["repeats"].astype(int)),
        what="rounds",
        bars="bars: quartiles",
        extra=f"{machine}; torch {table['torch'].iloc[0]}; caches of a core: {table['caches'].iloc[0]}"
        f"\n(a), (c) {thread_count(threads[0])}; (b) 1 is torch's time; "
        f"medians of ratios within rounds",
    )
    return fig


def seen(found: list[float]) -> str:
    """In words: how many times as long torch's hook takes as ours, over ranks, threads and torch's allocators."""
    return f"Torch's hook takes {min(found):.1f} to {max(found):.1f} times as long as ours" if found else "The engine"


def thread_count(count: int) -> str:
    return f"{count} thread" if count == 1 else f"{count} threads"


def bars(ax: Axes, rows: pd.DataFrame, column: str, look: Family, label: str | None, line: Line | None = None) -> None:
    """Medians over the rank, with their quartiles."""
    rows = rows.sort_values("rank")
    middle = rows[column]
    quartiles = [middle - rows[f"{column}_q1"], rows[f"{column}_q3"] - middle]
    marks = look.marks(look.line if line is None else line)
    ax.errorbar(rows["rank"], middle, yerr=quartiles, elinewidth=0.8, label=label, **marks)


def times(ax: Axes, one: pd.DataFrame, clock: str) -> None:
    """Time of a step: torch under each allocator, ours, and what neither can go below."""
    column = f"{clock}_ms"
    for allocator, line in ALLOCATORS.items():
        rows = one[(one["engine"] == "torch") & (one["allocator"] == allocator)]
        if not rows.empty:
            label = f"{TORCH.label}, {ALLOCATOR_LABELS[allocator]}"
            bars(ax, rows, column, TORCH, label, line)
    first = one[one["allocator"] == one["allocator"].iloc[0]]
    for dtype, look in OURS.items():
        bars(ax, first[first["factor_dtype"] == dtype], column, look, look.label)
    base = first[first["factor_dtype"] == "fp32"].sort_values("rank")
    ax.plot(base["rank"], base["floor_ms"], color="#444444", linewidth=0.9, linestyle=(0, (4, 2)), label="floor")
    copied = first[first["engine"] == "copy"].sort_values("rank")
    thin: dict[str, Any] = {"color": "#999999", "linewidth": 0.9, "linestyle": (0, (1, 1))}
    ax.plot(copied["rank"], copied[column], label="dense copy", **thin)
    ax.set_yscale("log")
    style.plain(ax.yaxis)
    ax.set_ylabel(f"{'processor' if clock == 'cpu' else 'wall'} time (ms, log scale)")
    ax.set_title("compress + decompress")


def speedups(ax: Axes, alone: pd.DataFrame, threads: Sequence[int]) -> list[float]:
    """Torch's time over ours with fp32 factors, each allocator of torch's, per number of threads; returns them all."""
    first = alone[alone["allocator"] == alone["allocator"].iloc[0]]
    mine = first[first["factor_dtype"] == "fp32"]
    found: list[float] = []
    for count, marker in zip(threads, "oDsv", strict=False):
        rows = mine[mine["threads"] == count]
        clock = "cpu" if (rows["device"].iloc[0] == "cpu" and count == 1) else "wall"
        for allocator, line in ALLOCATORS.items():
            column = f"speedup_{clock}" if allocator == first["allocator"].iloc[0] else ""
            column = column or f"speedup_over_{allocator}_{clock}"
            if column in rows and rows[column].notna().any():
                look = Family("", "", "#000000" if count == threads[0] else "#888888", marker)
                bars(
                    ax,
                    rows,
                    column,
                    look,
                    f"{ALLOCATOR_LABELS[allocator].removesuffix(' allocator')}, {thread_count(count)}",
                    line,
                )
                found += list(rows[column].dropna())
    ax.axhline(1, color="#444444", linewidth=0.6)
    ax.set(ylabel="torch's time / ours (no unit)", title="speed-up")
    ax.legend(*style.handles(ax), loc="upper center", bbox_to_anchor=(0.45, -0.26), ncols=2, columnspacing=0.8)
    return found


def floors(ax: Axes, one: pd.DataFrame) -> None:
    """Time over the floor."""
    first = one[one["allocator"] == one["allocator"].iloc[0]]
    bars(ax, first[first["engine"] == "torch"], "ratio_to_floor", TORCH, None)
    for dtype, look in OURS.items():
        bars(ax, first[first["factor_dtype"] == dtype], "ratio_to_floor", look, look.label)
    ax.axhline(1, color="#444444", linewidth=0.9, linestyle=(0, (4, 2)))
    ax.set(ylabel="time / floor (no unit)", title="distance to the floor")


def shares(ax: Axes, good: pd.DataFrame) -> None:
    """Where the wall time of a step goes with two ranks and gloo, at the rank nearest 32, over loopback."""
    gloo = good[good["network"] == "gloo"]
    if gloo.empty:
        texts.message(ax, "two ranks were not timed")
        ax.set(xlabel="wall time of a step (ms)", ylabel="engine")
        return
    rank = min(gloo["rank"].unique(), key=lambda value: abs(value - 32))
    gloo = gloo[gloo["rank"] == rank]
    names, rows = [], []
    for _, row in gloo.iterrows():
        names.append({"copy": "uncompressed", "torch": "torch"}.get(row["engine"], f"ours, {row['factor_dtype']}"))
        rows.append(row)
    colours = sns.color_palette("colorblind", len(PARTS))
    left = [0.0] * len(rows)
    for (part, label), colour in zip(PARTS.items(), colours, strict=True):
        values = [float(row[f"{part}_ms"]) for row in rows]
        ax.barh(names, values, left=left, color=colour, label=label)
        left = [start + value for start, value in zip(left, values, strict=True)]
    packs = [float(row["pack_ms"]) for row in rows]
    ax.barh(names, packs, left=0, color="none", edgecolor="black", hatch="////", linewidth=0.4, height=0.35)
    ax.invert_yaxis()  # from the top down
    patches = [Patch(color=colour, label=label) for colour, label in zip(colours, PARTS.values(), strict=True)]
    patches.append(Patch(facecolor="none", edgecolor="black", hatch="////", label="of which packing"))
    ax.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.4, -0.26), ncols=2, columnspacing=0.8)
    ax.set(xlabel="wall time of a step (ms)", ylabel="engine")
    ax.set_title(f"two ranks, gloo, rank {rank}")
