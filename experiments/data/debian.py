"""English prose without a hub: manuals and books of Debian, from its documentation packages.

``debian_packages.yaml`` beside this file names the packages with their checksums and licences. They are fetched once
into ``$EDGC_CACHE`` (default ``~/.cache/edgc``), on any system: nothing is installed and no tool of Debian's is needed.
Beside each package stands the prose of its pages, so that it is read from HTML once.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import IO

from pydantic import Field

from edgc.checkpoints.manifest import entry
from edgc.errors import UserError
from experiments.common.files import atomic_path
from experiments.common.source import fingerprint
from experiments.common.yaml_settings import Settings, load_yaml, validate
from experiments.data.corpus import Source
from experiments.data.prose import paragraphs, without_repetitions

PROSE = "experiments.data.prose"  # turns pages into paragraphs; its fingerprint names what it made
MANIFEST = Path(__file__).with_name("debian_packages.yaml")
PAGES = (".html", ".htm", ".xhtml")
SHORTEST_PAGE = 200  # characters
TIMEOUT_SECONDS = 60


class Package(Settings):
    """One package: what it is, under which licence, its ``file`` on a mirror, and the folder of its ``pages``."""

    what: str
    licence: str
    file: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    pages: str


class Manifest(Settings):
    """The packages of the corpus and the mirrors that they are fetched from, tried in this order."""

    mirrors: list[str]
    packages: dict[str, Package]


def read_manifest() -> Manifest:
    """Content of ``debian_packages.yaml``."""
    manifest: Manifest = validate(Manifest, load_yaml(MANIFEST), MANIFEST)
    return manifest


class DebianManuals(Source):
    """Pages of the packages of ``debian_packages.yaml``, as prose, without what they repeat."""

    def __init__(self, max_documents: int | None = None) -> None:
        super().__init__(MANIFEST, max_documents)
        self.manifest = read_manifest()

    def identity(self) -> str:
        files = {name: [package.sha256, package.pages] for name, package in self.manifest.packages.items()}
        return hashlib.sha256(json.dumps([files, fingerprint(PROSE)]).encode()).hexdigest()

    def _texts(self) -> Iterator[tuple[str, str]]:
        yield from without_repetitions(self._pages(), SHORTEST_PAGE)

    def _pages(self) -> Iterator[tuple[str, list[str]]]:
        for name, path in extracted(self.manifest).items():
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                for page, blocks in map(json.loads, lines):
                    yield f"{name}/{page}", blocks


def extracted(manifest: Manifest) -> dict[str, Path]:
    """Files with the pages of every package, ``[path, paragraphs]`` a line; those that are missing are made.

    Raises:
        UserError: a package cannot be fetched, or is not what the manifest says.
    """
    folder = Path(os.environ.get("EDGC_CACHE") or "~/.cache/edgc").expanduser() / "debian"
    packages, code = manifest.packages, fingerprint(PROSE)
    done = {name: folder / f"{name}-{package.sha256[:12]}-{code}.jsonl.gz" for name, package in packages.items()}
    missing = [name for name, path in done.items() if not path.is_file()]
    if missing:
        files = [fetch(manifest.mirrors, packages[name], folder) for name in missing]
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(extract, files, [packages[name].pages for name in missing], [done[name] for name in missing]))
    return done


def fetch(mirrors: list[str], package: Package, folder: Path) -> Path:
    """The package's file in ``folder``, fetched if it is not there.

    Raises:
        UserError: no mirror has it, or its checksum differs, that of a file that was there included.
    """
    path = folder / Path(package.file).name
    if path.is_file():
        if problem := _problem(path, package):
            raise UserError(problem, where=path, fix="delete it: it is fetched again")
        return path
    failures = []
    for mirror in mirrors:
        url = f"{mirror}/{package.file}"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer, atomic_path(path) as temporary:
                with temporary.open("wb") as file:
                    shutil.copyfileobj(answer, file)
                if problem := _problem(temporary, package):
                    raise ValueError(problem)
        except (OSError, ValueError, urllib.error.URLError) as error:
            failures.append(f"{mirror}: {error}")
        else:
            return path
    fix = f"check the network, or put the file into {folder}"
    raise UserError(f"cannot fetch {path.name}: {'; '.join(failures)}", where=MANIFEST, fix=fix)


def _problem(path: Path, package: Package) -> str:
    """Fault of a package's file; empty if it is what the manifest says."""
    digest = entry(path).sha256
    return "" if digest == package.sha256 else f"its SHA-256 is {digest[:12]}..., not {package.sha256[:12]}..."


def extract(package: Path, pages: str, out: Path) -> None:
    """Write the paragraphs of all HTML files below the folder ``pages`` of a ``.deb`` file, in the order of paths."""
    content = {}
    with package.open("rb") as file, tarfile.open(fileobj=_contents(file, package), mode="r:*") as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            if member.isfile() and name.startswith(f"{pages}/") and name.removesuffix(".gz").endswith(PAGES):
                file_in_archive = archive.extractfile(member)
                assert file_in_archive is not None
                page = file_in_archive.read()
                content[name.removeprefix(f"{pages}/")] = gzip.decompress(page) if name.endswith(".gz") else page
    with atomic_path(out) as temporary, gzip.open(temporary, "wt", encoding="utf-8") as lines:
        for name, page in sorted(content.items()):
            if blocks := paragraphs(page):
                lines.write(json.dumps([name, blocks]) + "\n")


def _contents(file: IO[bytes], package: Path) -> IO[bytes]:
    """``file`` at the archive of a package's files: the member ``data.tar.*`` of an ``ar`` archive (deb(5))."""
    file.seek(8)  # past ar's magic; a member's head: 16 bytes of name ... 10 of size from byte 48, 60 in all
    while len(head := file.read(60)) == 60:
        size = int(head[48:58])
        if head.startswith(b"data.tar"):
            return io.BytesIO(file.read(size))
        file.seek(size + size % 2, os.SEEK_CUR)
    raise UserError("not a Debian package", where=package, fix="delete the file and start again")
