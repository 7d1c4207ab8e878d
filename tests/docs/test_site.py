"""The site of the documentation builds strictly, and no page of it asks for anything from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# An attribute with which a browser fetches something by itself; of links those that are no link to click on.
FETCHED = {"src", "srcset", "poster", "data"}


class Requests(HTMLParser):
    """What a browser that opens the page would fetch, and where its links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [
            value or "" for name, value in attributes if name in FETCHED or (name == "href" and tag == "link")
        ]
        self.links += [value or "" for name, value in attributes if name == "href" and tag == "a"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_no_page_asks_for_anything_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        requests = Requests()
        requests.feed(page.read_text(encoding="utf-8"))
        elsewhere = [address for address in requests.found if re.match(r"(https?:)?//", address.strip())]
        assert not elsewhere, page
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_pages_find_what_they_show(site: Path) -> None:
    """Images too, which lie outside docs and which mkdocs does not check in HTML."""
    shown = 0
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # its addresses begin at the root of a server
            continue
        requests = Requests()
        requests.feed(page.read_text(encoding="utf-8"))
        for address in requests.found:
            if not address.startswith(("data:", "/")):
                assert (page.parent / address.partition("#")[0].partition("?")[0]).exists(), (page, address)
                shown += address.endswith((".png", ".svg"))
    assert shown > 5


def test_links_lead_to_files_without_a_server_too(site: Path) -> None:
    """Opened from the disk a link to a folder shows what is in it."""
    followed = 0
    for page in site.rglob("*.html"):
        requests = Requests()
        requests.feed(page.read_text(encoding="utf-8"))
        for link in {link.partition("#")[0] for link in requests.links if not re.match(r"[a-z]+:|/|#", link)}:
            assert (page.parent / link).is_file() or not link, (page, link)
            followed += 1
    assert followed > 500


def test_the_first_page_is_the_readme(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    title = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    assert title in text


def test_every_page_of_docs_and_the_api_is_there(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        if name.parts[0] == "templates":
            continue
        assert (site / name).is_file(), name
    api = (site / "library" / "api.html").read_text(encoding="utf-8")
    for name in ("edgc.config.EDGCConfig", "edgc.ddp.register", "edgc.megatron.attach", "edgc.errors.UserError"):
        assert f'id="{name}"' in api, name
