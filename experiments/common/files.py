"""Files written whole or not at all, and the disks that they lie on."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from edgc.errors import UserError

# What the system says of a full disk, a quota and a limit, and torch and NumPy where they write arrays.
FULL = re.compile(
    r"no space left|disk quota exceeded|file too large|enforce fail at inline_container|\d+ requested and \d+ written",
    re.IGNORECASE,
)
FULL_BYTES = 2**20
ROOT = Path(__file__).resolve().parents[2]  # of the project
KEPT = ROOT / "results" / "reference"


def place_of_output(results: Path) -> Path:
    """Folder for figures and pages of ``results``: itself, and for kept results one in ``build``, outside the tree."""
    whole = results.resolve()
    return ROOT / "build" / whole.relative_to(KEPT.parent) if whole.is_relative_to(KEPT) else results


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it onto ``path`` on success, remove it on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path`` so that a reader sees the old file or the new one, never a part."""
    with atomic_path(path) as temporary:
        if isinstance(content, bytes):
            temporary.write_bytes(content)
        else:
            temporary.write_text(content, encoding="utf-8")


def check_writable(folder: Path) -> None:
    """Raise ``UserError`` when files cannot be created in ``folder`` (it is made if missing)."""
    probe = folder / f".write-test.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        fix = "make it writable or choose another results folder"
        raise UserError(f"results folder is not writable: {error.strerror}", where=folder, fix=fix) from None


def no_space(error: str, folder: Path) -> bool:
    """True for an error that comes from a full disk, by its words or because the disk of ``folder`` is full."""
    return bool(FULL.search(error)) or shutil.disk_usage(folder).free < FULL_BYTES
