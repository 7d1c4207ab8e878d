"""Zero-shot evaluation of exported models with lm-eval, offline, and the study's table.

A (model, task) pair is evaluated once: its folder holds lm-eval's own ``results.json`` unchanged, the results per
sample, and the hash of everything that went in; the pair is evaluated again only when that hash changes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from edgc.errors import UserError
from experiments.common.cli import main_guard
from experiments.common.equivalence import load_equivalence
from experiments.common.files import atomic_write, check_writable
from experiments.common.processes import die_with_parent
from experiments.common.written_tables import csv_text, write_text
from experiments.evaluation.inputs import Model, Row, TaskFile, digest, read_models, read_tasks
from experiments.evaluation.progress import Progress, Tell, counted, seldom
from experiments.evaluation.standard_data import read_standard
from experiments.evaluation.table import COLUMNS, SUMMARY_COLUMNS, summary, table, timings
from experiments.spec.task_catalogue import standard_tasks

RESULTS = ("table.csv", "summary.csv", "timings.csv")
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DISABLE_MULTIPROC": "1",  # lm-eval's bootstrap: a pool costs more than it saves here
}
BOOTSTRAP = 1000  # iterations: 0 drop the standard errors, lm-eval's 100 000 take long
WAIT_SECONDS = 1.0  # between two looks at what the processes tell
SEED, DTYPE = 1234, "float32"
Device = Literal["auto", "cpu", "cuda"]
app = typer.Typer(add_completion=False)


def inputs(model: Model, task: TaskFile, batch_size: int) -> Row:
    """Everything that decides the outcome of one evaluation."""
    versions = {name: importlib.metadata.version(name) for name in ("lm_eval", "transformers", "tokenizers", "torch")}
    settings = {"bootstrap_iters": BOOTSTRAP, "seed": SEED, "dtype": DTYPE, "batch_size": batch_size}
    total = digest(model.digest, task.digest, task.name, json.dumps([settings, versions], sort_keys=True))
    return {"digest": total, "settings": settings, "versions": versions}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back what is printed (lm-eval draws a bar for every document); print it when the body fails."""
    held = io.StringIO()
    try:
        with contextlib.redirect_stdout(held), contextlib.redirect_stderr(held):
            yield
    except BaseException:
        print(held.getvalue(), file=sys.stderr)
        raise


def is_done(folder: Path, wanted: Row) -> bool:
    """Whether ``folder`` holds the finished evaluation of the same inputs."""
    try:
        found = json.loads((folder / "inputs.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found.get("digest") == wanted["digest"]) and (folder / "results.json").is_file()


@dataclass(frozen=True)
class Work:
    """How evaluations are made: ``folders`` hold the task files, results go below ``out``."""

    folders: tuple[Path, ...]
    out: Path
    batch_size: int = 1
    device: str = "auto"

    def pending(self, model: Model, tasks: Sequence[TaskFile]) -> list[TaskFile]:
        """What is not done yet of a model that was trained to its end."""
        if not model.info["model"]:
            return []
        places = ((task, self.out / model.name / task.name) for task in tasks)
        return [task for task, place in places if not is_done(place, inputs(model, task, self.batch_size))]


def evaluate(models: Sequence[Model], tasks: Sequence[TaskFile], work: Work, processes: int = 1) -> int:
    """Evaluate what is not done yet, ``processes`` models at a time; returns the number of evaluations."""
    pending = [(model, found) for model in models if (found := work.pending(model, tasks))]
    if not pending:
        return 0
    work = replace(work, device=chosen_device(work.device))
    with Progress(pending) as progress, contextlib.ExitStack() as stack:
        if processes > 1 and len(pending) > 1 and work.device == "cpu":
            # Not forked: lm-eval's libraries have threads.
            context = multiprocessing.get_context("spawn")
            threads, told = max(1, (os.cpu_count() or 1) // processes), context.Queue()
            pool = ProcessPoolExecutor(min(processes, len(pending)), context, _start_process, (threads, told))
            stack.callback(pool.shutdown, cancel_futures=True)
            jobs = {pool.submit(_all_of, model, found, work) for model, found in pending}
            while jobs:
                ended, jobs = wait(jobs, WAIT_SECONDS, FIRST_COMPLETED)
                for job in ended:
                    job.result()
                while not told.empty():
                    progress.tell(*told.get())
                progress.show()
        else:
            for model, found in pending:
                for _ in evaluations(model, found, work, progress.tell):
                    pass
    return sum(len(found) for _, found in pending)


_told: Any = None  # in a process of the pool: the queue on which it tells how far it is


def _start_process(threads: int, told: Any) -> None:
    import torch

    global _told
    _told = told
    die_with_parent(signal.SIGKILL)()
    torch.set_num_threads(threads)


def _all_of(model: Model, tasks: Sequence[TaskFile], work: Work) -> int:
    return sum(1 for _ in evaluations(model, tasks, work, lambda *said: _told.put(said)))


@functools.cache
def task_manager(folders: tuple[Path, ...]) -> Any:
    """lm-eval's index of the task files in ``folders``, made once a process, with what it says held back."""
    import transformers
    from lm_eval.tasks import TaskManager
    from torch.utils import collect_env

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it reports every context that it cuts
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # The environment that every result names: lm-eval asks pip and others for it, seconds each time.
    collect_env.get_pretty_env_info = functools.cache(collect_env.get_pretty_env_info)
    return TaskManager(include_path=[str(folder) for folder in folders], include_defaults=False)


def evaluations(model: Model, tasks: Sequence[TaskFile], work: Work, tell: Tell) -> Iterator[TaskFile]:
    """Evaluate a model on ``tasks``; yields each when its folder is written. ``tell`` is told of documents done."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import handle_non_serializable

    seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), SEED)
    encode: dict[str, Any] = {"default": handle_non_serializable, "ensure_ascii": False}
    manager = task_manager(work.folders)
    lm = HFLM(pretrained=str(model.path), device=work.device, dtype=DTYPE, batch_size=work.batch_size)
    for task in tasks:
        started = time.perf_counter()
        documents = partial(seldom(tell), model.name, task.name)
        with quiet(), counted(lm, documents):
            results = simple_evaluate(
                model=lm, tasks=[task.name], task_manager=manager, bootstrap_iters=BOOTSTRAP, log_samples=True, **seeds
            )
        samples = results.pop("samples")[task.name]
        target = work.out / model.name / task.name
        (target / "inputs.json").unlink(missing_ok=True)
        atomic_write(target / "results.json", json.dumps(results, indent=1, **encode) + "\n")
        atomic_write(target / "samples.jsonl", "".join(json.dumps(row, **encode) + "\n" for row in samples))
        # Not part of the digest: what a GPU node has evaluated is not done again where there is none.
        record = inputs(model, task, work.batch_size)
        record |= {"device": work.device, "seconds": round(time.perf_counter() - started, 3)}
        atomic_write(target / "inputs.json", json.dumps(record, indent=1) + "\n")
        number = results["n-samples"][task.name]["effective"]
        documents(number, number)
        yield task


def chosen_device(device: str) -> str:
    """``auto`` is a GPU if there is one; ``UserError`` where one is asked for and there is none."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no GPU", fix="use --device auto or cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def names(text: str) -> list[str]:
    """Names with commas between them."""
    return [name for name in text.split(",") if name]


@app.command()
@main_guard
def main(
    models: Annotated[list[Path], typer.Argument(help="exported folders")],
    out: Annotated[Path, typer.Option(help="folder of the study")],
    tasks_dir: Annotated[Path | None, typer.Option(help="made by experiments.evaluation.tasks.make")] = None,
    tasks: Annotated[str, typer.Option(help="of that folder, with commas; default: all")] = "",
    standard: Annotated[str, typer.Option(help="tasks of lm-eval, with commas, fetched beforehand")] = "",
    # One by one, as lm-eval by itself does: padding within a batch changes last digits, and what shares a batch
    # depends on the tasks that are asked for together.
    batch_size: Annotated[int, typer.Option(help="documents at a time")] = 1,
    device: Annotated[Device, typer.Option(help="auto: a GPU if any")] = "auto",
    processes: Annotated[int, typer.Option(help="models at a time on a CPU")] = 1,
) -> None:
    """Evaluate exported models on lm-eval tasks, without network, and write table.csv."""
    for key, value in (("batch-size", batch_size), ("processes", processes)):
        if value < 1:
            raise UserError(f"--{key} {value} is not valid", fix="use a whole number of at least 1")
    if tasks_dir is None and (tasks or not standard):
        raise UserError("no tasks given", fix="give --tasks-dir, --standard or both")
    os.environ.update(OFFLINE)  # before anything imports the hub's client
    files = read_tasks(tasks_dir, names(tasks) or None) if tasks_dir else []
    files += read_standard(names(standard))
    folders = [tasks_dir] if tasks_dir else []
    folders += dict.fromkeys(task.folder for task in standard_tasks(names(standard)))
    found, rule = read_models(models), load_equivalence()
    check_writable(out)
    count = evaluate(found, files, Work(tuple(folders), out, batch_size, device), processes)
    for name, columns, rows in (
        ("timings", ("run", "task", "seconds"), timings(found, files, out)),
        ("summary", SUMMARY_COLUMNS, summary(found, files, out, rule)),
        ("table", COLUMNS, table(found, files, out, rule)),
    ):
        write_text(out / f"{name}.csv", csv_text(rows, columns))
    total = sum(bool(model.info["model"]) for model in found) * len(files)
    print(f"{out / 'table.csv'}: {count} evaluations done, {total - count} taken from earlier ones")


if __name__ == "__main__":
    app()
