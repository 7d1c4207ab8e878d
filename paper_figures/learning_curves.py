"""Loss against iterations and against bytes, of the runs of a study that has uncompressed ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import inputs, style, texts
from paper_figures.following import ORDERS
from paper_figures.methods import without_result

TABLES = {
    "learning_curves_methods": ("methods/curves.csv", "methods/table.csv"),
    "learning_curves_policies": ("policies/curves.csv", "policies/table.csv"),
}
WORDS = {
    "learning_curves_methods": {"title": "Learning curves: methods", "drawn": "the first variant of each method"},
    "learning_curves_policies": {
        "title": "Learning curves: EDGC and fixed ranks",
        "drawn": "EDGC, its own ranks in other orders, and the fixed rank that sends as many bytes",
    },
}
CAPTION = """\
**{title}.** (a): training loss (trailing mean of ten steps) against iterations, of every run with compression and of
the mean of the uncompressed ones, and validation losses, which are of other text. Below, {drawn}. (b): the training
loss against the gradient bytes sent so far; (c): the training loss minus that of the uncompressed run of the same
seed at the same iteration, on the same batches (linear below 0.01 nats). Thin: a run; thick: mean over runs. Black:
uncompressed training. The steep start is cut off; runs without a result are named below the figure. The report has the
curves of every run."""
BLACK, GREY = "#000000", "#8c8c8c"
THIN: dict[str, Any] = {"linewidth": 0.4, "alpha": 0.35}  # a run
THICK: dict[str, Any] = {"linewidth": 1.2, "zorder": 3}  # the mean over the runs
TICKS = (-0.1, -0.03, -0.01, 0, 0.01, 0.03, 0.1, 0.3, 1)  # of the differences
LINEAR = 0.01  # nats; the axis of differences is linear below and logarithmic above
CUT = 0.1  # share of the run after which the loss axis starts


def draw(results: Path, name: str) -> Figure:
    """Loss over iterations of every run; loss over bytes, and the loss above uncompressed, of some variants."""
    study = TABLES[name][0].partition("/")[0]
    curves, runs = (inputs.first_setting(inputs.read(results, study, name)) for name in ("curves.csv", "table.csv"))
    variants = runs.drop_duplicates("variant").set_index("variant")
    plain = variants.index[variants["method"] == "none"][0]
    unit, size = ("GB", 1e9) if curves["bytes"].max() > 2e9 else ("MB", 1e6)
    curves = curves.assign(validation_loss=np.log(curves["validation_perplexity"]), sent=curves["bytes"] / size)
    curves["above"] = above_uncompressed(curves, plain)
    late = curves[curves["iteration"] >= CUT * curves["iteration"].max()]
    # Without what lies far above the others: diverging runs.
    high = late.groupby(["variant", "seed"])["train_loss"].max().median()
    low = min(late["train_loss"].min(), late["validation_loss"].min())
    shown = low - 0.05 * (high - low), high + 0.05 * (high - low)
    fig, (overview, by_bytes, above) = style.figure(3, 1, height=8.2)
    every(overview, curves, plain, shown)
    looks = {plain: ("no compression", BLACK, "-")} | looks_of(variants.drop(plain))
    for variant, look in looks.items():
        rows = curves[curves["variant"] == variant]
        lines(by_bytes, rows, "sent", "train_loss", look)
        lines(above, rows, "iteration", "above", look)
    least, most = 0.8 * late["sent"].min(), 1.2 * curves["sent"].max()
    ticks = [step * 10.0**k for k in range(-3, 7) for step in (1, 2, 5) if least <= step * 10.0**k <= most]
    style.log_x(by_bytes, ticks if len(ticks) < 7 else ticks[::3])
    by_bytes.set(xlim=(least, most), ylim=shown, xlabel=f"bytes sent ({unit})", ylabel="loss (nats)")
    differences = curves.loc[curves["variant"].isin(looks), "above"]
    low, high = min(1.3 * differences.min(), -LINEAR), max(1.3 * min(differences.max(), 3.0), LINEAR)
    above.set_yscale("symlog", linthresh=LINEAR, linscale=0.5)
    ticks = [tick for tick in TICKS if low <= tick <= high]
    above.set_yticks(ticks, [f"{tick:g}".replace("-", "−") for tick in ticks])
    above.set(ylim=(low, high), xlabel="iteration", ylabel="loss above\nuncompressed (nats)")
    by_bytes.set_title("training loss by bytes")
    above.set_title("training loss above uncompressed")
    texts.legend_below(overview, 0.45, 0.24)
    texts.legend_below(above, 0.45, 0.24)
    cut = f"Training loss, trailing mean; thin: runs, thick: their mean. Losses above {shown[1]:.2f} are cut off."
    seeds = runs.groupby("variant")["seed"].nunique()
    note = texts.count_note(seeds, cut, without_result(runs), bars="every run is a line", scale=results.name)
    return texts.finish(fig, fig.axes, finding(curves, plain), note)


def finding(curves: pd.DataFrame, plain: str) -> str:
    """Sentence on how far from uncompressed training the variants end."""
    last = curves.groupby("variant")["iteration"].transform("max")
    late = curves[(curves["iteration"] > 0.95 * last) & (curves["variant"] != plain)]
    ends = late.groupby("variant")["above"].mean().dropna()
    span = f"{ends.min():+.3f} to {ends.max():+.3f} nats".replace("-", "−")
    return f"At the end the training loss lies {span} from that of uncompressed training"


def looks_of(variants: pd.DataFrame) -> dict[str, tuple[str, str, Any]]:
    """Label, colour and line of the variants drawn: EDGC's and its ranks in other orders, else one of each method."""
    edgc = style.FAMILIES["edgc"]
    looks = {"cqm": (edgc.label, edgc.colour, edgc.line)} if "cqm" in variants.index else {}
    orders = {name: (label, colour, line) for label, (name, colour, line, _) in ORDERS.items()}
    looks |= {name: look for name, look in orders.items() if name in variants.index}
    if not looks:
        first = variants.drop_duplicates("method")
        usual = {name: style.look(run) for name, run in first.iterrows()}
        looks = {str(name): (first["label"][name], look.colour, look.line) for name, look in usual.items()}
    return looks


def every(ax: Axes, curves: pd.DataFrame, plain: str, shown: tuple[float, float]) -> None:
    """Training loss over iterations, and validation losses: how alike the variants are."""
    compressed, dense = (curves[(curves["variant"] == plain) == is_plain] for is_plain in (False, True))
    for number, (_, run) in enumerate(compressed.groupby(["variant", "seed"])):
        label = None if number else "every run with compression"
        ax.plot(run["iteration"], run["train_loss"], color=GREY, linewidth=0.5, label=label)
    means = dense.groupby("iteration", as_index=False)[["train_loss", "validation_loss"]].mean()
    dots: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 2.5}
    ax.plot(compressed["iteration"], compressed["validation_loss"], color=GREY, label="its validation", **dots)
    ax.plot(means["iteration"], means["train_loss"], color=BLACK, label="no compression, mean", **THICK)
    ax.plot(means["iteration"], means["validation_loss"], color=BLACK, label="its validation ", **dots)
    ax.set(title="training loss", xlabel="iteration", ylabel="loss (nats)", ylim=shown)


def above_uncompressed(curves: pd.DataFrame, plain: str) -> pd.Series:
    """Training loss minus that of the uncompressed run of the same seed at the same iteration; nan without one."""
    place = ["seed", "iteration"]
    base = curves[curves["variant"] == plain].drop_duplicates(place).set_index(place)["train_loss"]
    return curves["train_loss"] - curves.join(base.rename("uncompressed"), on=place)["uncompressed"]


def lines(ax: Axes, curves: pd.DataFrame, x: str, y: str, look: tuple[str, str, Any]) -> None:
    """The runs of a variant, a thin line each, and the mean over them."""
    label, colour, line = look
    rows = curves.dropna(subset=[y])
    runs = rows.groupby("seed")
    for _, run in runs:
        ax.plot(run[x], run[y], color=colour, **THIN)
    # Where a run has stopped, the mean of the others would jump.
    steps = rows.groupby("iteration")
    means = steps[sorted({x, y} - {"iteration"})].mean()[steps.size() == runs.ngroups].reset_index()
    ax.plot(means[x], means[y], color=colour, linestyle=line, label=label, **THICK)
