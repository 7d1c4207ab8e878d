"""Data of lm-eval's standard tasks: fetched once where there is a network, used without one everywhere else.

``prefetch`` has lm-eval load every standard task of a study, which downloads its dataset into the Hugging Face
cache, and records in that cache what is there: task version, dataset, revision, and a fingerprint of the rows. An
evaluation reads this record and never the network; ``check`` says whether it could.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from filelock import FileLock

from edgc.errors import UserError
from experiments.common.cli import main_guard
from experiments.common.files import atomic_write, check_writable
from experiments.evaluation import standard_data
from experiments.evaluation.evaluate import quiet, task_manager
from experiments.evaluation.inputs import Row, digest
from experiments.spec import matrix
from experiments.spec.task_catalogue import StandardTask, lm_eval_version, standard_task, standard_tasks

NO_ROWS = ("SchemaInferenceError", "BatchSize must be greater than 0")  # how `datasets` says it of a split

app = typer.Typer(add_completion=False, help="Data of lm-eval's standard tasks.")


def fetch(task: StandardTask) -> tuple[str, str]:
    """Fetch a task and record it; (what was done, a detail). ``UserError``: not fetched, or without documents."""
    entry = standard_data.read_record().get(task.name)
    if standard_data.problem_with(task, entry) is None and entry:
        return "already there", summary(entry)
    before = standard_data.look(task.dataset, task.config)
    debris, copy = before.debris, before.copy
    if copy and entry and copy.revision == entry["revision"] and copy.contents() != entry["files"]:
        debris = (copy.folder,)  # of one revision, but not what was fetched
    if debris and standard_data.offline():
        problem = before.problem or "its data has changed since it was recorded"
        raise UserError(problem, fix="fetch it again where there is a network")
    if debris and not standard_data.sweep(debris):
        raise UserError("another process is fetching it", where=debris[0], fix="wait for its end")
    entry = entry_of(task, load(task))
    with FileLock(standard_data.cache_folder() / f".{standard_data.RECORD}.lock"):
        content = {"format": 1, "tasks": standard_data.read_record() | {task.name: entry}}
        atomic_write(standard_data.cache_folder() / standard_data.RECORD, json.dumps(content, indent=1) + "\n")
    if debris:
        return "fetched again", summary(entry)
    return ("fetched" if copy is None else "recorded"), summary(entry)


def load(task: StandardTask) -> Any:
    """lm-eval's own task object; making it downloads the dataset and renders one document."""
    with quiet():
        manager = task_manager((task.folder,))
        try:
            return manager.load([task.name])["tasks"][task.name]
        except Exception as error:  # of lm-eval, datasets, the hub's client, the network
            reason = error
    if type(reason).__name__ == "DatasetGenerationError" and isinstance(reason.__cause__, Exception):
        reason = reason.__cause__  # says what was wrong
    copy = standard_data.look(task.dataset, task.config).copy
    said = f"{type(reason).__name__}: {reason}"
    if any(text in said for text in NO_ROWS) or (copy and copy.rows.get(task.split) == 0):
        raise UserError(f"task {task.name} has zero documents", where=task.dataset)
    lines = str(reason).strip().splitlines() or ["no message"]
    fix = "see the message"
    if isinstance(reason, OSError):  # ConnectionError is one
        fix = "check the network, HF_HUB_OFFLINE and the free space"
    raise UserError(f"{type(reason).__name__}: {lines[0]}", fix=fix) from reason


def entry_of(task: StandardTask, loaded: Any) -> Row:
    """What is recorded of a task that was fetched."""
    state = standard_data.look(task.dataset, task.config)
    if state.copy is None:
        raise UserError(f"it was loaded, but {state.problem}", where=standard_data.cache_folder())
    documents = len(loaded.eval_docs)
    if documents != state.copy.rows[task.split]:
        raise UserError(f"{documents} documents, the cache says {state.copy.rows[task.split]}")
    files = state.copy.contents()
    return {
        "version": task.version,
        "lm_eval": lm_eval_version(),
        "dataset": task.dataset,
        "config": state.copy.config,
        "revision": state.copy.revision,
        "split": task.split,
        "documents": documents,
        "fingerprint": digest(*(part for item in sorted(files.items()) for part in item)),
        "files": files,
        "chance": chance(task, loaded),
    }


def chance(task: StandardTask, loaded: Any) -> dict[str, float]:
    """What a uniform guesser scores by metric; questions of one task may have different numbers of choices."""
    if loaded.OUTPUT_TYPE != "multiple_choice":
        return {}
    documents = loaded.eval_docs
    share = sum(1 / len(loaded.doc_to_choice(document)) for document in documents) / len(documents)
    return {metric: share for metric in task.metrics if metric in ("acc", "acc_norm")}


def summary(entry: Row) -> str:
    where = f"{entry['dataset']} ({entry['config']}, {entry['revision'][:12]})"
    return f"version {entry['version']}, {where}, {entry['documents']} documents, {entry['fingerprint'][:12]}"


def prefetch(names: Sequence[str]) -> None:
    """Fetch what is missing; every task that is done is recorded at once, so a second call goes on.

    Raises:
        UserError: after all tasks were tried, naming those that are still missing.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    check_writable(standard_data.cache_folder())
    record, missing = standard_data.read_record(), list[str]()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("fetch", total=len(names))
        for task in standard_tasks(names):
            progress.update(bar, description=task.name)
            try:
                done, detail = fetch(task)
                print(f"{task.name}: {done}: {detail}", flush=True)
            except UserError as error:
                missing.append(task.name)
                print(f"{task.name}: not fetched: {error}", flush=True)
                if isinstance(error.__cause__, ConnectionError):  # each further try takes half a minute
                    rest = names[names.index(task.name) + 1 :]
                    missing += [
                        name for name in rest if standard_data.problem_with(standard_task(name), record.get(name))
                    ]
                    break
            progress.advance(bar)
    if missing:
        fix = f"say it again where there is a network: {standard_data.PREFETCH} --tasks {','.join(missing)}"
        raise UserError(f"{len(missing)} of {len(names)} tasks were not fetched: {', '.join(missing)}", fix=fix)


def asked(tasks: str, study: str, scale: str) -> list[str]:
    """The names given, or those that the study evaluates at the scale."""
    names = [name for name in tasks.replace(",", " ").split() if name]
    return names or matrix.evaluation(study, scale).standard


Tasks = Annotated[str, typer.Option(help="Names, separated by spaces or commas [those of the study].")]
Study = Annotated[str, typer.Option(help="Study whose tasks are meant.")]
Scale = Annotated[str, typer.Option(help="Scale at which the study is made.")]


@app.command("prefetch")
@main_guard
def prefetch_command(tasks: Tasks = "", study: Study = "zero_shot", scale: Scale = "paper") -> None:
    """Download what is missing (on a machine with network) and record it."""
    names = asked(tasks, study, scale)
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
    entries = standard_data.checked(asked(tasks, study, scale))
    for name, entry in entries.items():
        print(f"{name}: {summary(entry)}")
    if out is not None:
        atomic_write(out, json.dumps({"format": 1, "tasks": entries}, indent=1) + "\n")


if __name__ == "__main__":
    app()
