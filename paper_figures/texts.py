"""Text over, in and under the panels of a figure: letters, titles, notes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from matplotlib.text import Text
from matplotlib.transforms import blended_transform_factory

from paper_figures import style
from paper_figures.style import FONT, MIN_FONT

if TYPE_CHECKING:
    import pandas as pd

Entries = tuple[list[Any], list[str]]  # of a legend: what is drawn, labels
BOLD: dict[str, Any] = {"weight": "bold", "size": FONT}
LEFT = 0.01  # of the width of a figure, from which texts begin that are wider than their panels
TITLE = 46  # characters of a title in bold that fit a column
INTERVAL = "bars: 95 % t interval of the mean"
SHARE_OF_BYTES = "gradient bytes sent\n(% of an fp32 all-reduce; of bf16: twice that)"  # label of an axis


def finish(
    fig: Figure, axes: Sequence[Axes], title: str, note: str, legend: Entries | None = None, **options: Any
) -> Figure:
    """Finish a figure: letters before the titles of ``axes``, ``title`` above all panels, ``note`` below them.

    Args:
        legend: entries of a legend under the title, which takes the options.
    """
    for index, ax in enumerate(axes):
        ax.set_title(f"({chr(ord('a') + index)}) {ax.get_title(loc='left')}".rstrip())
    if legend is None:
        fig.suptitle(in_lines(title), fontproperties=BOLD, x=LEFT, ha="left")
    else:
        look: dict[str, Any] = {"ncols": 2, "columnspacing": 1.0, "loc": "outside upper center"}
        fig.legend(*legend, title=in_lines(title), title_fontproperties=BOLD, **look | options)
    write_note(fig, note)
    return fig


def legend_below(ax: Axes, center: float, depth: float, entries: Entries | None = None) -> None:
    """A legend of two columns below a panel; ``center`` and ``depth``: of its upper edge, as shares of the panel."""
    entries = entries or style.handles(ax)
    ax.legend(*entries, loc="upper center", bbox_to_anchor=(center, -depth), ncols=2, columnspacing=0.8)


def in_lines(title: str) -> str:
    """A title over all panels, broken between words alone and never before a %: joined again it is what it was."""
    return textwrap.fill(title.replace(" %", "\u00a0%"), TITLE, break_on_hyphens=False).replace("\u00a0", " ")


def write_note(fig: Figure, text: str) -> None:
    """Write one or more lines under the figure (n, spread, scale), and keep the axes clear of them."""
    width = int(fig.get_figwidth() * 72 / (0.55 * MIN_FONT))  # characters of a line, none of which may be cut off
    text = "\n".join(textwrap.fill(line, width) for line in text.split("\n"))
    height = ((text.count("\n") + 1) * MIN_FONT * 1.25 + 3) / 72 / fig.get_figheight()
    if engine := fig.get_layout_engine():
        engine.set(rect=(0, height, 1, 1 - height))  # type: ignore[call-arg]
    fig.text(LEFT, 2 / 72 / fig.get_figheight(), text, fontsize=MIN_FONT, color="#444444", va="bottom", ha="left")


def count_note(n: int | Iterable[int], *extra: str, what: str = "seeds", bars: str = INTERVAL, scale: str = "") -> str:
    """The text of a note: how many repeats a point stands for, what the bars or bands show, then ``extra``, a line each
    that is not empty."""
    counts = [n] if isinstance(n, int) else sorted({int(k) for k in n})
    text = "–".join(str(k) for k in (counts if len(counts) < 3 else (counts[0], counts[-1])))
    line = f"n = {text} {what}" if counts != [1] else f"n = 1 {what.rstrip('s')}, no spread"
    if counts != [1] and bars:
        line += f"; {bars}" + (", none where n = 1" if counts[0] == 1 and "t interval" in bars else "")
    return "\n".join(filter(None, (line + (f"; scale {scale}" if scale else ""), *extra)))


def untested(runs: pd.DataFrame) -> str:
    """The EDGC policies of a table of runs that did not act, in words for a note; empty where all did."""
    from experiments.common.acting import idle

    names = idle(runs)
    return textwrap.fill(f"Not tested, for the policy did not act: {', '.join(names)}.", 120) if names else ""


def failures(runs: pd.DataFrame) -> list[str]:
    """Label, seed and status of the runs without a result, which a figure must not hide."""
    rows = runs[runs["status"] != "ok"].iterrows()
    return [f"{row['label']} seed {row['seed']} ({row['status']})" for _, row in rows]


def label_point(ax: Axes, text: str, place: tuple[float, float], offset: tuple[float, float], **options: Any) -> Text:
    """A text with a white edge, so that it stays readable over lines and markers, ``offset`` points from ``place``."""
    return outline(ax.annotate(text, place, offset, **{"textcoords": "offset points", "va": "center"} | options))


def outline(text: Text) -> Text:
    """A white edge, so that text stays readable over lines and markers."""
    text.set_path_effects([Stroke(linewidth=2, foreground="white"), Normal()])
    return text


def message(ax: Axes, text: str) -> None:
    """Say inside a panel why it has no data (so that no panel is silently empty)."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", fontsize=MIN_FONT, wrap=True)


def name_rows(fig: Figure, axes: Sequence[Axes], names: Sequence[str], what: str = "method") -> None:
    """Rows of narrow panels side by side, the first on top, each under its name, which runs over all of them: beside
    the panels the names would take most of a column's width. ``what``: of a row."""
    axes[0].set_yticks([])
    axes[0].set(ylabel=what, ylim=(len(names) - 0.55, -0.8))
    across = blended_transform_factory(fig.transFigure, axes[-1].transData)
    for place, name in enumerate(names):
        text = axes[-1].text(0.08, place - 0.27, name, transform=across, fontsize=MIN_FONT, va="bottom")
        outline(text).set_in_layout(False)
    for ax in axes:
        ax.grid(axis="y", visible=False)
