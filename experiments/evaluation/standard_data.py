"""What was fetched of lm-eval's standard tasks, and whether it is still there, whole and unchanged.

Reads files only: neither the network nor lm-eval, so that what is missing is said within a second.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from edgc.errors import UserError
from experiments.evaluation import dataset_cache
from experiments.evaluation.inputs import Row, TaskFile, digest
from experiments.spec.task_catalogue import StandardTask, standard_task, standard_tasks

RECORD = "edgc_standard_tasks.json"  # in the datasets cache, whose content it describes
PREFETCH = "python -m experiments.evaluation.standard_tasks prefetch"


def read_record() -> dict[str, Row]:
    """What is known of each fetched task; empty where nothing was fetched.

    Raises:
        UserError: the record is damaged.
    """
    try:
        content = json.loads((dataset_cache.root() / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        fix = f"remove it and fetch again: {PREFETCH}"
        raise UserError(
            "the record of fetched tasks is not readable", where=dataset_cache.root() / RECORD, fix=fix
        ) from None
    tasks: dict[str, Row] = content["tasks"]
    return tasks


def problem_with(task: StandardTask, entry: Row | None) -> str | None:
    """Why a task cannot be evaluated without network, in words; None when it can."""
    state = dataset_cache.look(task.dataset, task.config)
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
            where=dataset_cache.root(),
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
