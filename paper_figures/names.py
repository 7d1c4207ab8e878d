"""Names of points: beside those of a plot of loss against bytes, where nothing else stands, and above a row."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from matplotlib.transforms import Affine2D, Bbox, ScaledTranslation, blended_transform_factory

from experiments.common.equivalence import loss_margin
from paper_figures import style, texts

FAR, NEAR = 2.0, 12.0  # square pixels that a point of distance is worth; points from which a line leads to a name
BESIDE = 3.0  # points between a point and the line that leads from it to its name
STRANGE = 60.0  # square pixels that a name is worth beside a marker that is not its own
ALIKE = 0.15, 0.004  # rows so near each other, in ln(bytes) and in nats, get one name
# where a name may stand: points from its marker, and how it is aligned there
PLACES = tuple(
    ((x * (9 if abs(y) < 10 else 4), y), align)
    for y in (0, 9, -9, 18, -18, 27, -27, 37, -37, 50, -50)
    for x, align in ((1, "left"), (-1, "right"), (0, "center"))
    if x or y
)


def select(summary: pd.DataFrame, near: float, most: int) -> pd.DataFrame:
    """At most ``most`` rows less than ``near`` nats off: EDGC, those that none beats in both, the smallest losses."""
    rows = summary[(summary["method"] != "none") & (summary["gap_nats_mean"] < near)]
    rows = rows.sort_values(["bytes_ratio_mean", "gap_nats_mean"])
    front = rows["gap_nats_mean"] <= rows["gap_nats_mean"].cummin()
    rows = rows.assign(front=front, edgc=(rows["method"] == "edgc") & (rows["policy"] == "cqm")).reindex(
        summary.index.intersection(rows.index)
    )
    named: list[pd.Series] = []
    for _, row in rows.sort_values(["edgc", "front", "gap_nats_mean"], ascending=[False, False, True]).iterrows():
        if len(named) < most and not any(_alike(row, other) for other in named):
            named.append(row)
    return pd.DataFrame(named, columns=rows.columns).sort_values("bytes_ratio_mean")


def _alike(row: pd.Series, other: pd.Series) -> bool:
    near_bytes = abs(np.log(row["bytes_ratio_mean"] / other["bytes_ratio_mean"])) < ALIKE[0]
    return bool(near_bytes and abs(row["gap_nats_mean"] - other["gap_nats_mean"]) < ALIKE[1])


def finding(rows: pd.DataFrame) -> str:
    """Sentence on the method of fewest bytes that loses no more than EDGC; without EDGC, no more than the margin."""
    rows = rows.sort_values("bytes_ratio_mean")
    percent = 100 * rows["bytes_ratio_mean"]
    if not rows["edgc"].any():
        near = rows[rows["gap_nats_mean"] <= loss_margin()]
        if near.empty:
            return "Validation loss against bytes sent"
        fewest = f"the fewest bytes within {loss_margin():g} nats of no compression"
        return f"In the mean {near['label'].iloc[0]} sends {fewest}: {percent[near.index[0]]:.0f} %"
    edgc = rows[rows["edgc"].astype(bool)].iloc[-1]
    fewer = rows["bytes_ratio_mean"] < edgc["bytes_ratio_mean"]
    better = rows[~rows["edgc"].astype(bool) & fewer & (rows["gap_nats_mean"] <= edgc["gap_nats_mean"])]
    if better.empty:
        return f"No method named sends fewer bytes than {edgc['label']} at no more loss"
    percents = f"{percent[better.index[0]]:.0f} % of the bytes, not {100 * edgc['bytes_ratio_mean']:.0f} %"
    return f"{better['label'].iloc[0]} loses no more in the mean than {edgc['label']} and sends {percents}"


def write(ax: Axes, points: pd.DataFrame, names: Sequence[tuple[pd.Series, str]]) -> None:
    """Put each name where it hides least of the markers and bars of ``points`` and of other names, near its point; a
    thin line leads to one that stands far away."""
    ax.figure.canvas.draw()  # or where things are is not known yet
    occupied = [box for _, row in points.iterrows() for box in boxes(ax, row)]
    marks = ax.transData.transform(np.column_stack([100 * points["bytes_ratio_mean"], points["gap_nats_mean"]]))
    for row, name in names:
        point = 100 * row["bytes_ratio_mean"], row["gap_nats_mean"]
        text = texts.label_point(ax, name, point, (0, 0), fontsize=style.MIN_FONT)
        options = []
        for place, align in PLACES:
            text.set(position=place, horizontalalignment=align)
            box = text.get_window_extent()
            inside = ax.bbox.x0 <= box.x0 and box.x1 <= ax.bbox.x1 and ax.bbox.y0 <= box.y0 and box.y1 <= ax.bbox.y1
            hidden = sum(weight * overlap(box, other) for other, weight in occupied)
            away = FAR * np.hypot(*place) + STRANGE * nearer(box, marks, ax.transData.transform(point))
            options.append(((not inside, hidden + away), place, align, box))
        _, place, align, box = min(options, key=lambda option: option[0])
        text.set(position=place, horizontalalignment=align)
        occupied.append((box, 3.0))
        if abs(place[1]) > NEAR:
            # From beside the point, or the line would lie on the point's own bar.
            side = {"left": 3, "right": -3, "center": 3}[align]
            leader(ax, point, (place[0] + side, place[1] - np.sign(place[1]) * style.MIN_FONT / 2))


def leader(ax: Axes, point: tuple[float, float], end: tuple[float, float]) -> None:
    """A thin line from beside a point (in data) to ``end`` (in points from it)."""
    # Not an arrow of an annotation: where matplotlib cuts one off hangs on the last digits, so on the machine.
    origin = ScaledTranslation(*point, ax.transData)  # type: ignore[arg-type]  # as its documentation does
    from_point = Affine2D().scale(1 / 72) + ax.figure.dpi_scale_trans + origin
    x, y = np.outer(end, (BESIDE / np.hypot(*end), 1))
    look: dict[str, Any] = {
        "color": "#222222",
        "linewidth": 0.6,
        "clip_on": False,
        "zorder": 3,
        "scalex": False,
        "scaley": False,
    }
    (line,) = ax.plot(x, y, transform=from_point, **look)
    line.set_path_effects([Stroke(linewidth=1.8, foreground="white"), Normal()])


def nearer(box: Bbox, marks: np.ndarray, mark: np.ndarray) -> int:
    """Number of markers that stand nearer to a name than its own ``mark`` does; (n, 2) and (2,), pixels."""
    points = np.vstack([mark, marks])
    gaps = np.maximum(0, np.maximum(box.min - points, points - box.max))
    distances = np.hypot(*gaps.T)
    return int((distances[1:] < distances[0] - 1).sum())


def overlap(box: Bbox, other: Bbox) -> float:
    """Square pixels that both cover."""
    both = Bbox.intersection(box, other)
    return float(both.width * both.height) if both is not None else 0.0


def boxes(ax: Axes, row: pd.Series) -> list[tuple[Bbox, float]]:
    """Boxes of the marker and the bar of a row, in pixels, and how bad it is to hide each."""
    x, y = ax.transData.transform((100 * row["bytes_ratio_mean"], row["gap_nats_mean"]))
    ends = [ax.transData.transform((1, row[f"gap_nats_{end}"]))[1] for end in ("low", "high")]
    bar = [(Bbox([[x - 1, ends[0]], [x + 1, ends[1]]]), 1.0)] if np.isfinite(ends).all() else []
    return [(Bbox([[x - 5, y - 5], [x + 5, y + 5]]), 3.0), *bar]


def name_rows(fig: Figure, axes: Sequence[Axes], names: Sequence[str], what: str = "method") -> None:
    """Rows of narrow panels side by side, the first on top, each under its name, which runs over all of them: beside
    the panels the names would take most of a column's width. ``what``: of a row."""
    axes[0].set_yticks([])
    axes[0].set(ylabel=what, ylim=(len(names) - 0.55, -0.8))
    across = blended_transform_factory(fig.transFigure, axes[-1].transData)
    for place, name in enumerate(names):
        text = axes[-1].text(0.08, place - 0.27, name, transform=across, fontsize=style.MIN_FONT, va="bottom")
        texts.outline(text).set_in_layout(False)
    for ax in axes:
        ax.grid(axis="y", visible=False)
