"""Step time that each method saves where stages or links are not alike, simulated."""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import inputs, names, style, texts
from paper_figures.break_even import label, title

TABLES = ("break_even/disturbances.csv",)
CAPTION = """\
**Stages and links that are not alike, simulated.** Share of the step that each method saves on the 12.1B
cluster where the links or the devices of one stage are slower, or links are congested for a while. EDGC's
ranks are those of its controller, told the entropy of a recorded run; beside it, the same run without
measuring times again, and without alignment."""
STUDY = "break_even"
# EDGC's controller as it is, and kept from one of the things that it does: (label, marker).
CONTROLLERS = {
    "edgc": ("EDGC, recorded entropy", "D"),
    "edgc_measured_once": ("EDGC, times measured once", "^"),
    "edgc_unaligned": ("EDGC, not aligned", "v"),
}


def draw(results: Path) -> Figure:
    """A row per case, a marker per method; reductions after backward, and beside it."""
    table = inputs.read(results, STUDY, "disturbances.csv")
    assert set(table["kind"]) == {"simulated"}
    table = table[table["method"] != "none"]
    cases = list(table["label"].unique())
    fig, axes = style.figure(1, 2, height=0.5 * len(cases) + 2.9, sharey=True)
    for ax, overlap in zip(axes, (False, True), strict=True):
        panel(ax, table[table["overlap"] == overlap], cases)
        ax.set(title=f"SIMULATED:\n{'beside' if overlap else 'after'} backward", xlabel="step time saved (%)")
    names.name_rows(fig, axes, cases, what="disturbance")
    note = (
        f"Model, not measured: GPT2-12.1B, TP4 x PP4, 64 H100, {table['gbits_per_second'].iloc[0]:g} Gbit/s a node "
        "where nothing else is said. Of the uncompressed step with the same disturbance, mean over the run. EDGC: "
        f"ranks of its controller if entropy moves as in a small run that was recorded; scale {results.name}"
    )
    return texts.finish(fig, axes, title(table, ["case", "overlap"]), note, style.handles(axes[0]), columnspacing=2.0)


def panel(ax: Axes, table: pd.DataFrame, cases: list[str]) -> None:
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
