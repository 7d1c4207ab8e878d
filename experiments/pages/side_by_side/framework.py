"""The framework as a picture: what EDGC does once a window, and what in every iteration. Drawn here, not the paper's.

Numbers in it are the defaults of :class:`edgc.config.EDGCConfig`, which are the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import escape

from edgc.config import EDGCConfig

WIDTH, HEIGHT = 1000, 505
INK, GREY = "#1a1a1a", "#555555"
WINDOW, STEP = "#e8f0fa", "#f4efe4"  # what happens once a window, and in every iteration
EDGES = {WINDOW: "#0072b2", STEP: "#b8860b"}
LINE = 21


def _text(x: float, y: float, text: str, size: int = 15, weight: str = "normal", fill: str = INK) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="middle"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


def _box(x: float, y: float, width: float, title: Sequence[str], lines: Sequence[str], fill: str) -> str:
    """A box with a bold title and centred lines below it, as high as they need."""
    bold = len(title)
    height = 23 + LINE * (bold + len(lines))
    parts = [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{fill}" '
        f'stroke="{EDGES[fill]}" stroke-width="1.5"/>'
    ]
    for row, line in enumerate((*title, *lines)):
        heading = row < bold
        parts.append(
            _text(x + width / 2, y + 28 + LINE * row, line, 16 if heading else 15, "bold" if heading else "normal")
        )
    return "\n".join(parts)


def _arrow(*points: tuple[float, float]) -> str:
    path = " ".join(f"{'M' if not index else 'L'}{x:g} {y:g}" for index, (x, y) in enumerate(points))
    return f'<path d="{path}" fill="none" stroke="{INK}" stroke-width="1.8" marker-end="url(#head)"/>'


def svg() -> str:
    """The picture as SVG, dark on white, so that it can be read on any page."""
    paper: Any = EDGCConfig(method="edgc")
    rates = paper.entropy
    when, share = f"at every {1 / rates.iteration_rate:g}th iteration", f"{100 * paper.warmup_fraction:g} %"
    wide, gap, left, top, low = 280, 55, 25, 75, 320
    first, second, third = (left + index * (wide + gap) for index in range(3))
    under, middle = top + 23 + 5 * LINE, second + wide / 2
    gds = [f"reads {100 * rates.entry_rate:g} % of the entries", when, "gives the entropy H of the gradients"]
    cqm = ["given H, the rank r that keeps the", "error of compression as it was"]
    dac = ["a rank for every pipeline stage, so", "that all stages end together"]
    feedback = ["G and E, what was left out before,", "become two factors of r columns"]
    body = [
        _text(WIDTH / 2, 32, "EDGC: the rank of the compressed gradients follows their entropy", 19, "bold"),
        _text(WIDTH / 2, 60, f"Once a window of {paper.window} iterations", fill=GREY),
        _box(first, top, wide, ["GDS:", "Gradient Data Sampler"], gds, WINDOW),
        _box(second, top, wide, ["CQM: Compression", "Quantification Model"], [*cqm, ""], WINDOW),
        _box(third, top, wide, ["DAC: Dynamic", "Alignment Compressor"], [*dac, ""], WINDOW),
        _arrow((first + wide, top + 60), (second - 3, top + 60)),
        _text(first + wide + gap / 2 - 2, top + 50, "H", 16, "bold"),
        _arrow((second + wide, top + 60), (third - 3, top + 60)),
        _text(second + wide + gap / 2 - 2, top + 50, "r", 16, "bold"),
        _box(first, low, wide, ["Backward pass"], ["a gradient G for every matrix", "of every replica"], STEP),
        _box(second, low, wide, ["PowerSGD with error feedback"], feedback, STEP),
        _box(
            third,
            low,
            wide,
            ["Average over replicas"],
            ["only the factors are sent;", "the optimizer gets their product"],
            STEP,
        ),
        _arrow((first + wide, low + 43), (second - 3, low + 43)),
        _arrow((second + wide, low + 43), (third - 3, low + 43)),
        _arrow((first + wide / 2, low), (first + wide / 2, under + 3)),
        _text(first + wide / 2 + 60, 266, "sampled entries", 14, fill=GREY),
        _arrow((third + wide / 2, under), (third + wide / 2, 268), (middle, 268), (middle, low - 3)),
        _text((middle + third + wide / 2) / 2, 258, "ranks until the next window", 14, fill=GREY),
        _arrow((middle + 40, low + 86), (middle + 40, 432), (middle - 40, 432), (middle - 40, low + 89)),
        _text(middle, 453, "E: what the rank leaves out, added in the next iteration", 14, fill=GREY),
        _text(WIDTH / 2, 490, f"In every iteration, after a warm-up without compression of {share} or more", fill=GREY),
    ]
    head = (
        '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0 L10 5 L0 10 z" fill="{INK}"/></marker>'
    )
    about = (
        "Once a window GDS samples gradients and gives their entropy, CQM turns it into a rank, DAC gives every stage "
        "a rank of its own; in every iteration PowerSGD compresses the gradients to these ranks."
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            'font-family="Helvetica, Arial, sans-serif">',
            "<!-- generated: python -m experiments.pages.side_by_side write -->",
            f"<title>EDGC in one picture</title>\n<desc>{escape(about)}</desc>",
            f"<defs>{head}</defs>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            *body,
            "</svg>\n",
        ]
    )
