"""What mkdocs does beside its own: README as the first page, files outside docs that pages link to, the report.

Pages are written to be read in the repository, where a link may lead to any file of it. On the site such a file lies
under ``repository/``, as it is; of a folder only the name stays.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from mkdocs.structure.nav import Link

from experiments.common.files import atomic_write
from experiments.pages import report
from experiments.pages.kept import Kept

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = "repository"
REPORT = "report.html"
KEPT = Path("results/reference")
SCALE = "workstation"  # of the kept results that the report shows first
DOTS_PER_INCH = 200  # of the committed figures
LINK = re.compile(r'(\]\(|srcset="|src=")([^)\s"#]+)(#[^)\s"]*)?(\)|")')
FOLDER = re.compile(r"\[([^\]]+)\]\(([^)\s#]+)\)")
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+\.png)\)")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def _source(page: str) -> Path:
    return ROOT / "README.md" if page == "index.md" else ROOT / "docs" / page


def _linked(page: str, target: str) -> Path | None:
    """The file or folder of the repository, outside docs, that a page's link leads to."""
    if "://" in target or target.startswith(("#", "mailto:")):
        return None
    path = Path(os.path.normpath(_source(page).parent / target))
    return path if path.exists() and not path.is_relative_to(ROOT / "docs") else None


def on_config(config: Any) -> Any:
    """A folder in the navigation, ``paper/``, stands for its pages: ``index.md``, then the others as it links them."""
    for entry in config.nav or []:
        for title, target in list(entry.items()):
            if isinstance(target, str) and target.endswith("/"):
                folder = ROOT / "docs" / target
                linked = [found[2] for found in FOLDER.finditer((folder / "index.md").read_text(encoding="utf-8"))]
                places = {name: place for place, name in reversed(list(enumerate(["index.md", *linked])))}
                pages = sorted(folder.glob("*.md"), key=lambda path: (places.get(path.name, len(places)), path.name))
                entry[title] = [path.relative_to(ROOT / "docs").as_posix() for path in pages]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs that some page links to."""
    known = set()
    for page in [file.src_uri for file in files.documentation_pages()]:
        for found in LINK.finditer(_source(page).read_text(encoding="utf-8")):
            path = _linked(page, found[2])
            if path is not None and path.is_file() and path not in known:
                known.add(path)
                uri = f"{OUTSIDE}/{path.relative_to(ROOT).as_posix()}"
                # A Markdown file outside docs is shown as text, not as a page.
                uri = uri.removesuffix(".md") + (".txt" if uri.endswith(".md") else "")
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_nav(nav: Any, **_: Any) -> Any:
    """The report comes second; it is no page of Markdown, so the navigation of ``mkdocs.yml`` cannot name it."""
    nav.items.insert(1, Link("The report", REPORT))
    return nav


def on_post_build(config: Any) -> None:
    """Write the report of the kept results, and beside it the tables to which it leads; the kept runs stay out."""
    site = Path(config["site_dir"])
    below = site / OUTSIDE / KEPT
    runs = shutil.ignore_patterns("*-s[0-9]*.parquet")
    shutil.copytree(ROOT / KEPT, below, dirs_exist_ok=True, ignore=runs)
    atomic_write(site / REPORT, report.render(Kept(below / SCALE, site / REPORT)).html)


def _width(path: Path) -> int:
    """On the screen, in CSS pixels: a figure's print size times 1.4, for it is made to be read 8 cm wide."""
    inches = int.from_bytes(path.read_bytes()[16:20], "big") / DOTS_PER_INCH  # the header of a PNG
    return round(1.4 * 96 * inches)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Take README for the first page, make links lead to where files lie on the site."""
    name = page.file.src_uri
    if name == "index.md":
        markdown = (ROOT / "README.md").read_text(encoding="utf-8")
        page.meta["hide"] = ["toc"]  # its room goes to the table of verdicts

    def rewritten(found: re.Match[str]) -> str:
        start, target, anchor, end = found[1], found[2], found[3] or "", found[4]
        path = _linked(name, target)
        if path is None:
            if name == "index.md" and target.startswith("docs/"):
                target = target.removeprefix("docs/")
            return f"{start}{target}{anchor}{end}"
        uri = f"{OUTSIDE}/{path.relative_to(ROOT).as_posix()}"
        uri = uri.removesuffix(".md") + (".txt" if uri.endswith(".md") else "")
        # Links of Markdown are relative to the file, those of HTML to the page's address.
        base = Path(name if start == "](" else page.url).parent
        return f"{start}{os.path.relpath(uri, base)}{anchor}{end}"

    def sized(found: re.Match[str]) -> str:
        path = _linked(name, found[1])
        return found[0] if path is None else f"{found[0]}{{ width={_width(path)} }}"

    def without_folder(found: re.Match[str]) -> str:
        path = _linked(name, found[2])
        return found[1] if path is not None and path.is_dir() else found[0]

    parts = CODE.split(IMAGE.sub(sized, FOLDER.sub(without_folder, markdown)))
    return "".join(part if index % 2 else LINK.sub(rewritten, part) for index, part in enumerate(parts))
