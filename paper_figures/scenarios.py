"""Step time that each method saves on other clusters and where stages or links are not alike: simulated."""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import inputs, style, texts

TABLES = {
    "break_even": ("break_even/table.csv",),
    "disturbances": ("break_even/disturbances.csv",),
}
CAPTION = {
    "break_even": """\
**Beyond the paper's clusters, simulated.** Nothing here was measured; the model, its GPUs and assumptions
are those of ``gpt2_12p1b_h100``. What each method saves of a training step against uncompressed fp32 with
as much overlap, by the bandwidth of a node, or of the link between two sites. More GPUs change little,
since each replica keeps its batch; a mixture of experts gains less, since tokens travel uncompressed; a
slow link between sites gains most. bf16, int8 and int4 of every entry need no low rank. Bandwidths at which
1, 5 and 16.13 % are saved: ``break_even/break_even.csv``.""",
    "disturbances": """\
**Stages and links that are not alike, simulated.** Share of the step that each method saves on the 12.1B
cluster where the links or the devices of one stage are slower, or links are congested for a while. EDGC's
ranks are those of its controller, told the entropy of a recorded run; beside it, the same run without
measuring times again, and without alignment.""",
}
STUDY = "break_even"
LABELS = {"bf16": "bf16", "int8": "int8", "int4": "int4", "edgc": "EDGC, mean rank"}
# EDGC's controller as it is, and kept from one of the things that it does: (label, marker).
CONTROLLERS = {
    "edgc": ("EDGC, recorded entropy", "D"),
    "edgc_measured_once": ("EDGC, times measured once", "^"),
    "edgc_unaligned": ("EDGC, not aligned", "v"),
}


def label(method: str) -> str:
    kind, _, rank = method.rpartition("_r")
    if kind == "powersgd":
        return f"PowerSGD r={rank}"
    return f"PowerSGD r={rank} int8" if kind == "factors_int8" else LABELS[method]


def title(table: pd.DataFrame, case: list[str]) -> str:
    """Title: the method that saves most in most cases, and in how many EDGC does; ``case``: columns that make one."""
    best = table.loc[table.groupby(case)["saved_percent"].idxmax(), "method"].str.replace("edgc.*", "edgc", regex=True)
    first = best.value_counts().index[0]
    won, name = f"in {(best == first).sum()} of {len(best)} cases", "EDGC" if first == "edgc" else label(first)
    edgc = "" if first == "edgc" else f", EDGC in {(best == 'edgc').sum()}"
    return f"SIMULATED: {name} saves most {won}{edgc}"


def break_even(results: Path) -> Figure:
    """A panel per cluster: reductions after backward; how far those beside it are from that is said below."""
    table = inputs.read(results, STUDY)
    ways = table.pivot(index=["cluster", "method", "gbits_per_second"], columns="overlap", values="saved_percent")
    apart = (ways[True] - ways[False]).abs().max()
    assert set(table["kind"]) == {"simulated"}
    table = table[table["method"] != "none"]
    clusters = list(table["cluster"].unique())
    count = -(-len(clusters) // 2)
    fig, axes = style.figure(count, 2, height=1.6 + 1.8 * count, sharey=True)
    for ax in axes[len(clusters) :]:
        ax.remove()
    for ax, cluster in zip(axes, clusters, strict=False):
        rows = table[(table["cluster"] == cluster) & ~table["overlap"]]
        for method, line in rows.groupby("method", sort=False):
            marks = style.by_name(str(method)).marks("-", filled=method != "int8") | {"markersize": 3.5}
            ax.plot(line["gbits_per_second"], line["saved_percent"], label=label(str(method)), **marks)
        ax.axhline(0, color="#444444", linewidth=0.6)
        style.log_x(ax, [tick for tick in (1, 10, 100, 400) if tick <= rows["gbits_per_second"].max()])
        ax.set_title(f"SIMULATED\n{rows['label'].iloc[0]}")
        sites = rows["link"].iloc[0] == "sites"
        ax.set_xlabel("link between the\nsites (Gbit/s)" if sites else "bandwidth of a\nnode (Gbit/s)")
    for ax in axes[::2]:
        ax.set_ylabel("step time saved (%)")
    note = (
        "Model, not measured. Drawn: gradients reduced after backward. Beside it, which the title counts too, as much "
        f"is saved within {apart:.1f} points. GPT2-12.1B, TP4 x PP4, "
        "H100; a replica keeps its batch. EDGC: mean of a run with 10 % warm-up, mean rank half-way between r_min "
        f"and r_max (assumed); scale {results.name}"
    )
    words = title(table, ["cluster", "overlap", "gbits_per_second"])
    return texts.finish(fig, axes[: len(clusters)], words, note, style.handles(axes[0]), columnspacing=2.0)


def disturbances(results: Path) -> Figure:
    """A row per case, a marker per method; reductions after backward, and beside it."""
    table = inputs.read(results, STUDY, "disturbances.csv")
    assert set(table["kind"]) == {"simulated"}
    table = table[table["method"] != "none"]
    cases = list(table["label"].unique())
    fig, axes = style.figure(1, 2, height=0.5 * len(cases) + 2.9, sharey=True)
    for ax, overlap in zip(axes, (False, True), strict=True):
        disturbed(ax, table[table["overlap"] == overlap], cases)
        ax.set(title=f"SIMULATED:\n{'beside' if overlap else 'after'} backward", xlabel="step time saved (%)")
    texts.name_rows(fig, axes, cases, what="disturbance")
    note = (
        f"Model, not measured: GPT2-12.1B, TP4 x PP4, 64 H100, {table['gbits_per_second'].iloc[0]:g} Gbit/s a node "
        "where nothing else is said. Of the uncompressed step with the same disturbance, mean over the run. EDGC: "
        f"ranks of its controller if entropy moves as in a small run that was recorded; scale {results.name}"
    )
    return texts.finish(fig, axes, title(table, ["case", "overlap"]), note, style.handles(axes[0]), columnspacing=2.0)


def disturbed(ax: Axes, table: pd.DataFrame, cases: list[str]) -> None:
    methods = list(table["method"].unique())
    for index, method in enumerate(methods):
        rows = table[table["method"] == method].set_index("label").loc[cases]
        look = style.by_name("edgc" if method in CONTROLLERS else method)
        name, marker = CONTROLLERS.get(method) or (label(method), look.marker)
        # Methods of nearly the same saving beside each other.
        places = [place + 0.45 * index / (len(methods) - 1) - 0.1 for place in range(len(cases))]
        marks = look._replace(marker=marker).marks(filled=method not in ("int8", *list(CONTROLLERS)[1:]))
        ax.plot(rows["saved_percent"], places, markersize=4.5, label=name, **marks)
    ax.set_xlim(0, 100)
