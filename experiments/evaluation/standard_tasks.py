"""Data of lm-eval's standard tasks: fetched once where there is a network, used without one everywhere else.

``prefetch`` has lm-eval load every standard task of a study, which downloads its dataset into the Hugging Face
cache, and records in that cache what is there: task version, dataset, revision, and a fingerprint of the rows. An
evaluation reads this record and never the network; ``check`` says if it could.
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

from edgc.errors import UserError
from experiments.common.cli import main_guard
from experiments.common.files import atomic_write, check_writable
from experiments.evaluation.evaluate import quiet, task_manager
from experiments.evaluation.inputs import Row, digest
from experiments.evaluation.standard_data import (
    PREFETCH,
    RECORD,
    cache_folder,
    cached,
    checked,
    checksums,
    problem_with,
    read_record,
    rows,
    whole,
)
from experiments.spec import matrix
from experiments.spec.task_catalogue import StandardTask, lm_eval_version, standard_tasks

NO_ROWS = ("SchemaInferenceError", "BatchSize must be greater than 0")  # how `datasets` says it of a split

app = typer.Typer(add_completion=False, help="Data of lm-eval's standard tasks.")


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
