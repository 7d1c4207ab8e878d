"""Zero-shot tasks: gap of every run to the uncompressed run of its seed."""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from edgc.errors import UserError
from experiments.common import acting
from paper_figures import inputs, style, texts

TABLES = ("zero_shot/table.csv", "methods/table.csv")
CAPTION = """\
**Zero-shot evaluation.** Every final model of the methods study on tasks made from held-out text, by
lm-eval: gap to the uncompressed run of the same seed with its 90 % interval; on par means that the whole interval lies
in the shaded margin. Scores, and bits per byte of running text, which say what the validation loss says, are in
``zero_shot/table.csv``. Of EDGC a gap says nothing where its policy did not act, which is named below the figure."""
TITLES = {
    "edgc_cloze": "cloze",
    "edgc_continuation": "continuation",
    "edgc_lastword": "last word",
    "edgc_syntax": "syntax",
}


def draw(results: Path) -> Figure:
    """A panel per task with an accuracy: gaps with the interval of the equivalence test and its margin."""
    table = inputs.read(results, "zero_shot")
    runs, ok = table.drop_duplicates("run"), table[table["status"] == "ok"]
    trained = inputs.read(results, "methods").query("variant in @runs.variant")
    first = table["metric"] == table.groupby("task")["metric"].transform("first")
    table = table[first & table["metric"].str.startswith("acc", na=False)]
    table = table[table["run"] != table["baseline"]]
    tasks, labels = list(dict.fromkeys(table["task"])), list(dict.fromkeys(table["label"]))
    if not tasks:
        raise UserError("no task has an accuracy", where=results / "zero_shot" / "table.csv", fix="evaluate one")
    rows = -(-len(tasks) // 2)
    fig, axes = style.figure(rows, 2, height=1.8 + rows * (0.75 + 0.16 * len(labels)), sharey=True)
    for ax in axes[len(tasks) :]:
        ax.remove()
    for ax, task in zip(axes, tasks, strict=False):
        gaps(ax, table[table["task"] == task], labels)
        ax.set_title(TITLES.get(task, task))  # other tasks than ours keep lm-eval's
    counts = ok.drop_duplicates("task").set_index("task")["documents"]
    documents = ", ".join(f"{TITLES.get(task, task)} {counts[task]:.0f}" for task in tasks if task in counts)
    missing = ", ".join(texts.failures(runs))
    note = texts.count_note(
        ok.drop_duplicates("run").groupby("variant").size(),
        f"Documents: {documents}.",
        "Bars: 90 % interval, paired over documents; shaded: margin within which a whole interval means on par.",
        f"No model: {missing}." if missing else "",
        texts.untested(trained),
        bars="one marker per seed",
        scale=results.name,
    )
    title = finding(table[~table["label"].isin(acting.idle(trained))])
    return texts.finish(fig, axes[: len(tasks)], title, note)


def finding(rows: pd.DataFrame) -> str:
    """Sentence on how many of the gaps drawn are on par with uncompressed and how many differ."""
    known = rows["verdict"].dropna()
    par, other = (known == "on par").sum(), (known == "different").sum()
    rest = len(known) - par - other
    return f"Of {len(known)} runs and tasks {par} are on par with uncompressed, {other} differ, {rest} are not decided"


def gaps(ax: Axes, rows: pd.DataFrame, labels: list[str]) -> None:
    """Gaps with the interval of the equivalence test, which may lie beside an accuracy's gap, and its margin."""
    for place, label in enumerate(labels):
        runs = rows[rows["label"] == label].sort_values("seed")
        for index, (_, run) in enumerate(runs.iterrows()):
            y, look = place + 0.6 * ((index + 0.5) / len(runs) - 0.5), style.by_name(str(run["variant"]))
            ax.plot([100 * run["gap_low"], 100 * run["gap_high"]], [y, y], color=look.colour, linewidth=1.0)
            ax.plot(100 * run["gap"], y, **look.marks())
    margin = 100 * rows["margin"].max()
    ax.axvspan(-margin, margin, color="#444444", alpha=0.15, linewidth=0)
    ax.axvline(0, color="#444444", linewidth=0.8)
    ax.set_xlabel("gap (points)\n(higher is better)")
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    style.plain_linear(ax.xaxis, 3)
    if rows["gap"].isna().all():
        texts.message(ax, "no finished run")
