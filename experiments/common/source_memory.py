"""Remembers from one process to the next what was read from source files of some content.

Snakemake reads the whole project's source whenever it starts, and most of the time nothing has changed since. What is
remembered is found by the content of the file, by the program that reads it, and by the version of Python, so it is
never of something else. The file lies where a user's caches lie and may be deleted at any time.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from experiments.common.files import atomic_write

MOST = 5000  # entries that are kept; a checkout has some hundreds


@functools.cache
def of(reader: Path) -> dict[str, Any]:
    """What ``reader``, a file of source code, has remembered: a dict that is written when the process ends."""
    path = _place(reader)
    memory = _load(path)
    before = len(memory)

    def keep() -> None:
        if len(memory) == before:
            return
        # Others may have written since; where nothing can be written nothing is kept.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            merged = _load(path) | memory
            atomic_write(path, json.dumps(dict(list(merged.items())[-MOST:])))

    atexit.register(keep)
    return memory


def _place(reader: Path) -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = hashlib.sha256(reader.read_bytes() + sys.version.encode()).hexdigest()[:16]
    return caches / "edgc" / f"{reader.stem}-{version}.json"


def _load(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
