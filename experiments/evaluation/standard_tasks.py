"""Data of lm-eval's standard tasks: fetched once where there is a network, used without one everywhere else.

``prefetch`` has lm-eval load every standard task of a study, which downloads its dataset into the Hugging Face
cache, and records in that cache what is there: task version, dataset, revision, and a fingerprint of the rows. An
evaluation reads this record and never the network; ``check`` says if it could.

The data lies in the folder in which the `datasets` library (5) keeps what it has downloaded::

    <HF_DATASETS_CACHE>/<namespace>___<name>/<config>/<version>/<revision>/
        dataset_info.json, <name>-<split>.arrow, ...
    <revision>.incomplete/           beside it while a download runs, and after one that was killed

Without network `datasets` opens the newest folder of a config, and does not look at its files before they are read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from filelock import FileLock, Timeout

from edgc.checkpoints import manifest
from edgc.errors import UserError
from experiments.common.cli import main_guard
from experiments.common.files import atomic_write, check_writable
from experiments.evaluation.inputs import Row, TaskFile, digest
from experiments.spec import matrix
from experiments.spec.task_catalogue import StandardTask, lm_eval_version, standard_task, standard_tasks

RECORD = "edgc_standard_tasks.json"  # in the datasets cache, whose content it describes
PREFETCH = "python -m experiments.evaluation.standard_tasks prefetch"
NO_ROWS = ("SchemaInferenceError", "BatchSize must be greater than 0")  # how `datasets` says it of a split

app = typer.Typer(add_completion=False, help="Data of lm-eval's standard tasks.")


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


def fetch(task: StandardTask) -> str:
    """Fetch a task and record it; returns what was done. ``UserError``: not fetched, or without documents."""
    entry = read_record().get(task.name)
    problem = problem_with(task, entry)
    if problem is None and entry:
        return f"already there: {summary(entry)}"
    folders = cached(task)
    # Unfinished, or fetched once and not what it was then; all else stays, and is recorded again as it is.
    debris = [
        folder
        for folder in folders
        if not whole(folder) or (entry and folder.name == entry["revision"] and checksums(folder) != entry["files"])
    ]
    if debris:
        import datasets

        if datasets.config.HF_HUB_OFFLINE:
            raise UserError(str(problem), fix="fetch it again where there is a network")
        remove(debris)
    entry = entry_of(task, load(task))
    with FileLock(cache_folder() / f".{RECORD}.lock"):
        content = {"format": 1, "tasks": read_record() | {task.name: entry}}
        atomic_write(cache_folder() / RECORD, json.dumps(content, indent=1) + "\n")
    done = "fetched again" if debris else "recorded" if folders else "fetched"
    return f"{done}: {summary(entry)}"


def remove(folders: Sequence[Path]) -> None:
    """Remove folders of the cache under the lock that `datasets` holds while it writes one."""
    for folder in folders:
        try:
            with FileLock(folder.with_name(folder.name.removesuffix(".incomplete") + "_builder.lock"), timeout=0):
                shutil.rmtree(folder)
        except Timeout:
            raise UserError("another process is fetching it", where=folder, fix="wait for its end") from None


def load(task: StandardTask) -> Any:
    """lm-eval's own task object; making it downloads the dataset and renders one document."""
    from experiments.evaluation.evaluate import quiet, task_manager

    with quiet():
        try:  # in here, so that what was held back is not printed: one line says it
            return task_manager((task.folder,)).load([task.name])["tasks"][task.name]
        except Exception as error:  # of lm-eval, datasets, the hub's client, the network
            reason = error
    if type(reason).__name__ == "DatasetGenerationError" and isinstance(reason.__cause__, Exception):
        reason = reason.__cause__  # says what was wrong
    message = f"{type(reason).__name__}: {(str(reason).strip() or 'no message').splitlines()[0]}"
    if any(text in f"{type(reason).__name__}: {reason}" for text in NO_ROWS):
        raise UserError(f"task {task.name} has zero documents", where=task.dataset)
    network = isinstance(reason, OSError)  # ConnectionError is one
    fix = "check the network, HF_HUB_OFFLINE and the free space" if network else "see the message"
    raise UserError(message, fix=fix) from reason


def entry_of(task: StandardTask, loaded: Any) -> Row:
    """Record of a task that was fetched."""
    documents = list(loaded.eval_docs)
    if not documents:
        raise UserError(f"task {task.name} has zero documents", where=task.dataset)
    folder = Path(loaded.dataset[task.split].cache_files[0]["filename"]).parent
    if len(documents) != (fetched := rows(folder, task.split)):
        fix = f"delete the folder {folder} and fetch it again"
        raise UserError(f"{len(documents)} documents are in the cache, {fetched} were fetched", where=folder, fix=fix)
    files = checksums(folder)
    share = {}
    if loaded.OUTPUT_TYPE == "multiple_choice":  # questions of one task may have different numbers of choices
        chance = sum(1 / len(loaded.doc_to_choice(document)) for document in documents) / len(documents)
        share = {metric: chance for metric in task.metrics if metric in ("acc", "acc_norm")}
    return {
        "version": task.version,
        "lm_eval": lm_eval_version(),
        "dataset": task.dataset,
        "config": folder.parts[-3],
        "revision": folder.name,
        "split": task.split,
        "documents": len(documents),
        "fingerprint": digest(*(part for item in sorted(files.items()) for part in item)),
        "files": files,
        "chance": share,
    }


def summary(entry: Row) -> str:
    where = f"{entry['dataset']} ({entry['config']}, {entry['revision'][:12]})"
    return f"version {entry['version']}, {where}, {entry['documents']} documents, {entry['fingerprint'][:12]}"


def prefetch(names: Sequence[str]) -> None:
    """Fetch what is missing; every task that is done is recorded at once, so a second call goes on.

    Raises:
        UserError: after all tasks were tried, naming those that are still missing.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    check_writable(cache_folder())
    missing, reachable = list[str](), True
    for task in standard_tasks(names):
        try:
            if not reachable and problem_with(task, read_record().get(task.name)):
                raise UserError("the hub cannot be reached")  # each further try would take half a minute
            print(f"{task.name}: {fetch(task)}", flush=True)
        except UserError as error:
            missing.append(task.name)
            reachable = reachable and not isinstance(error.__cause__, ConnectionError)
            print(f"{task.name}: not fetched: {error}", flush=True)
    if missing:
        fix = f"say it again where there is a network: {PREFETCH} --tasks {','.join(missing)}"
        raise UserError(f"{len(missing)} of {len(names)} tasks were not fetched: {', '.join(missing)}", fix=fix)


def chosen(tasks: str, study: str, scale: str) -> list[str]:
    """The names given, or those that the study evaluates at the scale."""
    return tasks.replace(",", " ").split() or matrix.evaluation(study, scale).standard


Tasks = Annotated[str, typer.Option(help="Names, separated by spaces or commas [those of the study].")]
Study = Annotated[str, typer.Option(help="Study whose tasks are meant.")]
Scale = Annotated[str, typer.Option(help="Scale at which the study is made.")]


@app.command("prefetch")
@main_guard
def prefetch_command(tasks: Tasks = "", study: Study = "zero_shot", scale: Scale = "paper") -> None:
    """Download what is missing (on a machine with network) and record it."""
    names = chosen(tasks, study, scale)
    if not names:
        print(f"{study} evaluates no standard task at scale {scale}: nothing to fetch")
        return
    prefetch(names)


@app.command("check")
@main_guard
def check_command(
    tasks: Tasks = "",
    study: Study = "zero_shot",
    scale: Scale = "paper",
    out: Annotated[Path | None, typer.Option(help="File for the records of the tasks.")] = None,
) -> None:
    """Say whether all data is there, without network; write what is known of it."""
    entries = checked(chosen(tasks, study, scale))
    for name, entry in entries.items():
        print(f"{name}: {summary(entry)}")
    if out is not None:
        atomic_write(out, json.dumps({"format": 1, "tasks": entries}, indent=1) + "\n")


if __name__ == "__main__":
    app()
