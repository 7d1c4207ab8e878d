"""The paper's clusters, simulated: time of one step's gradient communication against the unknown network."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from edgc.errors import UserError
from paper_figures import inputs, style, texts

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
EDGC, BAND = "edgc", ("edgc_r_min", "edgc_r_max")
OPEN = ":"  # the highest fixed rank: dotted, open markers; the others are in the table
TRACE = "#7A2E00"  # darker than EDGC with the mean rank, which is assumed


def draw(results: Path, study: str) -> Figure:
    """Simulated time of the reduction and of the step, and what each method saves, by the bandwidth of a node."""
    claimed = study == "gpt2_12p1b_h100"  # the paper's largest savings are taken for those of this model
    table, steps, traces = (inputs.read(results, study, name) for name in ("table.csv", "steps.csv", "traces.csv"))
    table = table[table["stage"] == "slowest"].sort_values("gbits_per_second")
    if set(table["kind"]) != {"simulated"}:
        raise UserError("table.csv holds rows that are not simulated", where=results / study, fix="make it again")
    for rows in (table, traces):
        rows["seconds"] = rows["seconds_communication"] + rows["seconds_compress"]
    facts = json.loads((results / study / "summary.json").read_text(encoding="utf-8"))
    fig, axes = style.figure(4, 1, height=9.0, sharex=True)
    top, bottom, *of_step = axes
    panel(top, table, traces, "seconds")
    top.set(yscale="log", ylabel="gradient time per step (s)", title=f"SIMULATED: {facts['title']}")
    saved = table[table["method"] != "none"]
    panel(bottom, saved, traces, SAVED)
    bottom.set(ylim=(0, 102), ylabel="time saved (%)", title="SIMULATED: communication time saved")
    look: dict[str, Any] = {"color": "#000000", "linewidth": 0.9}
    if claimed:
        claim = facts["paper_reduction_percent"]
        bottom.axhline(claim, label=f"paper: up to {claim:g} %", linestyle=(0, (1, 1.5)), **look)
    for ax, overlap in zip(of_step, (False, True), strict=True):
        rows = steps[(steps["overlap"] == overlap) & (steps["method"] != "none")].sort_values("gbits_per_second")
        column = f"reduction_time_{'overlap_' if overlap else ''}percent"
        panel(ax, rows.assign(**{column: rows["reduction_time_percent"]}), traces, column)
        if claimed:
            claim = facts["paper_time_reduction_percent"]
            ax.axhline(claim, label=f"paper: up to {claim:g} % of a step", linestyle=(0, (4, 1.5)), **look)
        ax.set_ylabel("step time saved (%)")
        ax.set_title(f"SIMULATED: reduced {'beside' if overlap else 'after'} backward")
    axes[-1].set_xlabel("bandwidth of a node (Gbit/s per direction)")
    split = "TP{tensor} PP{pipeline} DP{data}".format(**facts["parallel"])
    note = (
        f"Model, not measured ({split}). Slowest stage, (a): communication and compression, (b): communication. "
        "(c), (d): a step under 1F1B, a device at the assumed share of its peak, against uncompressed with as much "
        "overlap. EDGC: mean of a run with 10 % warm-up; r_max where compression stops paying, r_min = r_max/4, "
        "mean rank half-way (assumed). Thin: ranks of its controller if entropy moves over the run as in a small one "
        "that was recorded."
    )
    return texts.finish(fig, axes, finding(table, traces), note, style.handles(*axes[:3]))


def lines(methods: pd.Series) -> list[tuple[str, str, Any]]:
    """(method, label, line style) of what is drawn, uncompressed first."""
    fixed = max(int(name.removeprefix("powersgd_r")) for name in methods if name.startswith("powersgd_r"))
    quantised = next(name for name in methods if name.startswith("factors_int8_r"))
    drawn: list[tuple[str, str, Any]] = [
        ("none", "uncompressed fp32", "-"),
        ("bf16", "bf16", "--"),
        ("int8", "int8", "--"),
        ("int4", "int4", OPEN),
        (f"powersgd_r{fixed}", f"PowerSGD r={fixed}", OPEN),  # lower ones lie on the next line
        (quantised, f"PowerSGD r={quantised.rpartition('_r')[2]} int8", "-"),
        ("topk", "top-k 1 %", "-."),
        (EDGC, "EDGC, mean rank", "-"),
    ]
    return [line for line in drawn if line[0] in set(methods)]


def panel(ax: Axes, table: pd.DataFrame, traces: pd.DataFrame, column: str) -> None:
    """A line per method, a band between EDGC's lowest and highest rank, and a thin line for each recorded run whose
    entropy the controller was told; by bandwidth."""
    by_method = {name: rows.set_index("gbits_per_second")[column] for name, rows in table.groupby("method")}
    for method, label, line in lines(table["method"]):
        marks = style.by_name(method).marks(line, filled=line != OPEN)
        ax.plot(by_method[method], label=label, **marks)
    low, high = (by_method[name] for name in BAND)
    colour = style.FAMILIES[EDGC].colour
    ax.fill_between(low.index, low, high, label="EDGC, r_min to r_max", color=colour, alpha=0.15, linewidth=0)
    style.log_x(ax, list(low.index))
    runs = traces.sort_values("gbits_per_second").groupby("entropy", sort=False)
    for _, rows in runs:
        label = f"EDGC, recorded entropy ({len(runs)} runs)"
        ax.plot(rows["gbits_per_second"], rows[column], color=TRACE, linewidth=0.6, label=label)


def finding(table: pd.DataFrame, traces: pd.DataFrame) -> str:
    """Sentence on the share of communication that EDGC saves by recorded entropies and bandwidths, and bf16."""
    saved, plain = traces[SAVED].dropna(), table.loc[table["method"] == "bf16", SAVED]
    if saved.empty:
        return "SIMULATED: time of gradient averaging by bandwidth"
    span = f"{saved.min():.0f} to {saved.max():.0f} %"
    return f"SIMULATED: told recorded entropies EDGC saves {span} of the communication, bf16 {plain.mean():.0f} %"
