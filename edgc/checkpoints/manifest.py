"""Folders that are there whole or not at all: names, sizes and checksums of their files are written down last.

A folder is filled under a temporary name, gets its ``manifest.json``, is brought to the disk and then renamed. So a
folder with its final name was complete once, and :func:`check` says whether each file still is what it was then. The
manifest holds a checksum of itself: no byte of the folder can change without being found.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgc.errors import UserError

FORMAT = 1
NAME = "manifest.json"


class DamagedCheckpoint(UserError):
    """A file of a checkpoint is missing, cut short or altered; an older checkpoint is to be used.

    Attributes:
        folder: the checkpoint.
        file: the file in it, as a relative path.
        problem: what is wrong with the file.
    """

    def __init__(self, folder: Path, file: str, problem: str) -> None:
        self.folder, self.file, self.problem = Path(folder), file, problem
        message = f"checkpoint {self.folder.name} is damaged: file {file} {problem}"
        super().__init__(message, where=folder, fix="use an older checkpoint")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder, self.file, self.problem)


@dataclass(frozen=True)
class Entry:
    """Size in bytes and SHA-256 of one file; "" if it is so large that nobody reads through it to compare."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Content of a folder: ``about`` in JSON's types, and ``files`` by their relative paths, with ``/``."""

    about: dict[str, Any]
    files: dict[str, Entry]


def entry(path: Path) -> Entry:
    """Size and checksum of a file as it is now."""
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
        return Entry(handle.tell(), digest)


def files_below(folder: Path) -> list[str]:
    """Relative paths of all files in ``folder`` but its manifest, sorted."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return sorted(name for name in names if name != NAME)


def write(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` and bring it to the disk, with the names of everything in ``folder``."""
    with (folder / NAME).open("wb") as handle:
        handle.write(_encode(manifest))
        handle.flush()
        os.fsync(handle.fileno())
    for path in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(path)


def read(folder: Path) -> Manifest:
    """The manifest of ``folder``.

    Raises:
        DamagedCheckpoint: it is missing, or not as it was written.
        UserError: it is of a later version of this package.
    """
    try:
        text = (folder / NAME).read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(folder, NAME, _reason(error)) from None
    try:
        content = json.loads(text)
        manifest = Manifest(dict(content["about"]), {name: Entry(**item) for name, item in content["files"].items()})
        intact = text == _encode(manifest, content["format"])
    except (ValueError, TypeError, KeyError, AttributeError):
        intact = False
    if not intact:
        raise DamagedCheckpoint(folder, NAME, "was altered or cut short")
    if content["format"] != FORMAT:
        what = f"the checkpoint has format {content['format']}, this version of edgc reads {FORMAT}"
        raise UserError(what, where=folder, fix="use the version of edgc that wrote it")
    return manifest


def check(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """Compare files of ``folder`` (all, or those called ``names``) with its manifest.

    Raises:
        DamagedCheckpoint: for the first file that is not what it was when written.
    """
    for name in manifest.files if names is None else names:
        if name not in manifest.files:
            raise DamagedCheckpoint(folder, NAME, f"does not list {name}")
        fault = problem(folder / name, manifest.files[name])
        if fault is not None:
            raise DamagedCheckpoint(folder, name, fault)


def problem(path: Path, expected: Entry) -> str | None:
    """Fault of a file that should be as ``expected``, to follow its name in a sentence; None without one."""
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"has {size} bytes instead of {expected.bytes}"
        if expected.sha256 and entry(path) != expected:
            return "has another content than was written"
    except OSError as error:
        return _reason(error)
    return None


def recover(folder: Path) -> None:
    """Bring back the older ``folder`` that a kill inside :func:`publish` has left hidden."""
    old = _old(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)


def publish(partial: Path, folder: Path) -> None:
    """Rename the finished ``partial`` to ``folder``, in place of an older one, for good."""
    recover(folder)
    old = _old(folder)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _encode(manifest: Manifest, version: int = FORMAT) -> bytes:
    def text() -> str:
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    content: dict[str, Any] = {"format": version, **asdict(manifest)}
    content["sha256"] = hashlib.sha256(text().encode()).hexdigest()
    return text().encode()


def _reason(error: OSError) -> str:
    return "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
