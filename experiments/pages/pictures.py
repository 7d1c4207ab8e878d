"""Figures inside a page: images small enough to be embedded, captions as HTML, the text in place of an image."""

import base64
import html
import io
import re
from dataclasses import dataclass
from pathlib import Path

import markdown
from markupsafe import Markup
from PIL import Image

from experiments.common.figures import BENCHMARKS, FIGURES, caption
from experiments.pages.kept import Kept, Link
from experiments.spec import matrix

COLOURS = 256  # of an embedded PNG: a palette keeps lines and text sharp at a quarter of the bytes


@dataclass(frozen=True)
class Picture:
    """A figure of the page. ``group`` is empty for those of studies, else the machine that was measured."""

    name: str
    title: str
    text: str  # in place of the image
    caption: Markup  # without the title
    simulated: bool
    group: str
    files: list[Link]
    source: str  # of the image, as a ``data:`` address
    width: int  # CSS pixels
    height: int

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9_-]+", "-", "-".join(filter(None, ("figure", self.group, self.name))))


def pictures(kept: Kept) -> list[Picture]:
    """Every figure that is there: of studies in the order of the studies, then of benchmarks by machine."""
    described = {*matrix.studies(), *matrix.frozen()}  # a study of a figure may have been removed
    order = {name: place for place, name in enumerate(kept.studies)}
    places = []
    for name in sorted(FIGURES, key=lambda name: (order.get(FIGURES[name][0], len(order)), name)):
        simulated = any(matrix.load_study(study).simulated for study in described.intersection(FIGURES[name]))
        places.append((name, kept.root / "figures", simulated, ""))
    # Of a frozen study only the committed figure is left.
    places += [(name, kept.root / "figures", False, "") for name in matrix.frozen() if name not in FIGURES]
    for machine in sorted(kept.benchmarks.iterdir()) if kept.benchmarks else ():
        folder = machine / "figures" if kept.reference else machine
        places += [(name, folder, False, machine.name) for name in BENCHMARKS]
    return [_picture(kept, *place) for place in places if (place[1] / f"{place[0]}.png").is_file()]


def _picture(kept: Kept, name: str, folder: Path, simulated: bool, group: str) -> Picture:
    png = folder / f"{name}.png"
    text = caption(name) if name in {*FIGURES, *BENCHMARKS} else f"**{matrix.load_study(name).title}.**"
    links = [kept.link(path, path.suffix[1:].upper()) for kind in ("png", "svg", "pdf")
             if (path := png.with_suffix(f".{kind}")).is_file()]  # fmt: skip
    title, rest = split_title(text, name)
    return Picture(name, title, alternative(title, png), rendered(rest), simulated, group, links, *embed(png))


def rendered(text: str) -> Markup:
    """Markdown as HTML; tags in it are text, and links lead to the web, to mail or to files beside the page."""
    shown = markdown.markdown(html.escape(text, quote=False))
    return Markup(re.sub(r' href="(?!(?:https?|mailto):|[^":]*[/?#"])[^"]*"', "", shown, flags=re.IGNORECASE))


def alternative(title: str, png: Path) -> str:
    """Text in place of an image: the title of its caption and the PNG's, which says what is seen."""
    with Image.open(png) as opened:
        seen = str(opened.info.get("Title", ""))
    return f"{title}{'' if title.endswith('?') else '.'} {seen}" if seen else title


def split_title(text: str, name: str) -> tuple[str, str]:
    """The words in bold with which a caption begins, and the rest; without such words the figure's name and all."""
    bold = re.match(r"\*\*(.+?)\*\*[.,:]?\s*", text, re.DOTALL)
    if not bold:
        return name, text
    rest = text[bold.end() :]
    return " ".join(re.sub(r"``|\*", "", bold[1]).split()).rstrip(".:"), rest[:1].upper() + rest[1:]


def embed(png: Path) -> tuple[str, int, int]:
    """An image as a ``data:`` address, with its width and height on the page in CSS pixels."""
    with Image.open(png) as opened:
        flat = Image.new("RGB", opened.size, "white")
        flat.paste(opened, mask=opened.convert("RGBA").getchannel("A"))
    buffer = io.BytesIO()
    palette = flat.quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    palette.save(buffer, "PNG", optimize=True)
    # Drawn at 200 dpi for print, read at about 100 on a screen.
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}", *flat.size
