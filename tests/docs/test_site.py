"""The site of the documentation builds strictly, and no page of it asks for anything from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lxml import html

from edgc.strategies import strategies
from tests.integration.test_report_browser import browser

__all__ = ["browser"]  # a fixture

ROOT = Path(__file__).resolve().parents[2]
# What a browser fetches by itself; of links those that are no link to click on.
FETCHED = "//@src | //@srcset | //@poster | //@data | //link/@href"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, html.HtmlElement]:
    return {path: html.parse(str(path)).getroot() for path in sorted(site.rglob("*.html"))}


def test_no_page_asks_for_anything_from_elsewhere_and_all_find_what_they_show(
    site: Path, pages: dict[Path, html.HtmlElement]
) -> None:
    """Images too, which lie outside docs and which mkdocs does not check in HTML."""
    assert len(pages) > 15
    shown = 0
    for path, page in pages.items():
        for address in page.xpath(FETCHED):
            assert not re.match(r"\s*(https?:)?//", address), (path, address)
            # The addresses of 404.html begin at the root of a server.
            if path.name != "404.html" and not address.startswith(("data:", "/")):
                assert (path.parent / re.split("[#?]", address)[0]).exists(), (path, address)
                shown += address.endswith((".png", ".svg"))
    assert shown > 5
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_links_lead_to_files_without_a_server_too(pages: dict[Path, html.HtmlElement]) -> None:
    """Opened from the disk a link to a folder shows what is in it."""
    links = {
        path.parent / link.partition("#")[0]
        for path, page in pages.items()
        for link in page.xpath("//a/@href")
        if not re.match(r"[a-z]+:|/|#|$", link)
    }
    assert len(links) > 100 and not [link for link in links if not link.is_file()]


def test_the_readme_comes_first_and_every_page_of_docs_and_the_api_is_there(site: Path) -> None:
    title = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    assert title in (site / "index.html").read_text(encoding="utf-8")
    names = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")]
    assert not [name for name in names if name.parts[0] != "templates" and not (site / name).is_file()]
    api = (site / "library" / "api.html").read_text(encoding="utf-8")
    own = ["edgc.config.EDGCConfig", "edgc.ddp.register", "edgc.megatron.attach", "edgc.errors.UserError"]
    own += ["edgc.rehearsal.rehearsal.Rehearsal", "edgc.optimizers.muon"]
    own += ["edgc.integrations.lightning.CompressionCallback"]
    for name in (*own, *(f"{kind.__module__}.{kind.__name__}" for kind in strategies())):
        assert f'id="{name}"' in api, name


@pytest.mark.browser
def test_search_finds_pages_without_a_server(site: Path, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    requests: list[str] = []
    page.on("request", lambda sent: requests.append(sent.url))
    page.goto((site / "library" / "ddp.html").as_uri())
    page.focus(".md-search__input")
    page.keyboard.type("error feedback", delay=20)
    page.wait_for_selector(".md-search-result__item")
    assert "findings.html" in " ".join(
        page.locator(".md-search-result__link").evaluate_all("all => all.map(a => a.href)")
    )
    assert not [url for url in requests if not url.startswith(("file:", "data:"))]
