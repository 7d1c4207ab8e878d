"""One look for every figure: colours and markers of methods, sizes, axes, and how long an error bar is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from edgc.config import methods
from edgc.control.settings import PolicyConfig

if TYPE_CHECKING:
    import pandas as pd

COLUMN = 3.35  # inches, one column of a two-column page: every figure is as wide
TALLEST = 2.9 * COLUMN  # inches; a higher one does not fit a page beside its caption
FONT = 7.5  # points at print size; nothing is set below MIN_FONT
MIN_FONT = 7.0
THEME = {
    "font.size": FONT,
    "axes.labelsize": FONT,
    "axes.titlesize": FONT,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.labelsize": MIN_FONT,
    "ytick.labelsize": MIN_FONT,
    "legend.fontsize": MIN_FONT,
    "legend.title_fontsize": MIN_FONT,
    "legend.framealpha": 0.85,
    "legend.edgecolor": "none",
    "legend.borderpad": 0.2,
    "legend.handlelength": 1.8,
    "legend.labelspacing": 0.25,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.4,
    "grid.color": "#dddddd",
    "xtick.bottom": True,
    "ytick.left": True,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.formatter.useoffset": False,
    "errorbar.capsize": 2,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "svg.hashsalt": "edgc",  # or names inside the file differ from one drawing to the next
    "figure.constrained_layout.use": True,
}

Line = str | tuple[int, tuple[float, ...]]


class Family(NamedTuple):
    """Look of one family of methods in every figure."""

    key: str
    label: str
    colour: str
    marker: str
    line: Line = "-"

    @property
    def filled(self) -> bool:
        """True where its markers are filled: those of four bits are open."""
        return not self.key.endswith("_int4")

    def marks(self, line: Line = "", *, filled: bool | None = None) -> dict[str, Any]:
        """matplotlib's keywords for points of this look, joined by ``line`` (none by default).

        ``filled``: as the look says by default; given where the fill stands for something else.
        """
        face = {} if (self.filled if filled is None else filled) else {"markerfacecolor": "white"}
        return {"color": self.colour, "marker": self.marker, "linestyle": line} | face


# Methods, and policies that have a look of their own, as their files say.
_REGISTERED = [
    Family(kind.method if kind.look is PolicyConfig.look else getattr(kind, "policy", kind.method), *kind.look)
    for kind in methods()
]
# Okabe-Ito colours first; the marker differs too, so that grey print and every colour vision can tell them apart.
FAMILIES: dict[str, Family] = {
    f.key: f
    for f in (
        *{look.key: look for look in reversed(_REGISTERED)}.values(),
        Family("quantize_int8", "int8 of every entry", "#6B6B00", r"$\otimes$", (0, (4, 1, 1, 1))),
        Family("quantize_int4", "int4 of every entry", "#C8B400", r"$\oplus$", (0, (2, 1))),
        Family("quantize_int2", "int2 of every entry", "#E8E080", r"$\odot$", (0, (1, 1))),
        Family("selective", "Selective (Optimus-CC)", "#CC79A7", "p", (0, (5, 1, 1, 1, 1, 1))),
        Family("factors_bf16", "PowerSGD, bf16 factors", "#7FB2D9", "8", (0, (6, 2))),
        Family("factors_int8", "PowerSGD, int8 factors", "#0A3A75", "H", (0, (3, 1))),
        Family("factors_int6", "PowerSGD, int6 factors", "#007A80", "$6$", (0, (2, 2))),
        Family("factors_int4", "PowerSGD, int4 factors", "#00B0A0", "*", (0, (5, 1))),
        Family("edgc_int8", "EDGC, int8 factors", "#AA3377", "d", (0, (7, 1, 2, 1))),
        Family("edgc_int4", "EDGC, int4 factors", "#EE6677", r"$\diamond$", (0, (9, 1))),
        Family("given", "ranks given, after a warm-up", "#4B0F6B", r"$\clubsuit$"),
        Family("other", "other", "#888888", ".", ":"),
    )
}
ESTIMATORS = {
    "histogram": Family("histogram", "histogram", "#0072B2", "o"),
    "gaussian": Family("gaussian", "Gaussian", "#D55E00", "s", "--"),
    "vasicek": Family("vasicek", "Vasicek", "#009E73", "^", "-."),
    "released": Family("released", "released code (discrete)", "#CC79A7", "v", ":"),
}
ARCHITECTURES = {
    "gpt": Family("gpt", "GPT", "#0072B2", "o"),
    "bert": Family("bert", "BERT", "#D55E00", "s", "--"),
}
MARKERS = "osD^vP<>Xph*"


def by_name(name: str) -> Family:
    """The family of a variant or method by its name, such as ``powersgd_r32_int4``, ``edgc_released``, ``int8``."""
    method, *rest = name.split("_")
    kind = "factors" if method == "powersgd" else method
    keys = [f"quantize_{name}", *(f"{kind}_{part}" for part in rest), *rest, method]
    return FAMILIES[next((key for key in keys if key in FAMILIES), "other")]


def look(run: pd.Series) -> Family:
    """The family of a row of a methods table, by its settings; the type of the factors tells some apart."""
    method, policy, dtype = run["method"], run["policy"], run["factor_dtype"]
    keys = ["selective"] if str(run.get("label", "")).startswith("selective") else []
    if method == "powersgd":
        keys = [f"factors_{dtype}", *keys]
    elif method == "edgc":
        keys = ["given"] if policy in ("fixed", "schedule") else [policy, f"edgc_{dtype}", *keys]
    elif method == "quantize":
        keys = [f"quantize_int{run.get('bits', 0):g}", *keys]
    return FAMILIES[next((key for key in [*keys, method] if key in FAMILIES), "other")]


def stage_colours(count: int) -> list[tuple[float, float, float]]:
    """One colour per pipeline stage, ordered from dark (first) to light (last)."""
    return list(sns.color_palette("viridis", n_colors=count + 1)[:count])


def figure(
    rows: int = 1, columns: int = 1, *, height: float | None = None, **options: object
) -> tuple[Figure, list[Axes]]:
    """A themed figure at its print size and its axes, row by row. ``height``: inches."""
    sns.set_theme(context="paper", style="whitegrid", font="DejaVu Sans", rc=THEME)
    height = height or 0.72 * COLUMN * rows / columns
    fig, axes = plt.subplots(rows, columns, figsize=(COLUMN, height), squeeze=False, **options)
    return fig, list(axes.flat)


def half_interval(values: pd.Series) -> float:
    """Half the 95 % t interval of the mean of some values; nan with fewer than two."""
    from scipy.stats import t

    known = values.dropna()
    return float(t.ppf(0.975, len(known) - 1) * known.sem()) if len(known) > 1 else math.nan


def handles(*axes: Axes) -> tuple[list[Any], list[str]]:
    """Legend entries of one or several panels, each label once, drawn without error bars."""
    entries: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle[0] if isinstance(handle, ErrorbarContainer) else handle)
    return list(entries.values()), list(entries)


def plain(axis: Axis, ticks: Sequence[float] | None = None) -> None:
    """Write the ticks of a log axis as plain numbers; ``ticks`` fixes where they are."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if ticks is None else FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())


def log_x(ax: Axes, ticks: Sequence[float], room: float | None = None) -> None:
    """A log axis of x with plain numbers; ``room``: factor by which it goes on beyond the first and the last tick."""
    ax.set_xscale("log")
    plain(ax.xaxis, ticks)
    if room and len(ticks):
        ax.set_xlim(ticks[0] / room, ticks[-1] * room)


def log_y(ax: Axes) -> None:
    """A log axis of y with plain numbers."""
    ax.set_yscale("log")
    plain(ax.yaxis)


def plain_linear(axis: Axis, most: int = 5) -> None:
    """At most ``most`` ticks on a linear axis, as plain numbers with a true minus sign and no trailing zeros."""
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(value, 12) + 0:g}".replace("-", "−")))
