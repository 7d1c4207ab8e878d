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
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from edgc.errors import UserError
from experiments.common.cli import main_guard
from experiments.common.equivalence import load_equivalence
from experiments.common.files import atomic_write, check_writable
from experiments.common.processes import die_with_parent
from experiments.common.written_tables import csv_text
from experiments.evaluation.inputs import Model, Row, Task, digest, read_models, read_standard, read_tasks
from experiments.evaluation.standard_tasks import fingerprint, task_folder
from experiments.evaluation.table import COLUMNS, SUMMARY_COLUMNS, Results

RESULTS = ("table.csv", "summary.csv", "timings.csv")
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DISABLE_MULTIPROC": "1",  # lm-eval's bootstrap: a pool costs more than it saves here
}
BOOTSTRAP = 1000  # iterations: 0 drop the standard errors, lm-eval's 100 000 take long
SEED, DTYPE = 1234, "float32"
app = typer.Typer(add_completion=False)


class Work(NamedTuple):
    """One model and what is to be evaluated on it; ``folders`` hold the task files, results go below ``out``."""

    model: Model
    tasks: list[Task]
    folders: tuple[Path, ...]
    out: Path
    batch_size: int
    device: str


def inputs(model: Model, task: Task, batch_size: int) -> Row:
    """Inputs that decide the outcome of one evaluation."""
    versions = {name: importlib.metadata.version(name) for name in ("lm_eval", "transformers", "tokenizers", "torch")}
    settings = {"bootstrap_iters": BOOTSTRAP, "seed": SEED, "dtype": DTYPE, "batch_size": batch_size}
    total = digest(model.digest, task.digest, task.name, json.dumps([settings, versions], sort_keys=True))
    return {"digest": total, "settings": settings, "versions": versions}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back what lm-eval prints; print it when the body fails."""
    held = io.StringIO()
    try:
        with contextlib.redirect_stdout(held), contextlib.redirect_stderr(held):
            yield
    except BaseException:
        print(held.getvalue(), file=sys.stderr)
        raise


def is_done(folder: Path, expected: Row) -> bool:
    """Tell if ``folder`` holds the finished evaluation of the same inputs."""
    try:
        record = json.loads((folder / "inputs.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(record.get("digest") == expected["digest"]) and (folder / "results.json").is_file()


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


def evaluate(work: Work) -> int:
    """Evaluate one model on its tasks, each written when it is done; returns their number."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import handle_non_serializable

    seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), SEED)
    encode: dict[str, Any] = {"default": handle_non_serializable, "ensure_ascii": False}
    manager, model = task_manager(work.folders), work.model
    lm = HFLM(pretrained=str(model.path), device=work.device, dtype=DTYPE, batch_size=work.batch_size)
    for task in work.tasks:
        started = time.perf_counter()
        with quiet():
            results = simple_evaluate(
                model=lm, tasks=[task.name], task_manager=manager, bootstrap_iters=BOOTSTRAP, log_samples=True, **seeds
            )
        samples = results.pop("samples")[task.name]
        documents = [row["doc"] for row in sorted(samples, key=lambda row: row["doc_id"])]
        if task.documents is not None and fingerprint(documents) != task.documents:
            fix = "delete standard_tasks.json of the study and start again"
            raise UserError(f"the documents of standard task {task.name} have changed since the check", fix=fix)
        target, seconds = work.out / model.name / task.name, round(time.perf_counter() - started, 3)
        (target / "inputs.json").unlink(missing_ok=True)
        atomic_write(target / "results.json", json.dumps(results, indent=1, **encode) + "\n")
        atomic_write(target / "samples.jsonl", "".join(json.dumps(row, **encode) + "\n" for row in samples))
        # Device and seconds are not part of the digest: a GPU node's results are not made again where there is none.
        record = inputs(model, task, work.batch_size) | {"device": work.device, "seconds": seconds}
        atomic_write(target / "inputs.json", json.dumps(record, indent=1) + "\n")
        print(f"{model.name} {task.name}: {len(samples)} samples in {seconds:.0f} s", file=sys.stderr, flush=True)
    return len(work.tasks)


def evaluate_all(work: Sequence[Work], processes: int) -> int:
    """Evaluate models, ``processes`` at a time on a CPU; returns the number of evaluations."""
    if processes == 1 or len(work) < 2 or work[0].device != "cpu":
        return sum(map(evaluate, work))
    context = multiprocessing.get_context("spawn")  # not forked: lm-eval's libraries have threads
    threads = max(1, (os.cpu_count() or 1) // processes)
    with ProcessPoolExecutor(min(processes, len(work)), context, _start_process, (threads,)) as pool:
        try:
            return sum(pool.map(evaluate, work))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _start_process(threads: int) -> None:
    import torch

    die_with_parent(signal.SIGKILL)()
    torch.set_num_threads(threads)


@app.command()
@main_guard
def main(
    models: Annotated[list[Path], typer.Argument(help="exported folders")],
    out: Annotated[Path, typer.Option(help="folder of the study")],
    tasks_dir: Annotated[Path | None, typer.Option(help="made by experiments.evaluation.tasks.make")] = None,
    standard: Annotated[Path | None, typer.Option(help="made by experiments.evaluation.standard_tasks check")] = None,
    # One by one, as lm-eval by itself does: padding within a batch changes last digits, and what shares a batch
    # depends on the tasks that are asked for together.
    batch_size: Annotated[int, typer.Option(help="documents at a time", min=1)] = 1,
    processes: Annotated[int, typer.Option(help="models at a time on a CPU", min=1)] = 1,
) -> None:
    """Evaluate exported models on lm-eval tasks, without network, and write table.csv."""
    if not (tasks_dir or standard):
        raise UserError("no tasks given", fix="give --tasks-dir, --standard or both")
    os.environ.update(OFFLINE)  # before anything imports the hub's client
    tasks = read_tasks(tasks_dir) if tasks_dir else []
    folders = [tasks_dir] if tasks_dir else []
    if standard:
        tasks += (named := read_standard(standard))
        folders += dict.fromkeys(task_folder(task.name) for task in named)
    known, rule = read_models(models), load_equivalence()
    check_writable(out)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    work: list[Work] = []
    total = 0
    for model in known:
        if model.info["model"]:  # it was trained to its end
            total += len(tasks)
            pending = [t for t in tasks if not is_done(out / model.name / t.name, inputs(model, t, batch_size))]
            if pending:
                work.append(Work(model, pending, tuple(folders), out, batch_size, device))
    count = evaluate_all(work, processes)
    results = Results(known, tasks, out, rule)
    atomic_write(out / "timings.csv", csv_text(results.timings(), ("run", "task", "seconds")))
    atomic_write(out / "summary.csv", csv_text(results.summary(), SUMMARY_COLUMNS))
    atomic_write(out / "table.csv", csv_text(results.table(), COLUMNS))
    print(f"{out / 'table.csv'}: {count} evaluations done, {total - count} taken from earlier ones")


if __name__ == "__main__":
    app()
