"""The folder in which the `datasets` library keeps what it has downloaded, read without importing the library.

Files (`datasets` 5)::

    <HF_DATASETS_CACHE>/<namespace>___<name>/<config>/<version>/<revision>/
        dataset_info.json            splits, rows, shards; its presence means to `datasets` that all is there
        <name>-<split>.arrow         or <name>-<split>-00000-of-00002.arrow ...
    <revision>.incomplete/           beside it while a download runs, and after one that was killed

Without network `datasets` opens the newest folder of a config, and does not look whether its files are whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # the last bytes of every Arrow stream
INCOMPLETE, LOCK, INFO = ".incomplete", "_builder.lock", "dataset_info.json"


@dataclass(frozen=True)
class Copy:
    """A cached dataset: where, which revision, the rows of each split, and all files of rows."""

    folder: Path
    rows: dict[str, int]
    files: tuple[Path, ...]

    @property
    def revision(self) -> str:
        return self.folder.name

    @property
    def config(self) -> str:
        return self.folder.parts[-3]

    def contents(self) -> dict[str, str]:
        """SHA-256 of each file, by name."""
        found = {}
        for path in self.files:
            with path.open("rb") as handle:
                found[path.name] = hashlib.file_digest(handle, "sha256").hexdigest()
        return found


@dataclass(frozen=True)
class State:
    """What the cache holds of one dataset: a whole copy, or the problem in words and what is in the way."""

    copy: Copy | None
    problem: str = ""
    debris: tuple[Path, ...] = ()  # unfinished or damaged folders


def root() -> Path:
    """The cache's folder by the environment, as `datasets` finds it."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    home = Path(os.environ.get("HF_HOME", default))
    return Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets")).expanduser()


def offline() -> bool:
    """Whether the environment forbids `datasets` the network."""
    first = os.environ.get("HF_DATASETS_OFFLINE")
    value = os.environ.get("HF_HUB_OFFLINE", "") if first is None else first
    return value.upper() in {"1", "ON", "YES", "TRUE"}


def look(dataset: str, config: str | None) -> State:
    """What `datasets` would open without network, or why it would not.

    Args:
        dataset: ``namespace/name``, the name in lower case (in others `datasets` sets underscores).
        config: name of the configuration; None for the only one.
    """
    namespace, _, name = dataset.rpartition("/")
    at = root() / f"{namespace}___{name}" / (config or "*")
    found = [path for path in at.parent.glob(f"{at.name}/*/*") if path.is_dir()]
    finished = sorted(
        (path for path in found if (path / INFO).is_file() and not path.name.endswith(INCOMPLETE)),
        key=lambda path: path.stat().st_mtime,
    )
    # `datasets` stumbles over these even where there is a whole copy.
    unfinished = tuple(path for path in found if path not in finished)
    if unfinished:
        return State(None, f"a download was interrupted ({unfinished[0]})", unfinished)
    if not finished:
        return State(None, "not in the cache")
    copy, problem = _copy(finished[-1], name)
    return State(copy, problem, (finished[-1],) if problem else ())


def _copy(folder: Path, name: str) -> tuple[Copy | None, str]:
    try:
        info = json.loads((folder / INFO).read_text(encoding="utf-8"))
        splits = {split: dict(facts) for split, facts in (info["splits"] or {}).items()}
        rows = {split: int(facts["num_examples"]) for split, facts in splits.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, f"its copy has no valid {INFO} ({folder})"
    files = []
    for split, facts in splits.items():
        shards = len(facts.get("shard_lengths") or [0])
        for shard in range(shards):
            part = f"-{shard:05d}-of-{shards:05d}" if shards > 1 else ""
            path = folder / f"{name}-{split}{part}.arrow"
            if not path.is_file():
                return None, f"its copy lacks a file ({path})"
            with path.open("rb") as handle:
                handle.seek(max(0, path.stat().st_size - len(END_OF_STREAM)))
                if handle.read() != END_OF_STREAM:
                    return None, f"its copy is cut off ({path})"
            files.append(path)
    return Copy(folder, rows, tuple(files)), ""


def sweep(debris: tuple[Path, ...]) -> bool:
    """Remove unfinished and damaged folders, so that they are fetched anew; False where a process is at work."""
    for folder in debris:
        # The lock that `datasets` holds while it writes the folder.
        try:
            with FileLock(folder.with_name(folder.name.removesuffix(INCOMPLETE) + LOCK), timeout=0):
                shutil.rmtree(folder)
        except Timeout:
            return False
    return True
