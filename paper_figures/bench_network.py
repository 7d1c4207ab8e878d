"""Seconds of a training step over links of limited bandwidth, method by method."""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import inputs, names, style, texts
from paper_figures.bench import TORCH

TABLES = ("network.csv",)
CAPTION = """\
**Training steps over a link of limited bandwidth**: two ranks in network namespaces, each method beside
torch's hook and uncompressed averaging in the same round. Medians over rounds, quartiles as bars."""
LOOKS = {
    "compute": style.Family("compute", "no communication", "#999999", "|"),
    "dense": style.FAMILIES["none"],
    "bf16": style.FAMILIES["bf16"],
    "torch": TORCH,
}
LABELS = {"compute": "no communication", "dense": "no compression", "dense, one bucket": "no compression, one bucket"}


def draw(results: Path) -> Figure:
    """A panel per limit, the slowest link first; medians over rounds with quartiles."""
    table = inputs.read_benchmark(results / "network.csv", "the network benchmark", "bench-network (root only)")
    rates = sorted(table["mbit_per_s"].unique(), key=lambda rate: rate or float("inf"))
    methods = list(dict.fromkeys(table["method"]))
    fig, axes = style.figure(1, len(rates), height=0.3 * len(methods) + 1.4, sharey=True)
    for ax, rate in zip(axes, rates, strict=True):
        panel(ax, table[table["mbit_per_s"] == rate].set_index("method"), methods)
        ax.set(title=f"{rate:g} Mbit/s" if rate else "no limit", xlabel="s per step")
    names.name_rows(fig, axes, [label(name) for name in methods])
    note = texts.count_note(
        table.loc[table["status"] == "ok", "rounds"],
        "two ranks training a small GPT (sizes: network.json); dashed: no compression, DDP's own buckets; "
        "dotted: no communication",
        f"{table['machine'].iloc[0]}; torch {table['torch'].iloc[0]}",
        what="rounds",
        bars="bars: quartiles",
    )
    return texts.finish(fig, axes, finding(table, rates), note)


def label(method: str) -> str:
    """A row's name for people: who computes PowerSGD, its rank and its factors."""
    who, _, rest = method.partition(" r")
    if who in ("edgc", "torch") and rest:
        rank, _, more = rest.replace(",", "").partition(" ")
        return f"PowerSGD rank {rank} {more}".strip() + (" (ours)" if who == "edgc" else " (torch's hook)")
    return LABELS.get(method, method)


def finding(table: pd.DataFrame, rates: list[float]) -> str:
    """In words: the quickest method over the slowest link, and whether any beats dense averaging without a limit."""
    fine = table[(table["status"] == "ok") & (table["hook"] != "compute")]
    slow, free = (fine[fine["mbit_per_s"] == rate] for rate in (rates[0], rates[-1]))
    text = f"Quickest at {rates[0]:g} Mbit/s: {label(str(slow.loc[slow['seconds'].idxmin(), 'method']))}."
    if rates[-1] == 0:
        low_rank = free[~free["hook"].isin(["dense", "bf16"])]
        wins = int((low_rank["speedup_over_dense_q1"] > 1).sum())
        text += f"\nWithout a limit {wins} of {len(low_rank)} low ranks beat no compression."
    return text


def panel(ax: Axes, rows: pd.DataFrame, methods: list[str]) -> None:
    """One dot a method; a method that failed says so in its line."""
    for place, name in enumerate(methods):
        row = rows.loc[name]
        look = LOOKS.get(row["hook"]) or style.by_name(f"powersgd_{row['factor_dtype']}")
        if row["status"] == "ok":
            error = [[row["seconds"] - row["seconds_q1"]], [row["seconds_q3"] - row["seconds"]]]
            ax.errorbar(row["seconds"], place, xerr=error, markersize=5, **look.marks())
        else:
            beside = ax.get_yaxis_transform()
            texts.outline(ax.annotate("failed", (0.06, place), xycoords=beside, va="center", color=look.colour))
    for name, line in (("dense", (0, (4, 2))), ("compute", (0, (1, 1)))):
        if name in rows.index:
            ax.axvline(rows.loc[name, "seconds"], color="#444444", linewidth=0.8, linestyle=line, zorder=0)
    ax.set_xlim(0, 1.08 * rows["seconds_q3"].max())
