"""Validation loss against iterations and against bytes sent, of what replicas exchange beside gradients."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from paper_figures import inputs, style, texts
from paper_figures.methods import without_result

TABLES = ("strategies/table.csv", "strategies/curves.csv")
CAPTION = """\
**Strategies rehearsed.** Validation loss of the mean of the replicas' weights against (a) iterations and (b) the bytes
that each replica has sent by then, of all replicas in one process at the W that stands below. Left and down is better.
Bytes are counted at the collectives; what SparseLoCo sends grows with W, for its messages are all-gathered, the rest
hardly does. Settings of DiLoCo and SparseLoCo were chosen among five trials each with another seed, Dion's rate among
three. A run of one seed judges nothing."""
# Colours and markers of strategies; runs without one look as their method does in every figure.
LOOKS = {"diloco": ("#CC79A7", "s"), "sparseloco": ("#56B4E9", "^"), "dion": ("#009E73", "v")}


def draw(results: Path) -> Figure:
    """Validation losses of all runs, by iteration and by bytes."""
    runs, curves = inputs.read(results, "strategies"), inputs.read(results, "strategies", "curves.csv")
    points = curves.dropna(subset=["validation_perplexity"])
    points = points.assign(loss=np.log(points["validation_perplexity"]), sent=points["bytes"] / 1e6)
    fig, (by_iteration, by_bytes) = style.figure(2, 1, height=5.4)
    for _, run in runs.iterrows():
        rows = points[(points["variant"] == run["variant"]) & (points["seed"] == run["seed"])]
        look: dict[str, Any] = dict(zip(("color", "marker"), looks(run), strict=True), markersize=3)
        label = run["label"] if run["seed"] == runs.loc[runs["variant"] == run["variant"], "seed"].iloc[0] else None
        by_iteration.plot(rows["iteration"], rows["loss"], label=label, **look)
        by_bytes.plot(rows["sent"], rows["loss"], **look)
    by_iteration.set(title="by iteration", xlim=(0, None), xlabel="iteration", ylabel="validation loss (nats)")
    least, most = points["sent"].min() / 1.5, points["sent"].max() * 1.5
    style.log_x(by_bytes, [10.0**k for k in range(-6, 9) if least <= 10.0**k <= most])
    by_bytes.set(title="by bytes", xlim=(least, most), xlabel="sent by each replica so far (MB)")
    by_bytes.set_ylabel("validation loss (nats)")
    texts.legend_below(by_iteration, 0.45, 0.24)
    worlds = ", ".join(str(world) for world in sorted(set(runs["replicas"])))
    seeds = runs.groupby("variant")["seed"].nunique()
    untested = texts.untested(runs)
    note = texts.count_note(
        seeds, f"W = {worlds} replicas in one process.", untested, without_result(runs), scale=results.name
    )
    return texts.finish(fig, fig.axes, finding(runs), note)


def looks(run: pd.Series) -> tuple[str, str]:
    """Colour and marker of a run: of its strategy, or else of its method of compression."""
    family = style.by_name(run["method"] if isinstance(run["method"], str) else "none")
    return LOOKS.get(run["strategy"], (family.colour, family.marker))


def finding(runs: pd.DataFrame) -> str:
    """Sentence on what the strategies send and lose, which decides nothing with one seed."""
    rows = runs[(runs["status"] == "ok") & runs["gap_nats"].notna() & (runs["strategy"] != "every_step")]
    if rows.empty:
        return "No strategy has a result"
    shares = 100 * rows["bytes_ratio"]
    gaps = f"{rows['gap_nats'].min():+.2f} to {rows['gap_nats'].max():+.2f} nats".replace("-", "−")
    seeds = "One seed, no verdict" if runs["seed"].nunique() == 1 else "Means of few seeds"
    return f"{seeds}: strategies send {shares.min():.2g} to {shares.max():.2g} % and end {gaps} from no compression"
