"""Zero-shot tasks: score of every run against chance, and gap to the uncompressed run of its seed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common import acting
from paper_figures import inputs, style, texts
from paper_figures.families import by_name

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
    tasks = list(dict.fromkeys(table["task"]))
    labels = list(dict.fromkeys(table["label"]))
    height = 2.0 + len(tasks) * (0.56 + 0.13 * len(labels))
    fig, axes = style.figure(len(tasks), 2, height=height, sharey=True)
    drawn = []
    runs = table.drop_duplicates("run")
    of_these = inputs.read(results, "methods").query("variant in @runs.variant")
    for place, task in enumerate(tasks):
        rows = table[table["task"] == task]
        drawn.append(rows[rows["metric"] == rows["metric"].iloc[0]])
        scores(axes[2 * place], drawn[-1], labels)
        gaps(axes[2 * place + 1], drawn[-1], labels)
        axes[2 * place].set_title(title(task))
    for ax in axes:
        style.plain_linear(ax.xaxis, 3)
    texts.letter(axes[::2])
    told = pd.concat(drawn)
    told = told[~told["label"].isin(acting.idle(of_these))]
    texts.headline(fig, seen(told))
    ok = table[table["status"] == "ok"]
    missing = [
        f"{row['label']} seed {row['seed']} ({row['status']})" for _, row in runs.iterrows() if row["status"] != "ok"
    ]
    idle = texts.untested(of_these)
    documents = ", ".join(
        f"{title(str(task))} {rows['documents'].iloc[0]:.0f}" for task, rows in ok.groupby("task", sort=False)
    )
    texts.annotate(
        fig,
        list(ok.drop_duplicates("run").groupby("variant").size()),
        bars="one marker per seed",
        scale=results.name,
        extra=f"Documents: {documents}.\nLeft: dotted: chance; dashed: always the most frequent "
        "answer.\nRight: gap to uncompressed of the same seed; bars: 90 % interval, paired "
        "over documents; shaded: margin within which a whole interval means on par."
        + (f"\nNo model: {', '.join(missing)}." if missing else "")
        + (f"\n{idle}" if idle else ""),
    )
    return fig


def title(task: str) -> str:
    """A task's name for people; other tasks than ours keep lm-eval's."""
    return TITLES.get(task, task)


def seen(rows: pd.DataFrame) -> str:
    """In words: how many of the gaps drawn are on par with uncompressed and how many differ."""
    known = rows["verdict"].dropna()
    par, other = (known == "on par").sum(), (known == "different").sum()
    rest = len(known) - par - other
    return f"Of {len(known)} runs and tasks {par} are on par with uncompressed, {other} differ, {rest} are not decided"


def spread_seeds(rows: pd.DataFrame, labels: list[str]) -> Iterator[tuple[float, style.Family, pd.Series]]:
    """(height, look, row) of every run: one line per label, seeds spread within the line."""
    for place, label in enumerate(labels):
        runs = rows[rows["label"] == label].sort_values("seed")
        for index, (_, run) in enumerate(runs.iterrows()):
            look = by_name(str(run["variant"]))
            yield place + 0.6 * ((index + 0.5) / len(runs) - 0.5), look, run


def unit_of(rows: pd.DataFrame) -> tuple[str, float, str]:
    """(axis label, factor, direction) of the metric of some rows."""
    metric = rows["metric"].iloc[0]
    better = "higher is better" if bool(rows["higher_is_better"].iloc[0]) else "lower is better"
    return *UNITS.get(metric, (str(metric), 1.0)), better


def scores(ax: Axes, rows: pd.DataFrame, labels: list[str]) -> None:
    """Runs as markers, against chance and the best constant answer."""
    name, factor, _ = unit_of(rows)
    for y, look, run in spread_seeds(rows, labels):
        if pd.notna(run["value"]):
            ax.plot(factor * run["value"], y, **look.marks())
    for key, line in (("chance", ":"), ("best_constant", "--")):
        if rows[key].notna().any():
            level = factor * rows[key].dropna().iloc[0]
            ax.axvline(level, color="#444444", linewidth=0.9, linestyle=line)
    ax.set_xlabel(name)
    finish(ax, rows["value"], labels)


def gaps(ax: Axes, rows: pd.DataFrame, labels: list[str]) -> None:
    """Gaps with the interval of the equivalence test, which may lie beside an accuracy's gap, and its margin."""
    name, factor, better = unit_of(rows)
    known = rows[rows["gap"].notna()]
    logarithmic = not known.empty and known["gap_scale"].iloc[0] == "log_ratio"
    factor = 1.0 if logarithmic else factor
    for y, look, run in spread_seeds(rows, labels):
        if pd.notna(run["gap"]) and run["run"] != run["baseline"]:
            ends = [factor * run["gap_low"], factor * run["gap_high"]]
            ax.plot(ends, [y, y], color=look.colour, linewidth=1.0)
            ax.plot(factor * run["gap"], y, **look.marks())
    if rows["margin"].notna().any():
        margin = factor * rows["margin"].dropna().iloc[0]
        ax.axvspan(-margin, margin, color="#444444", alpha=0.15, linewidth=0)
    ax.axvline(0, color="#444444", linewidth=0.8)
    unit = f"ln of {name}" if logarithmic else "points" if "(%)" in name else name
    ax.set_xlabel(f"gap ({unit})\n({better})")
    finish(ax, rows["gap"], labels)


def finish(ax: Axes, shown: pd.Series, labels: list[str]) -> None:
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    if not shown.notna().any():
        texts.message(ax, "no finished run")
