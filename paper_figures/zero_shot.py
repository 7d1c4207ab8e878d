"""Zero-shot tasks: score of every run against chance, and gap to the uncompressed run of its seed."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common import acting
from paper_figures import inputs, style, texts

TABLES = ("zero_shot/table.csv", "methods/table.csv")
CAPTION = """\
**Zero-shot evaluation.** Every final model of the methods study on tasks made from held-out text, by
lm-eval. Left: score against chance and against always giving the most frequent answer. Right: gap to the
uncompressed run of the same seed with its 90 % interval; on par means that the whole interval lies in the
shaded margin. Of EDGC that says nothing where its policy did not act, which is
named below the figure."""
TITLES = {
    "edgc_cloze": "cloze",
    "edgc_continuation": "continuation",
    "edgc_lastword": "last word",
    "edgc_rolling": "perplexity",
    "edgc_syntax": "syntax",
}
# metric -> (axis label, factor)
UNITS = {
    "acc": ("accuracy (%)", 100.0),
    "acc_norm": ("accuracy, length-normalised (%)", 100.0),
    "acc_mutual_info": ("accuracy (%)", 100.0),
    "bits_per_byte": ("bits per byte", 1.0),
    "byte_perplexity": ("perplexity per byte", 1.0),
    "word_perplexity": ("perplexity per word", 1.0),
    "perplexity": ("perplexity", 1.0),
}


def draw(results: Path) -> Figure:
    """One row of panels per task, on the first metric of the task's table rows."""
    table = inputs.read(results, "zero_shot")
    runs, ok = table.drop_duplicates("run"), table[table["status"] == "ok"]
    trained = inputs.read(results, "methods").query("variant in @runs.variant")
    table = table[table["metric"] == table.groupby("task")["metric"].transform("first")]
    tasks, labels = list(dict.fromkeys(table["task"])), list(dict.fromkeys(table["label"]))
    height = 2.0 + len(tasks) * (0.56 + 0.13 * len(labels))
    fig, axes = style.figure(len(tasks), 2, height=height, sharey=True)
    for left, right, task in zip(axes[::2], axes[1::2], tasks, strict=True):
        rows = table[table["task"] == task]
        scores(left, rows, labels)
        gaps(right, rows, labels)
        left.set_title(TITLES.get(task, task))  # other tasks than ours keep lm-eval's
    documents = ", ".join(
        f"{TITLES.get(str(task), task)} {rows['documents'].iloc[0]:.0f}"
        for task, rows in ok.groupby("task", sort=False)
    )
    missing = ", ".join(texts.failures(runs))
    note = texts.count_note(
        ok.drop_duplicates("run").groupby("variant").size(),
        f"Documents: {documents}.",
        "Left: dotted: chance; dashed: always the most frequent answer.",
        "Right: gap to uncompressed of the same seed; bars: 90 % interval, paired "
        "over documents; shaded: margin within which a whole interval means on par.",
        f"No model: {missing}." if missing else "",
        texts.untested(trained),
        bars="one marker per seed",
        scale=results.name,
    )
    return texts.finish(fig, axes[::2], finding(table[~table["label"].isin(acting.idle(trained))]), note)


def finding(rows: pd.DataFrame) -> str:
    """Sentence on how many of the gaps drawn are on par with uncompressed and how many differ."""
    known = rows["verdict"].dropna()
    par, other = (known == "on par").sum(), (known == "different").sum()
    rest = len(known) - par - other
    return f"Of {len(known)} runs and tasks {par} are on par with uncompressed, {other} differ, {rest} are not decided"


def spread_seeds(rows: pd.DataFrame, labels: list[str]) -> Iterator[tuple[float, style.Family, pd.Series]]:
    """(height, look, row) of every run: one line per label, seeds spread within the line."""
    for place, label in enumerate(labels):
        runs = rows[rows["label"] == label].sort_values("seed")
        for index, (_, run) in enumerate(runs.iterrows()):
            yield place + 0.6 * ((index + 0.5) / len(runs) - 0.5), style.by_name(str(run["variant"])), run


def scores(ax: Axes, rows: pd.DataFrame, labels: list[str]) -> None:
    """Runs as markers, against chance and the best constant answer."""
    metric = rows["metric"].iloc[0]
    name, factor = UNITS.get(metric, (str(metric), 1.0))
    for y, look, run in spread_seeds(rows, labels):
        if pd.notna(run["value"]):
            ax.plot(factor * run["value"], y, **look.marks())
    for key, line in (("chance", ":"), ("best_constant", "--")):
        if rows[key].notna().any():
            ax.axvline(factor * rows[key].dropna().iloc[0], color="#444444", linewidth=0.9, linestyle=line)
    ax.set_xlabel(name)
    finish(ax, rows["value"], labels)


def gaps(ax: Axes, rows: pd.DataFrame, labels: list[str]) -> None:
    """Gaps with the interval of the equivalence test, which may lie beside an accuracy's gap, and its margin."""
    metric = rows["metric"].iloc[0]
    name, factor = UNITS.get(metric, (str(metric), 1.0))
    unit = "points" if "(%)" in name else name
    known = rows[rows["gap"].notna()]
    if not known.empty and known["gap_scale"].iloc[0] == "log_ratio":
        factor, unit = 1.0, f"ln of {name}"
    for y, look, run in spread_seeds(rows, labels):
        if pd.notna(run["gap"]) and run["run"] != run["baseline"]:
            ax.plot([factor * run["gap_low"], factor * run["gap_high"]], [y, y], color=look.colour, linewidth=1.0)
            ax.plot(factor * run["gap"], y, **look.marks())
    if rows["margin"].notna().any():
        margin = factor * rows["margin"].dropna().iloc[0]
        ax.axvspan(-margin, margin, color="#444444", alpha=0.15, linewidth=0)
    ax.axvline(0, color="#444444", linewidth=0.8)
    better = "higher is better" if bool(rows["higher_is_better"].iloc[0]) else "lower is better"
    ax.set_xlabel(f"gap ({unit})\n({better})")
    finish(ax, rows["gap"], labels)


def finish(ax: Axes, shown: pd.Series, labels: list[str]) -> None:
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    style.plain_linear(ax.xaxis, 3)
    if not shown.notna().any():
        texts.message(ax, "no finished run")
