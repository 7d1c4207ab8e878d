"""What is written over, in and under the panels of a figure: letters, titles, notes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from matplotlib.text import Text
from matplotlib.transforms import blended_transform_factory

from paper_figures.style import FONT, MIN_FONT

if TYPE_CHECKING:
    import pandas as pd

BOLD: dict[str, Any] = {"weight": "bold", "size": FONT}
LEFT = 0.01  # of the width of a figure, from which texts begin that are wider than their panels
TITLE = 46  # characters of a title in bold that fit a column
INTERVAL = "bars: 95 % t interval of the mean"


def letter(axes: Sequence[Axes], *, from_the_left: bool = False) -> None:
    """Put (a), (b), ... before the titles of the panels.

    Args:
        from_the_left: titles begin at the figure's left edge, above the names beside the panels; for long ones.
    """
    for index, ax in enumerate(axes):
        ax.set_title(f"({chr(ord('a') + index)}) {ax.get_title(loc='left')}".rstrip())
        if from_the_left:
            title: Text = ax._left_title  # type: ignore[attr-defined]  # there is no public one
            across: Any = ax.figure.transFigure
            down: Any = ax.transAxes + ax.titleOffsetTrans  # type: ignore[attr-defined]
            title.set_transform(blended_transform_factory(across, down))
            title.set_x(LEFT)


def title_legend(fig: Figure, drawn: Iterable[Any], labels: Iterable[str], title: str, **options: Any) -> None:
    """The legend above all panels, in two columns where nothing else is said, under a title that says what is seen."""
    fig.legend(
        list(drawn),
        list(labels),
        title=in_lines(title),
        title_fontproperties=BOLD,
        loc="outside upper center",
        **({"ncols": 2} | options),
    )


def in_lines(title: str) -> str:
    """A title over all panels, broken between words alone and never before a %: joined again it is what it was."""
    return textwrap.fill(title.replace(" %", "\u00a0%"), TITLE, break_on_hyphens=False).replace("\u00a0", " ")


def headline(fig: Figure, title: str) -> None:
    """A title over all panels that says what is seen, where no legend of the figure carries it."""
    fig.suptitle(in_lines(title), fontproperties=BOLD, x=LEFT, ha="left")


def note(fig: Figure, text: str) -> None:
    """Write one or more lines under the figure (n, spread, scale), and keep the axes clear of them."""
    width = int(fig.get_figwidth() * 72 / (0.55 * MIN_FONT))  # characters of a line, none of which may be cut off
    text = "\n".join(textwrap.fill(line, width) for line in text.split("\n"))
    lines = text.count("\n") + 1
    height = (lines * MIN_FONT * 1.25 + 3) / 72 / fig.get_figheight()
    engine = fig.get_layout_engine()
    if engine is not None:
        engine.set(rect=(0, height, 1, 1 - height))  # type: ignore[call-arg]
    fig.text(LEFT, 2 / 72 / fig.get_figheight(), text, fontsize=MIN_FONT, color="#444444", va="bottom", ha="left")


def spread(n: int | Sequence[int], what: str = "seeds", bars: str = INTERVAL, *, scale: str = "") -> str:
    """The standard sentence for a note: how many repeats a point stands for and what the bars or bands show."""
    counts = sorted({int(k) for k in n}) if not isinstance(n, int) else [n]
    text = "–".join(str(k) for k in (counts if len(counts) < 3 else (counts[0], counts[-1])))
    line = f"n = {text} {what}" if counts != [1] else f"n = 1 {what.rstrip('s')}, no spread"
    if counts != [1] and bars:
        line += f"; {bars}" + (", none where n = 1" if counts[0] == 1 and "t interval" in bars else "")
    return line + (f"; scale {scale}" if scale else "")


def annotate(
    fig: Figure,
    n: int | Sequence[int],
    *,
    what: str = "seeds",
    bars: str = INTERVAL,
    scale: str = "",
    extra: str | Iterable[str] = "",
) -> None:
    """State n and spread under the figure, and below it ``extra``, a line for each part that is not empty."""
    parts = [extra] if isinstance(extra, str) else extra
    note(fig, "\n".join(part for part in (spread(n, what, bars, scale=scale), *parts) if part))


def share_of_bytes(more: str = "") -> str:
    """The label of an axis with bytes sent, in percent of an fp32 all-reduce; it says what they are of a bf16 one."""
    return f"gradient bytes sent{more}\n(% of an fp32 all-reduce; of bf16: twice that)"


def untested(runs: pd.DataFrame, width: int = 120) -> str:
    """The EDGC policies of a table of runs that did not act, in words for a note; empty where all did."""
    from experiments.common.acting import idle

    names = idle(runs)
    text = f"Not tested, for the policy did not act: {', '.join(names)}."
    return textwrap.fill(text, width) if names else ""


def outline(text: Text) -> None:
    """A white edge, so that text stays readable over lines and markers."""
    text.set_path_effects([Stroke(linewidth=2, foreground="white"), Normal()])


def message(ax: Axes, text: str) -> None:
    """Say inside a panel why it has no data (so that no panel is silently empty)."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", fontsize=MIN_FONT, wrap=True)
