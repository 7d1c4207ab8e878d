"""Debian's manuals as text: packages fetched, checked and unpacked without Debian, prose out of their pages."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from pathlib import Path

import pytest
import yaml

from edgc.errors import UserError
from experiments.data import debian, prose
from experiments.data.corpus import open_source
from experiments.spec.settings import DataConfig

FIRST = "A paragraph of a manual that is long enough to be taken for running text."
SECOND = "Another one, which says something else and is also long enough to be kept here."
LICENCE = "Permission is granted to copy this manual, version 1.0, as long as nobody minds it."
PAGE = f"""<html><head><title>x</title><style>p {{}}</style></head><body>
<nav><p>{SECOND.replace("Another", "A menu entry")}</p></nav>
<div class="big sphinxsidebar"><p>{SECOND.replace("Another", "A sidebar's")}</p></div>
<p>{FIRST.replace(" long", " <em>long</em>").replace(" taken", chr(10) + "taken")}</p>
<pre>for (i = 0; i &lt; 10; i++) print a line of code that is long and no prose at all, you see</pre>
<ul><li><p>{SECOND}</p></li><li>short</li></ul>
<p>1234567890 + 1234567890 = 2469135780; x[i][j] == {{}} || !y; 0x00ff, 0x00fe, 0x00fd</p>
<p>{LICENCE}</p></body></html>"""


def deb(folder: Path, name: str, pages: dict[str, str | bytes]) -> dict[str, str]:
    """Write ``name.deb`` below ``folder``; its entry of the manifest."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for path, text in pages.items():
            content = text.encode() if isinstance(text, str) else text
            entry = tarfile.TarInfo(f"./{path}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    members = [("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", data.getvalue())]
    file = folder / "pool" / f"{name}.deb"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        out.write(b"!<arch>\n")
        for member, content in members:
            out.write(f"{member:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode() + content)
            out.write(b"\n" * (len(content) % 2))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return {"what": name, "licence": "X", "file": f"pool/{name}.deb", "sha256": digest, "pages": "usr/share/doc/x"}


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two packages on a mirror that is a folder; of the first mirror of the list nothing is there."""
    folder = tmp_path / "mirror"
    other = SECOND.replace("Another", "A third")
    packages = {
        "a": deb(folder, "a", {"usr/share/doc/x/b.html": PAGE, "usr/share/doc/x/notes.txt": FIRST}),
        "b": deb(
            folder,
            "b",
            {
                "usr/share/doc/x/later/c.html.gz": gzip.compress(f"<p>{other * 3}</p><p>{FIRST}</p>".encode()),
                "usr/share/doc/x/short.html": f"<p>{LICENCE.replace('1.0', '2.0')}</p>",
                "usr/share/doc/other/d.html": PAGE,
                "usr/share/doc/x/latin.html": f"<p>Caf\xe9 {other * 4}</p>".encode("latin-1"),
            },
        ),
    }
    mirrors = [f"file://{tmp_path}/absent", f"file://{folder}"]
    (tmp_path / "packages.yaml").write_text(yaml.safe_dump({"mirrors": mirrors, "packages": packages}))
    monkeypatch.setattr(debian, "MANIFEST", tmp_path / "packages.yaml")
    monkeypatch.setattr(debian, "SHORTEST_PAGE", 100)
    monkeypatch.setenv("EDGC_CACHE", str(tmp_path / "cache"))
    return folder


def test_pages_become_prose_in_a_fixed_order_without_repetitions(mirror: Path) -> None:
    documents = {one.path: one.text for one in open_source(DataConfig(source="debian")).documents()}
    assert list(documents) == ["a/b.html", "b/later/c.html.gz", "b/latin.html"]
    assert documents["a/b.html"] == f"{FIRST}\n{SECOND}\n{LICENCE}\n"
    assert FIRST not in documents["b/later/c.html.gz"], "a paragraph that another page had"
    assert documents["b/latin.html"].startswith("Caf\xe9 A third")


def test_nothing_is_fetched_or_read_twice(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = [one.sha256 for one in debian.DebianManuals().documents()]
    for file in (mirror / "pool").iterdir():
        file.unlink()
    monkeypatch.setattr(debian, "extract", None)
    assert [one.sha256 for one in debian.DebianManuals().documents()] == first
    assert len(list(debian.DebianManuals(2).documents())) == 2


def test_what_is_not_as_the_manifest_says_is_refused_and_not_kept(mirror: Path, tmp_path: Path) -> None:
    (mirror / "pool" / "b.deb").write_bytes((mirror / "pool" / "a.deb").read_bytes())
    with pytest.raises(
        UserError, match=r"^cannot fetch b\.deb: .*absent.*its SHA-256 is .*, not .*; check the network"
    ):
        list(debian.DebianManuals().documents())
    assert not list((tmp_path / "cache").rglob("b.deb")) and not list((tmp_path / "cache").rglob("*.tmp"))


def test_a_file_that_is_no_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.deb").write_bytes(b"!<arch>\n" + b" " * 30)
    with pytest.raises(UserError, match="not a Debian package"):
        debian.extract(tmp_path / "x.deb", "usr", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("page", [b"", b"\x00\x01", b"<p>", b"<!-- only a comment -->"])
def test_a_page_without_text_has_no_paragraphs(page: bytes) -> None:
    assert prose.paragraphs(page) == []


def test_main_content_is_taken_where_a_page_marks_it() -> None:
    page = f"<body><div><p>{SECOND}</p></div><div role='main'><p>{FIRST}</p></div></body>"
    assert prose.paragraphs(page.encode()) == [FIRST]
