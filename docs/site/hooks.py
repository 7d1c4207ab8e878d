"""Steps of mkdocs beside its own: README as the first page, files outside docs that pages link to, the report.

Pages are written to be read in the repository, where a link may lead to any file of it. On the site such a file lies
under ``repository/``, as it is; of a folder only the name stays.
"""

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
LINK = re.compile(r'(\]\(|srcset="|src=")([^)\s"#]+)(#[^)\s"]*)?(\)|")')
FOLDER = re.compile(r"\[([^\]]+)\]\(([^)\s#]+)\)")
# An image in two colours follows the reader's system in the repository, and the switch of the site on the site.
PICTURE = re.compile(r'<picture>\s*<source[^>]*srcset="([^"]+)">\s*(<img[^>]*src=")([^"]+)">\s*</picture>')
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def _source(page: str) -> Path:
    return ROOT / "README.md" if page == "index.md" else ROOT / "docs" / page


def _linked(page: str, target: str) -> Path | None:
    """The file or folder of the repository, outside docs, that a page's link leads to."""
    if "://" in target or target.startswith(("#", "mailto:")):
        return None
    path = Path(os.path.normpath(_source(page).parent / target))
    return path if path.exists() and not path.is_relative_to(ROOT / "docs") else None


def _address(path: Path) -> str:
    """Address on the site of a file outside docs; one in Markdown is shown as text, not as a page."""
    address = f"{OUTSIDE}/{path.relative_to(ROOT).as_posix()}"
    return address.removesuffix(".md") + (".txt" if address.endswith(".md") else "")


def on_config(config: Any) -> Any:
    """A folder in the navigation, ``paper/``, stands for its pages: ``index.md``, then the others as it links them."""
    sections = [section for entry in config.nav for section in entry.values() if isinstance(section, list)]
    for entry in (entry for section in sections for entry in section):
        for title, target in entry.items():
            if target.endswith("/"):
                folder = ROOT / "docs" / target
                linked = [link[2] for link in FOLDER.finditer((folder / "index.md").read_text(encoding="utf-8"))]
                names = dict.fromkeys(["index.md", *linked, *sorted(path.name for path in folder.glob("*.md"))])
                entry[title] = [f"{target}{name}" for name in names if (folder / name).is_file() and "/" not in name]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs that some page links to."""
    known = set()
    for page in [file.src_uri for file in files.documentation_pages()]:
        for link in LINK.finditer(_source(page).read_text(encoding="utf-8")):
            path = _linked(page, link[2])
            if path is not None and path.is_file() and path not in known:
                known.add(path)
                files.append(File.generated(config, _address(path), abs_src_path=str(path)))
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
    atomic_write(site / REPORT, report.render(Kept(below / SCALE, site / REPORT)))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Take README for the first page, make links lead to where files lie on the site."""
    name = page.file.src_uri
    if name == "index.md":
        markdown = _source(name).read_text(encoding="utf-8")
        markdown = PICTURE.sub(r'\2\3#only-light">\2\1#only-dark">', markdown)
        page.meta["hide"] = ["toc"]  # its room goes to the table of verdicts

    def rewritten(link: re.Match[str]) -> str:
        start, target, anchor, end = link[1], link[2], link[3] or "", link[4]
        path = _linked(name, target)
        if path is None:
            return f"{start}{target.removeprefix('docs/') if name == 'index.md' else target}{anchor}{end}"
        # Links of Markdown are relative to the file, those of HTML to the page's address.
        base = Path(name if start == "](" else page.url).parent
        return f"{start}{os.path.relpath(_address(path), base)}{anchor}{end}"

    def without_folder(link: re.Match[str]) -> str:
        path = _linked(name, link[2])
        return link[1] if path is not None and path.is_dir() else link[0]

    parts = CODE.split(FOLDER.sub(without_folder, markdown))
    return "".join(part if index % 2 else LINK.sub(rewritten, part) for index, part in enumerate(parts))
