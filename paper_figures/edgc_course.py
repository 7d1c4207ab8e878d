"""Entropy and rank over the run, for each EDGC variant whose rank follows something."""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from edgc.errors import UserError
from paper_figures import inputs, style, texts

TABLES = ("methods/curves.csv", "methods/table.csv")
CAPTION = """\
**Entropy and the rank that follows it, over the run.** Above: mean of the sampled entropies over the last
window (nats), per stage. Below: the rank in use; grey: no rank is in use yet; thin grey lines: r_max and r_min. The
paper says that the entropy of gradients falls through training; CQM then lowers the rank. The paper's own courses are
described here, not drawn: this project has no numbers of them."""
GIVEN = ("fixed", "schedule")
LINES = ("-", "--", ":", "-.")  # of seeds


def draw(results: Path) -> Figure:
    """Two panels per variant: entropy (above) and rank (below) against iteration, a line per stage and seed."""
    curves, runs = inputs.tables(results, TABLES)
    runs = runs[(runs["method"] == "edgc") & ~runs["policy"].isin(GIVEN)]
    if runs.empty:
        raise UserError("no EDGC run in study methods", where=results / TABLES[1])
    labels = dict(zip(runs["variant"], runs["label"], strict=True))
    fig, axes = style.figure(2 * len(labels), 1, height=1.3 + 2.1 * len(labels), sharex=True)
    for above, below, (variant, label) in zip(axes[::2], axes[1::2], labels.items(), strict=True):
        rows = curves[curves["variant"] == variant]
        entropies(above, rows)
        ranks(below, rows)
        for limit in ("r_max", "r_min"):
            for value in runs.loc[runs["variant"] == variant, limit].dropna().unique():
                below.axhline(value, color="#777777", linewidth=0.6, zorder=1, label="r_max, r_min")
        above.set(title=f"{label}, entropy", ylabel="entropy (nats)")
        used = rows[columns_of(curves, "rank")].stack().dropna()
        span = f"{used.min():g} to {used.max():g}" if used.nunique() > 1 else f"always {used.min():g}"
        below.set(title=f"its rank: {'never compressed' if used.empty else span}", ylabel="rank r")
        below.set_ylim(bottom=0)
        below.locator_params(axis="y", nbins=6)  # or equal panels get other ticks, by the last digits of their limits
    axes[-1].set_xlabel("iteration")
    seeds = runs.groupby("variant")["seed"].nunique()
    note = texts.count_note(seeds, bars="every seed is a line, the first one solid", scale=results.name)
    title = finding(curves[curves["variant"].isin(labels)])
    return texts.finish(fig, axes, title, note, style.handles(*axes), ncols=3)


def columns_of(curves: pd.DataFrame, what: str) -> list[str]:
    """The columns ``rank_0`` or ``entropy_0`` and so on, by stage."""
    return [f"{what}_{k}" for k in sorted(int(name[5:]) for name in curves if name.startswith("rank_"))]


def entropies(ax: Axes, curves: pd.DataFrame) -> None:
    """The window mean of every stage and seed."""
    columns = columns_of(curves, "entropy")
    for column, colour in zip(columns, style.stage_colours(len(columns)), strict=True):
        for number, (_, run) in enumerate(curves.groupby("seed")):
            ax.plot(run["iteration"], run[column], color=colour, linestyle=LINES[number % 4], linewidth=1.0)


def finding(curves: pd.DataFrame) -> str:
    """Sentence on the number of runs in which the rank of a stage falls, and in which one rises again."""
    moves = []
    for _, run in curves.groupby(["variant", "seed"]):
        steps = run[columns_of(curves, "rank")].ffill().diff()
        fell = (steps < 0).cumsum() > 0
        moves.append((fell.any(axis=None), ((steps > 0) & fell).any(axis=None)))
    fell_in, rose_in = (sum(map(bool, each)) for each in zip(*moves, strict=True))
    return f"The rank falls in {fell_in} of {len(moves)} runs and rises again in {rose_in}"


def ranks(ax: Axes, curves: pd.DataFrame) -> None:
    """Later stages are drawn thinner on top, so that equal ranks stay visible; grey: sent uncompressed."""
    columns = columns_of(curves, "rank")
    dense = curves.groupby("iteration")[columns].count().sum(axis=1) == 0
    if dense.any():
        first = dense[~dense].index.min() if (~dense).any() else dense.index.max()
        ax.axvspan(dense.index.min(), first, color="#dddddd", alpha=0.7, linewidth=0, label="no rank yet")
    for stage, (column, colour) in enumerate(zip(columns, style.stage_colours(len(columns)), strict=True)):
        width = 2.4 - 1.4 * stage / max(1, len(columns) - 1)
        for number, (_, run) in enumerate(curves.groupby("seed")):
            label = f"stage {column[5:]}" if number == 0 else None
            look = {"color": colour, "linewidth": width, "linestyle": LINES[number % 4], "label": label}
            ax.step(run["iteration"], run[column], where="post", **look)
