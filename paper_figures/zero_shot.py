"""Zero-shot tasks: score of every run against chance, and difference to the uncompressed run of its seed."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import style

NAME = "zero_shot"
TITLES = {"edgc_cloze": "cloze", "edgc_lastword": "last word", "edgc_rolling": "rolling perplexity"}
CONFIDENCE = 1.96  # standard errors of a 95 % interval
# metric -> (axis label, factor)
UNITS = {
    "acc": ("accuracy (%)", 100.0),
    "acc_norm": ("accuracy, length-normalised (%)", 100.0),
    "bits_per_byte": ("bits per byte", 1.0),
    "byte_perplexity": ("perplexity per byte", 1.0),
    "word_perplexity": ("perplexity per word", 1.0),
    "perplexity": ("perplexity", 1.0),
}


def draw(results: Path) -> Figure:
    """One column of panels per task, on the first metric of the task's table rows."""
    table = style.read(results, "zero_shot")
    tasks = list(dict.fromkeys(table["task"]))
    labels = list(dict.fromkeys(table["label"]))
    fig, axes = style.figure(2, len(tasks), width=style.TEXT, height=1.3 + 0.48 * len(labels), sharey=True)
    for column, task in enumerate(tasks):
        rows = table[table["task"] == task]
        rows = rows[rows["metric"] == rows["metric"].iloc[0]]
        panel(axes[column], rows, labels, "value", "stderr")
        panel(axes[len(tasks) + column], rows, labels, "difference", "difference_stderr")
        axes[column].set_title(title(task))
    style.letter(axes[: len(tasks)])
    ok = table[table["status"] == "ok"]
    runs = table.drop_duplicates("run")
    missing = [
        f"{row['label']} seed {row['seed']} ({row['status']})"
        for _, row in runs.iterrows()
        if row["status"] != "ok"
    ]
    documents = ", ".join(
        f"{title(str(task))} {rows['n'].iloc[0]:.0f}" for task, rows in ok.groupby("task", sort=False)
    )
    style.annotate(
        fig,
        list(ok.drop_duplicates("run").groupby("variant").size()),
        bars="one marker per seed",
        scale=results.name,
        extra=f"Documents: {documents}. Top: bars: ± 1 standard error over documents; dotted: chance;\n"
        "dashed: always the most frequent answer. Bottom: minus uncompressed of the same seed; bars: 95 %\n"
        "interval, paired over documents." + (f"\nNo model: {', '.join(missing)}." if missing else ""),
    )
    return fig


def title(task: str) -> str:
    """A task's name for people; other tasks than ours keep lm-eval's."""
    return TITLES.get(task, task)


def panel(ax: Axes, rows: pd.DataFrame, labels: list[str], column: str, error: str) -> None:
    """Runs as markers with bars, one line per label, seeds spread within the line."""
    name, factor = UNITS.get(rows["metric"].iloc[0], (rows["metric"].iloc[0], 1.0))
    better = "higher is better" if bool(rows["higher_is_better"].iloc[0]) else "lower is better"
    difference = column == "difference"
    width = CONFIDENCE if difference else 1.0
    for place, label in enumerate(labels):
        runs = rows[rows["label"] == label].sort_values("seed")
        look = style.family(f"{runs['variant'].iloc[0]} {label}")
        for index, (_, run) in enumerate(runs.iterrows()):
            y = place + 0.6 * ((index + 0.5) / len(runs) - 0.5)
            if pd.notna(run[column]):
                bar = factor * width * run[error] if pd.notna(run[error]) else None
                ax.errorbar(
                    factor * run[column], y, xerr=bar, color=look.colour, marker=look.marker, linestyle=""
                )
    if difference:
        ax.axvline(0, color="#444444", linewidth=0.8)
        unit = name.replace("(%)", "(points)")
        ax.set_xlabel(f"difference in {unit}\n({better})")
    else:
        for key, line in (("chance", ":"), ("best_constant", "--")):
            if rows[key].notna().any():
                ax.axvline(
                    factor * rows[key].dropna().iloc[0], color="#444444", linewidth=0.9, linestyle=line
                )
        ax.set_xlabel(name)
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    if not rows[column].notna().any():
        style.message(ax, "no finished run")


if __name__ == "__main__":
    style.main(draw)
