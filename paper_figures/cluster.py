"""The paper's clusters, simulated: time of one step's gradient communication against the unknown network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from edgc.errors import UserError
from paper_figures import inputs, style, texts
from paper_figures.families import by_name

TABLES = {
    "gpt2_12p1b_h100": (
        "gpt2_12p1b_h100/table.csv",
        "gpt2_12p1b_h100/steps.csv",
        "gpt2_12p1b_h100/traces.csv",
        "gpt2_12p1b_h100/summary.json",
    ),
    "gpt2_2p5b_v100": (
        "gpt2_2p5b_v100/table.csv",
        "gpt2_2p5b_v100/steps.csv",
        "gpt2_2p5b_v100/traces.csv",
        "gpt2_2p5b_v100/summary.json",
    ),
}
WORDS = {
    "gpt2_12p1b_h100": {
        "title": "GPT2-12.1B on 64 H100",
        "study": "gpt2_12p1b_h100",
        "claim": "The dotted and the dashed line are the paper's savings: where EDGC's curve crosses one, that number "
        "would follow from this model",
    },
    "gpt2_2p5b_v100": {
        "title": "GPT2-2.5B on 32 V100",
        "study": "gpt2_2p5b_v100",
        "claim": "What the paper saves with this model is not known; its largest savings are taken for those of the "
        "12.1B model",
    },
}
CAPTION = """\
**{title}, simulated.** Nothing here was measured; every input and its source is in
``{study}/summary.json``. (a) Time of one step's data-parallel gradient communication, compression
included, on the slowest stage, for a range of network bandwidths, because the paper does not give its
network. (b) What each method saves of it against uncompressed fp32. (c), (d) What it saves of a whole step:
1F1B with computation at an assumed share of the device's peak, reductions after backward or beside it. {claim}. Thin
lines: EDGC with the ranks that its controller takes when it is told the entropy of a recorded run (``traces.csv``)."""
SAVED = "reduction_communication_percent"  # what the paper's claim and ours are about
NONE, EDGC, BAND = "none", "edgc", ("edgc_r_min", "edgc_r_max")
TOGETHER = 12.0  # percentage points
ROOM = 12.0  # percentage points that a text below a line needs above the axis
OPEN = ":"  # the highest fixed rank: dotted, open markers; the others are in the table
TRACE = "#7A2E00"  # darker than EDGC with the mean rank, which is assumed


def _lines(table: pd.DataFrame) -> list[tuple[str, str, Any]]:
    """(method, label, line style) of what is drawn, uncompressed first."""
    ranks = sorted(int(m.removeprefix("powersgd_r")) for m in table["method"].unique() if m.startswith("powersgd_r"))
    found: list[tuple[str, str, Any]] = [(NONE, "uncompressed fp32", "-"), ("bf16", "bf16", "--")]
    found += [("int8", "int8", "--"), ("int4", "int4", OPEN)]
    fixed = [(f"powersgd_r{ranks[-1]}", f"PowerSGD r={ranks[-1]}", OPEN)]  # lower ones lie on the next line
    quantised = next(m for m in table["method"].unique() if m.startswith("factors_int8_r"))
    fixed.append((quantised, f"PowerSGD r={quantised.rpartition('_r')[2]} int8", "-"))
    return [*found, *fixed, ("topk", "top-k 1 %", "-."), (EDGC, "EDGC, mean rank", "-")]


def _series(table: pd.DataFrame, method: str, column: str) -> tuple[list[float], list[float]]:
    rows = table[table["method"] == method].sort_values("gbits_per_second")
    return list(rows["gbits_per_second"]), list(rows[column])


def _draw_traces(ax: Axes, traces: pd.DataFrame, column: str) -> None:
    """A thin line for each recorded run whose entropy the controller was told."""
    runs = traces.groupby("entropy", sort=False)
    for _, rows in runs:
        rows = rows.sort_values("gbits_per_second")
        ax.plot(
            rows["gbits_per_second"],
            rows[column],
            color=TRACE,
            linewidth=0.6,
            label=f"EDGC, recorded entropy ({len(runs)} runs)",
        )


def _name_traces(ax: Axes, traces: pd.DataFrame, column: str) -> None:
    """The names of the recorded runs at the left ends of their lines; those that lie together share one text."""
    left = traces[traces["gbits_per_second"] == traces["gbits_per_second"].min()].sort_values(column)
    groups: list[list[int]] = []
    for place, value in enumerate(left[column]):
        if not groups or value - left[column].iloc[place - 1] > TOGETHER:
            groups.append([])
        groups[-1].append(place)
    for group in groups:
        kinds = pd.Series(["BERT" if name == "bert" else "GPT" for name in left["entropy"].iloc[group]]).value_counts()
        words = "entropy of " + " and ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in kinds.items())
        low = left[column].iloc[group].min()
        side = "top" if low > ROOM else "bottom"
        at = left["gbits_per_second"].iloc[0], low
        text = ax.annotate(words, at, (6, -2 if side == "top" else 2), textcoords="offset points", va=side)
        text.set_fontsize(style.MIN_FONT)
        texts.outline(text)


def _draw_panel(ax: Axes, table: pd.DataFrame, column: str, *, skip: tuple[str, ...] = ()) -> None:
    band = [_series(table, name, column) for name in BAND]
    colour = style.family(EDGC).colour
    for method, label, line in _lines(table):
        if method not in skip:
            look = by_name(method)
            marks = look.marks(line, filled=line != OPEN)
            ax.plot(*_series(table, method, column), label=label, **marks)
    low, high = band[0][1], band[1][1]
    label = "EDGC, r_min to r_max"
    ax.fill_between(band[0][0], low, high, color=colour, alpha=0.15, linewidth=0, label=label)
    ax.set_xscale("log")
    ticks = band[0][0]
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def seen(table: pd.DataFrame, traces: pd.DataFrame) -> str:
    """In words: what of the communication EDGC saves with the recorded entropies, over all bandwidths, and bf16."""
    saved, plain = traces[SAVED].dropna(), table.loc[table["method"] == "bf16", SAVED]
    if saved.empty:
        return "SIMULATED: time of gradient averaging by bandwidth"
    span = f"{saved.min():.0f} to {saved.max():.0f} %"
    return f"SIMULATED: told recorded entropies EDGC saves {span} of the communication, bf16 {plain.mean():.0f} %"


def draw(results: Path, study: str) -> Figure:
    """Simulated time of the reduction and of the step, and what each method saves, by the bandwidth of a node."""
    claimed = study == "gpt2_12p1b_h100"  # the paper's largest savings are taken for those of this model
    table = inputs.read(results, study)
    table = table[table["stage"] == "slowest"].copy()
    if set(table["kind"]) != {"simulated"}:
        raise UserError("table.csv holds rows that are not simulated", where=results / study, fix="make it again")
    table["seconds"] = table["seconds_communication"] + table["seconds_compress"]
    facts = json.loads((results / study / "summary.json").read_text(encoding="utf-8"))
    claim, degree = facts["paper_reduction_percent"], facts["parallel"]
    time_claim = facts["paper_time_reduction_percent"]
    steps, traces = (inputs.read(results, study, name) for name in ("steps.csv", "traces.csv"))
    traces["seconds"] = traces["seconds_communication"] + traces["seconds_compress"]

    fig, (top, bottom, alone, beside) = style.figure(4, 1, height=9.0, sharex=True)
    _draw_panel(top, table, "seconds")
    _draw_traces(top, traces, "seconds")
    top.set(yscale="log", ylabel="gradient time per step (s)", title=f"SIMULATED: {facts['title']}")
    _draw_panel(bottom, table, SAVED, skip=(NONE,))
    _draw_traces(bottom, traces, SAVED)
    _name_traces(bottom, traces, SAVED)
    bottom.set(ylim=(0, 102), ylabel="time saved (%)")
    if claimed:
        dotted: dict[str, Any] = {"color": "#000000", "linewidth": 0.9, "linestyle": (0, (1, 1.5))}
        bottom.axhline(claim, label=f"paper: up to {claim:g} %", **dotted)
    bottom.set_title("SIMULATED: communication time saved")
    for ax, overlap in ((alone, False), (beside, True)):
        _draw_panel(ax, steps[steps["overlap"] == overlap], "reduction_time_percent", skip=(NONE,))
        _draw_traces(ax, traces, f"reduction_time_{'overlap_' if overlap else ''}percent")
        if claimed:
            label = f"paper: up to {time_claim:g} % of a step"
            ax.axhline(time_claim, color="#000000", linewidth=0.9, linestyle=(0, (4, 1.5)), label=label)
        ax.set_ylabel("step time saved (%)")
        ax.set_title(f"SIMULATED: reduced {'beside' if overlap else 'after'} backward")
    beside.set_xlabel("bandwidth of a node (Gbit/s per direction)")
    texts.letter([top, bottom, alone, beside])

    texts.title_legend(fig, *style.handles(top, bottom, alone), seen(table, traces), columnspacing=1.0)
    split = f"TP{degree['tensor']} PP{degree['pipeline']} DP{degree['data']}"
    texts.note(
        fig,
        f"Model, not measured ({split}). Slowest stage, (a): communication and compression, (b): communication. "
        "(c), (d): a step under 1F1B, a device at the assumed share of its peak, against uncompressed with as much "
        "overlap. "
        "EDGC: mean of a run with 10 % warm-up; r_max where compression stops paying, r_min = r_max/4, "
        "mean rank half-way (assumed). Thin: ranks of its controller if entropy moves over the run as in a small one "
        "that was recorded.",
    )
    return fig
