"""What was fetched of lm-eval's standard tasks, and whether it is still there, whole and unchanged.

Reads files only: neither the network nor lm-eval nor `datasets`, so that what is missing is said within a second.
They lie in the folder in which the `datasets` library (5) keeps what it has downloaded::

    <HF_DATASETS_CACHE>/<namespace>___<name>/<config>/<version>/<revision>/
        dataset_info.json            splits, rows, shards; its presence means to `datasets` that all is there
        <name>-<split>.arrow         or <name>-<split>-00000-of-00002.arrow ...
    <revision>.incomplete/           beside it while a download runs, and after one that was killed

Without network `datasets` opens the newest folder of a config, and does not look whether its files are whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from edgc.checkpoints import manifest
from edgc.errors import UserError
from experiments.evaluation.inputs import Row, TaskFile, digest
from experiments.spec.task_catalogue import StandardTask, standard_task, standard_tasks

RECORD = "edgc_standard_tasks.json"  # in the datasets cache, whose content it describes
PREFETCH = "python -m experiments.evaluation.standard_tasks prefetch"
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
        return {path.name: manifest.entry(path).sha256 for path in self.files}


@dataclass(frozen=True)
class State:
    """What the cache holds of one dataset: a whole copy, or the problem in words and what is in the way."""

    copy: Copy | None
    problem: str = ""
    debris: tuple[Path, ...] = ()  # unfinished or damaged folders


def cache_folder() -> Path:
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
    at = cache_folder() / f"{namespace}___{name}" / (config or "*")
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


def read_record() -> dict[str, Row]:
    """What is known of each fetched task, empty where nothing was fetched; ``UserError`` where it is damaged."""
    try:
        content = json.loads((cache_folder() / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        fix = f"remove it and fetch again: {PREFETCH}"
        raise UserError("the record of fetched tasks is not readable", where=cache_folder() / RECORD, fix=fix) from None
    tasks: dict[str, Row] = content["tasks"]
    return tasks


def problem_with(task: StandardTask, entry: Row | None) -> str | None:
    """Why a task cannot be evaluated without network, in words; None when it can."""
    state = look(task.dataset, task.config)
    if state.copy is None:
        return state.problem
    if entry is None:
        return "in the cache, but not recorded"
    if (entry["version"], entry["dataset"]) != (task.version, task.dataset):
        return f"recorded as version {entry['version']} of {entry['dataset']}, lm-eval has {task.version}"
    if entry["revision"] != state.copy.revision or entry["files"] != state.copy.contents():
        return "its data has changed since it was recorded"
    return None


def checked(names: Sequence[str]) -> dict[str, Row]:
    """The records of ``names``, whose data is in the cache, whole and unchanged.

    Raises:
        UserError: naming every task that is missing or damaged, and the command that fetches them.
    """
    record = read_record()
    problems = {task.name: problem_with(task, record.get(task.name)) for task in standard_tasks(names)}
    bad: dict[str, list[str]] = {}
    for name, problem in problems.items():
        if problem:
            bad.setdefault(problem, []).append(name)
    if bad:
        missing = [name for name, problem in problems.items() if problem]
        reasons = ", ".join(f"{', '.join(which)}: {problem}" for problem, which in bad.items())
        raise UserError(
            f"data of {len(missing)} standard task{'s' * (len(missing) > 1)} cannot be used: {reasons}",
            where=cache_folder(),
            fix=f"on a machine with network: {PREFETCH} --tasks {','.join(missing)}",
        )
    return {name: record[name] for name in names}


def read_standard(names: Sequence[str]) -> list[TaskFile]:
    """The standard tasks as inputs of an evaluation; their digest covers lm-eval's task files and the rows.

    Raises:
        UserError: unknown name; data missing, cut off or changed.
    """
    entries, found = checked(names), []
    for name in names:
        task, entry = standard_task(name), entries[name]
        parts = [f"{path.name}".encode() + b"\0" + path.read_bytes() for path in task.files]
        total = digest(task.version, task.dataset, entry["fingerprint"], *parts)
        found.append(TaskFile(name, task.version, task.metrics, total, {"chance": entry["chance"]}))
    return found
