"""Figures inside a page: images small enough to be embedded, captions as HTML, the text in place of an image."""

import base64
import io
import re
from dataclasses import dataclass
from pathlib import Path

from docutils.core import publish_parts
from markupsafe import Markup
from PIL import Image

from experiments.common.figures import BENCHMARKS, FIGURES, caption
from experiments.pages.kept import Kept, Link, is_simulated
from experiments.spec import matrix

COLOURS = 256  # of an embedded PNG: a palette keeps lines and text sharp at a quarter of the bytes
DOCUTILS = {
    "file_insertion_enabled": False,
    "raw_enabled": False,
    "_disable_config": True,
    "report_level": 5,
    "syntax_highlight": "none",
}
# In what docutils writes: an attribute with an address, and addresses that run nothing.
ADDRESS = re.compile(r' (href|src|data|poster)="([^"]*)"')
PLAIN = re.compile(r"https?://|mailto:|[\w.#/-]+(?:[#?/]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Picture:
    """A figure of the page. ``group`` is empty for those of studies, else the machine that was measured."""

    name: str
    path: Path
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
        simulated = any(is_simulated(matrix.load_study(study)) for study in described.intersection(FIGURES[name]))
        places.append((name, kept.root / "figures", simulated, ""))
    # Of a frozen study only the committed figure is left.
    places += [(name, kept.root / "figures", False, "") for name in matrix.frozen() if name not in FIGURES]
    for machine in sorted(kept.benchmarks.iterdir()) if kept.benchmarks else ():
        folder = machine / "figures" if kept.reference else machine
        places += [(name, folder, False, machine.name) for name in BENCHMARKS]
    return [picture for place in places if (picture := _picture(kept, *place))]


def _picture(kept: Kept, name: str, folder: Path, simulated: bool, group: str) -> Picture | None:
    files = {kind: path for kind in ("png", "svg", "pdf") if (path := folder / f"{name}.{kind}").is_file()}
    shown = {kind: path for kind, path in files.items() if kind != "pdf"}
    if not shown:
        return None
    # An SVG beside a PNG is taken where it is not much larger: it stays sharp at every size.
    best = min(shown.values(), key=lambda path: path.stat().st_size)
    text = caption(name) if name in {*FIGURES, *BENCHMARKS} else f"**{matrix.load_study(name).title}.**"
    links = [kept.link(path, kind.upper()) for kind, path in files.items()]
    title, rest = split_title(text, name)
    words = alternative(title, files.get("png"))
    return Picture(name, best, title, words, html(rest), simulated, group, links, *embed(best))


def heading(path: Path) -> str:
    """Title of a figure, which says what is seen, from its PNG; empty where it has none."""
    with Image.open(path) as opened:
        return str(opened.info.get("Title", ""))


def alternative(title: str, png: Path | None) -> str:
    """Text in place of an image: the title of its caption and, of a PNG, its own, which says what is seen."""
    seen = heading(png) if png else ""
    return f"{title}{'' if title.endswith('?') else '.'} {seen}" if seen else title


def split_title(text: str, name: str) -> tuple[str, str]:
    """The words in bold with which a caption begins, and the rest; without such words the figure's name and all."""
    found = re.match(r"\*\*(.+?)\*\*[.,:]?\s*", text, re.DOTALL)
    if not found:
        return name, text
    rest = text[found.end() :]
    return plain(found[1]).rstrip(".:"), rest[:1].upper() + rest[1:]


def plain(text: str) -> str:
    """reStructuredText without its marks."""
    return " ".join(re.sub(r"\*\*|``|(?<!\w)\*(?=\w)|(?<=\w)\*(?!\w)", "", text).split())


def html(text: str) -> Markup:
    """A caption in reStructuredText as HTML; what is not markup is escaped.

    Links keep their address where it is of the web, of mail, or of a file beside the page; nothing is fetched.
    """
    body = publish_parts(text, writer="html5", settings_overrides=DOCUTILS)["body"]  # docutils escapes
    return Markup(ADDRESS.sub(lambda found: found[0] if found[1] == "href" and PLAIN.match(found[2]) else "", body))


def embed(path: Path) -> tuple[str, int, int]:
    """An image file as a ``data:`` address, with its width and height on the page in CSS pixels."""
    if path.suffix == ".svg":
        content, kind = path.read_bytes(), "svg+xml"
        # Width and height of the view box, in its units; 4 : 3 where there is none.
        box = re.search(rb'viewBox="[\d.+-]+[ ,]+[\d.+-]+[ ,]+([\d.]+)[ ,]+([\d.]+)"', content)
        width, height = (round(2 * float(box[1])), round(2 * float(box[2]))) if box else (1200, 900)
    else:
        with Image.open(path) as opened:
            flat = Image.new("RGB", opened.size, "white")
            flat.paste(opened, mask=opened.convert("RGBA").getchannel("A"))
        width, height = flat.size  # drawn at 200 dpi for print, read at about 100 on a screen
        buffer, kind = io.BytesIO(), "png"
        palette = flat.quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        palette.save(buffer, "PNG", optimize=True)
        content = buffer.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}", width, height
