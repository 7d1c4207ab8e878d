"""The first figure that a reader sees: what a few methods cost and send, each named at its point.

``python -m paper_figures hero --results results/reference/workstation`` writes it for light and for dark pages too.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import rgb_to_hsv, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from experiments.common.files import atomic_write
from paper_figures import style
from paper_figures.families import Family

TABLES = ("methods/summary.csv", "methods/table.csv")
CAPTION = """\
**What compression costs and saves.** Validation loss above uncompressed training of the same seed (nats; 0.01 nats
are about 1 % of perplexity) against the gradient bytes sent, in percent of an fp32 all-reduce. Left and down is
better. Points are means over seeds, bars 95 % t intervals. Drawn are at most eight methods less than 0.1 nats off:
EDGC, those that no other one beats in both, then the next best, one of two alike; all are in figure ``methods``."""
MOST, NEAR = 8, 0.1  # points; nats
PALE, EDGE, GRID = "#E6E6E6", "#8B949E", "#30363D"  # text, frame and grid on a dark page
PAGE = {"light": "#FFFFFF", "dark": "#0D1117"}
DARK, LIGHTER = 0.65, 0.45  # value of a colour that a dark page would swallow, and how far it goes towards white
ALIKE = 0.15, 0.004  # rows so near each other, in ln(bytes) and in nats, are shown as one
# where a name may stand: points from its marker, and how it is aligned there
PLACES = tuple(
    ((x * (9 if abs(x) == 1 else 0), y), align)
    for y in (8, -8, 17, -17, 27, -27, 37, -37, 50, -50)
    for x, align in ((1, "left"), (-1, "right"), (0, "center"))
)
TICKS = (2, 5, 10, 20, 50, 100)


def draw(results: Path) -> Figure:
    """Gap to uncompressed training (mean, 95 % t interval) against percent of the fp32 bytes, each point named."""
    return drawn(results, "light")


def drawn(results: Path, page: str) -> Figure:
    """As :func:`draw`, for a ``light`` or a ``dark`` page."""
    summary = style.read(results, "methods", "summary.csv")
    settings = style.read(results, "methods").drop_duplicates("variant").set_index("variant")
    shown = chosen(summary)
    looks = [style.look(settings.loc[variant]) for variant in shown["variant"]]
    fig, (ax,) = style.figure(width=style.TEXT, height=3.6)
    ax.set(xscale="log", xlabel="gradient bytes sent (% of an fp32 all-reduce, log scale; of bf16: twice that)")
    ax.set_ylabel("validation loss above uncompressed (nats)")
    percent = 100 * shown["bytes_ratio_mean"]
    style.plain(ax.xaxis, [tick for tick in TICKS if percent.min() / 2 < tick < 2 * percent.max()])
    ax.set_title("\n".join(textwrap.wrap(title(shown), 92)))
    idle = shown.loc[shown["verdict"] == "not tested", "label"]
    said = f"Rank never moved, so the policy was not tested: {', '.join(idle)}." if len(idle) else ""
    style.annotate(fig, list(shown["n_ok"]), scale=results.name, extra=textwrap.fill(said, 120))
    points(fig, ax, shown, looks, page)
    if page == "dark":
        darken(fig, ax)
    return fig


def chosen(summary: pd.DataFrame) -> pd.DataFrame:
    """The rows that are drawn: EDGC, the front of loss against bytes, then the smallest losses."""
    near = summary[(summary["method"] != "none") & (summary["gap_nats_mean"] < NEAR)].copy()
    ordered = near.sort_values(["bytes_ratio_mean", "gap_nats_mean"])
    best = ordered["gap_nats_mean"].cummin()
    near["front"] = (ordered["gap_nats_mean"] <= best).reindex(near.index)
    near["edgc"] = (near["method"] == "edgc") & (near["policy"] == "cqm")
    first = near.sort_values(["edgc", "front", "gap_nats_mean"], ascending=[False, False, True])
    kept: list[pd.Series] = []
    for _, row in first.iterrows():
        if len(kept) < MOST and not any(_alike(row, other) for other in kept):
            kept.append(row)
    return pd.DataFrame(kept).sort_values("bytes_ratio_mean")


def _alike(row: pd.Series, other: pd.Series) -> bool:
    """Whether two rows would be drawn one on the other."""
    near_bytes = abs(np.log(row["bytes_ratio_mean"] / other["bytes_ratio_mean"])) < ALIKE[0]
    return bool(near_bytes and abs(row["gap_nats_mean"] - other["gap_nats_mean"]) < ALIKE[1])


def title(shown: pd.DataFrame) -> str:
    """What is seen: the method of fewest bytes that loses no more than EDGC, if there is one."""
    mine = shown[shown["edgc"]].sort_values("bytes_ratio_mean", ascending=False)
    if mine.empty:
        return "Validation loss against bytes sent"
    edgc = mine.iloc[0]
    fewer = shown["bytes_ratio_mean"] < edgc["bytes_ratio_mean"]
    better = shown[~shown["edgc"] & fewer & (shown["gap_nats_mean"] <= edgc["gap_nats_mean"])]
    if better.empty:
        return f"No method shown sends fewer bytes than {edgc['label']} at no more loss"
    row = better.sort_values("bytes_ratio_mean").iloc[0]
    mine_percent, percent = 100 * edgc["bytes_ratio_mean"], 100 * row["bytes_ratio_mean"]
    sends = f"sends {percent:.0f} % of the bytes, not {mine_percent:.0f} %"
    return f"{row['label']} loses no more in the mean than {edgc['label']} and {sends}"


def points(fig: Figure, ax: Axes, shown: pd.DataFrame, looks: list[Family], page: str) -> None:
    """A marker with its interval a row, and its name at the first place beside it that nothing else takes."""
    for own, (_, row) in zip(looks, shown.iterrows(), strict=True):
        x, y = 100 * row["bytes_ratio_mean"], row["gap_nats_mean"]
        bars = [[y - row["gap_nats_low"]], [row["gap_nats_high"] - y]]
        look = seen(own, page)
        drawn = ax.errorbar(x, y, yerr=bars, markersize=7, elinewidth=1.0, **look.marks())
        if not look.filled:
            drawn[0].set_markerfacecolor(PAGE[page])
    ax.axhline(0, color="#888888", linewidth=0.8)
    ax.set_xlim(100 * shown["bytes_ratio_mean"].min() / 1.4, 100 * shown["bytes_ratio_mean"].max() * 2.0)
    ax.margins(y=0.12)
    fig.canvas.draw()  # or where things are is not known yet
    taken = [box for _, row in shown.iterrows() for box in boxes(ax, row)]
    for _, row in shown.iterrows():
        text = ax.annotate(row["label"], (100 * row["bytes_ratio_mean"], row["gap_nats_mean"]), (0, 0),
                           textcoords="offset points", va="center", fontsize=style.FONT)  # fmt: skip
        text.set_path_effects([style.Stroke(linewidth=2, foreground=PAGE[page]), style.Normal()])
        for place, align in PLACES:
            text.set(position=place, horizontalalignment=align)
            box = text.get_window_extent()
            inside = ax.bbox.x0 <= box.x0 and box.x1 <= ax.bbox.x1
            if inside and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)


def boxes(ax: Axes, row: pd.Series) -> list[Bbox]:
    """What the marker and the interval of a row take, in pixels."""
    point = (100 * row["bytes_ratio_mean"], row["gap_nats_mean"])
    x, y = ax.transData.transform(point)
    ends = [ax.transData.transform((point[0], row[f"gap_nats_{end}"]))[1] for end in ("low", "high")]
    found = [Bbox([[x - 6, y - 6], [x + 6, y + 6]])]
    return [*found, Bbox([[x - 3, ends[0]], [x + 3, ends[1]]])] if np.isfinite(ends).all() else found


def seen(look: Family, page: str) -> Family:
    """The look, lighter on a dark page where its own colour would be lost."""
    lightness, *_ = rgb_to_hsv(to_rgb(look.colour))[::-1]
    if page == "light" or lightness > DARK:
        return look
    colour = tuple((1 - LIGHTER) * part + LIGHTER for part in to_rgb(look.colour))
    return look._replace(colour=to_hex(colour))


def darken(fig: Figure, ax: Axes) -> None:
    """Colours of a dark page."""
    fig.set_facecolor(PAGE["dark"])
    ax.set_facecolor(PAGE["dark"])
    ax.grid(color=GRID)
    ax.tick_params(colors=PALE)
    for spine in ax.spines.values():
        spine.set_edgecolor(EDGE)
    for text in (ax.xaxis.label, ax.yaxis.label, ax._left_title, *ax.texts, *fig.texts):  # type: ignore[attr-defined]
        text.set_color(PALE)


def pages(results: Path, out: Path) -> list[Path]:
    """Write ``hero-light.svg`` and ``hero-dark.svg`` to ``out``."""
    written = []
    for page in PAGE:
        path = out / f"hero-{page}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, style.svg(drawn(results, page)))
        written.append(path)
    return written
