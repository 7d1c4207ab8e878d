"""The framework as a picture: what EDGC does once a window, and what in every iteration. Drawn here, not the paper's.

Numbers in it are the defaults of :class:`edgc.config.EDGCConfig`, which are the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import escape

from edgc.config import EDGCConfig

WIDTH, HEIGHT = 1000, 520
INK, GREY = "#1a1a1a", "#555555"
WINDOW, STEP = "#e8f0fa", "#f4efe4"  # what happens once a window, and in every iteration
EDGES = {WINDOW: "#0072b2", STEP: "#b8860b"}
LINE = 21


def _text(x: float, y: float, text: str, size: int = 15, weight: str = "normal", fill: str = INK) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="middle"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


def _box(x: float, y: float, width: float, title: str, lines: Sequence[str], fill: str) -> str:
    """A box with a bold title and centred lines, as high as they need."""
    height = 44 + LINE * len(lines)
    parts = [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{fill}" '
        f'stroke="{EDGES[fill]}" stroke-width="1.5"/>',
        _text(x + width / 2, y + 27, title, 16, "bold"),
    ]
    parts += [_text(x + width / 2, y + 50 + LINE * row, line) for row, line in enumerate(lines)]
    return "\n".join(parts)


def _arrow(*points: tuple[float, float]) -> str:
    path = " ".join(f"{'M' if not index else 'L'}{x:g} {y:g}" for index, (x, y) in enumerate(points))
    return f'<path d="{path}" fill="none" stroke="{INK}" stroke-width="1.8" marker-end="url(#head)"/>'


def svg() -> str:
    """The picture as SVG, dark on white, so that it can be read on any page."""
    paper = EDGCConfig(method="edgc")
    entropy = paper.entropy
    share = f"{100 * paper.warmup_fraction:g} %"
    every, entries = (
        f"every {1 / entropy.iteration_rate:g}th iteration",
        f"{100 * entropy.entry_rate:g} % of the entries",
    )
    wide, gap, left = 280, 55, 25
    first, second, third = (left + index * (wide + gap) for index in range(3))
    top, low = 75, 330
    body = [
        _text(WIDTH / 2, 32, "EDGC: the rank of the compressed gradients follows their entropy", 19, "bold"),
        _text(WIDTH / 2, 60, f"Once a window of {paper.window} iterations", 15, "normal", GREY),
        _box(
            first,
            top,
            wide,
            "GDS: Gradient Data Sampler",
            [f"reads {entries}", f"at {every}", "gives the entropy H of the gradients"],
            WINDOW,
        ),
        _box(
            second,
            top,
            wide,
            "CQM: Compression",
            ["Quantification Model", "the rank r that keeps the error of", "compression as it was, given H"],
            WINDOW,
        ),
        _box(
            third,
            top,
            wide,
            "DAC: Dynamic Alignment",
            ["Compressor", "a rank for every pipeline stage, so", "that all end their messages together"],
            WINDOW,
        ),
        _arrow((first + wide, top + 55), (second - 3, top + 55)),
        _text(first + wide + gap / 2 - 2, top + 45, "H", 16, "bold"),
        _arrow((second + wide, top + 55), (third - 3, top + 55)),
        _text(second + wide + gap / 2 - 2, top + 45, "r", 16, "bold"),
        _text(
            WIDTH / 2,
            low - 15,
            f"In every iteration, after an uncompressed warm-up of {share} of the run",
            15,
            "normal",
            GREY,
        ),
        _box(first, low, wide, "Backward pass", ["a gradient G for every matrix", "of every replica"], STEP),
        _box(
            second,
            low,
            wide,
            "PowerSGD with error feedback",
            ["G + E, E what was kept back before,", "as two thin factors of r columns"],
            STEP,
        ),
        _box(
            third,
            low,
            wide,
            "Average over replicas",
            ["the factors alone are sent;", "their product goes to the optimizer"],
            STEP,
        ),
        _arrow((first + wide, low + 43), (second - 3, low + 43)),
        _arrow((second + wide, low + 43), (third - 3, low + 43)),
        _arrow((first + wide / 2, low), (first + wide / 2, top + 44 + 3 * LINE + 3)),
        _text(first + wide / 2 + 58, 215 + 33, "sampled entries", 14, "normal", GREY),
        _arrow(
            (third + wide / 2, top + 44 + 3 * LINE),
            (third + wide / 2, 265),
            (second + wide - 40, 265),
            (second + wide - 40, low - 36),
        ),
        _text(third - 10, 255, "ranks until the next window", 14, "normal", GREY),
        _arrow(
            (second + wide / 2 + 40, low + 86),
            (second + wide / 2 + 40, low + 120),
            (second + wide / 2 - 40, low + 120),
            (second + wide / 2 - 40, low + 89),
        ),
        _text(
            second + wide / 2, low + 142, "E: what the rank left out, added in the next iteration", 14, "normal", GREY
        ),
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
