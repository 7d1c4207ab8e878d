"""Records of the standard tasks that were fetched, and the check that their data is still there, whole and unchanged.

The data lies in the folder in which the `datasets` library (5) keeps what it has downloaded::

    <HF_DATASETS_CACHE>/<namespace>___<name>/<config>/<version>/<revision>/
        dataset_info.json, <name>-<split>.arrow, ...
    <revision>.incomplete/           beside it while a download runs, and after one that was killed

Without network `datasets` opens the newest folder of a config, and does not look at its files before they are read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from edgc.checkpoints import manifest
from edgc.errors import UserError
from experiments.evaluation.inputs import Row, TaskFile, digest
from experiments.spec.task_catalogue import StandardTask, standard_task, standard_tasks

RECORD = "edgc_standard_tasks.json"  # in the datasets cache, whose content it describes
PREFETCH = "python -m experiments.evaluation.standard_tasks prefetch"


def cache_folder() -> Path:
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE)


def whole(folder: Path) -> bool:
    """Tell if a folder's download has ended; `datasets` stumbles over others even where there is a whole copy."""
    try:
        json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return not folder.name.endswith(".incomplete")


def rows(folder: Path, split: str) -> int:
    """Number of rows of a split when its download ended."""
    info = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    return int(info["splits"][split]["num_examples"])


def cached(task: StandardTask) -> list[Path]:
    """Folders of a task's dataset in the cache, unfinished ones included, oldest first."""
    namespace, _, name = task.dataset.rpartition("/")
    folders = (cache_folder() / f"{namespace}___{name}").glob(f"{task.config or '*'}/*/*/")
    return sorted(folders, key=lambda path: path.stat().st_mtime)


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of rows, by name; not of what tasks have made of them, in ``cache-*``."""
    files = [path for path in folder.glob("*.arrow") if not path.name.startswith("cache-")]
    return {path.name: manifest.entry(path).sha256 for path in files}


def read_record() -> dict[str, Row]:
    """Records by task, empty where nothing was fetched; ``UserError`` where the file is damaged."""
    path = cache_folder() / RECORD
    try:
        tasks: dict[str, Row] = json.loads(path.read_text(encoding="utf-8"))["tasks"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError):
        fix = f"remove it and fetch again: {PREFETCH}"
        raise UserError("the record of fetched tasks is not readable", where=path, fix=fix) from None
    return tasks


def problem_with(task: StandardTask, entry: Row | None) -> str | None:
    """Reason why a task cannot be evaluated without network, in words; None when it can."""
    folders = cached(task)
    if unfinished := [folder for folder in folders if not whole(folder)]:
        return f"a download was interrupted ({unfinished[0]})"
    if not folders:
        return "not in the cache"
    if entry is None:
        return "in the cache, but not recorded"
    if (entry["version"], entry["dataset"]) != (task.version, task.dataset):
        return f"recorded as version {entry['version']} of {entry['dataset']}, lm-eval has {task.version}"
    files = checksums(folders[-1])
    if missing := sorted(entry["files"].keys() - files):
        return f"its copy lacks a file ({folders[-1] / missing[0]})"
    if entry["revision"] != folders[-1].name or entry["files"] != files:
        return "its data has changed since it was recorded"
    return None


def checked(names: Sequence[str]) -> dict[str, Row]:
    """The records of ``names``, whose data is in the cache, whole and unchanged.

    Raises:
        UserError: naming every task that is missing or damaged, and the command that fetches them.
    """
    record = read_record()
    found = {task.name: problem_with(task, record.get(task.name)) for task in standard_tasks(names)}
    problems = {name: problem for name, problem in found.items() if problem}
    if problems:
        groups = {text: [name for name in problems if problems[name] == text] for text in problems.values()}
        reasons = ", ".join(f"{', '.join(group)}: {text}" for text, group in groups.items())
        raise UserError(
            f"data of {len(problems)} standard task{'s' * (len(problems) > 1)} cannot be used: {reasons}",
            where=cache_folder(),
            fix=f"on a machine with network: {PREFETCH} --tasks {','.join(problems)}",
        )
    return {name: record[name] for name in names}


def read_standard(names: Sequence[str]) -> list[TaskFile]:
    """The standard tasks as inputs of an evaluation; their digest covers lm-eval's task files and the rows.

    Raises:
        UserError: unknown name; data missing, cut off or changed.
    """
    if not names:
        return []
    tasks = []
    for name, entry in checked(names).items():
        task = standard_task(name)
        parts = [f"{path.name}".encode() + b"\0" + path.read_bytes() for path in task.files]
        total = digest(task.version, task.dataset, entry["fingerprint"], *parts)
        tasks.append(TaskFile(name, task.version, task.metrics, total, {"chance": entry["chance"]}))
    return tasks
