"""Zero-shot evaluation of exported models with lm-eval, offline, in one process, and the study's table.

A (model, task) pair is evaluated once: its folder holds lm-eval's own ``results.json`` unchanged, the
results per sample, and the hash of everything that went in; the pair is evaluated again only when that hash
changes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import io
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edgc.errors import UserError
from experiments.cli import main_guard
from experiments.evaluation_inputs import Model, Row, TaskFile, digest, read_models, read_tasks
from experiments.evaluation_statistics import load_equivalence
from experiments.evaluation_table import COLUMNS, SUMMARY_COLUMNS, summary, table, timings, write_csv
from experiments.run_folder import atomic_write, check_writable
from experiments.standard_data import read_standard
from experiments.task_catalogue import standard_tasks

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DISABLE_MULTIPROC": "1",  # lm-eval's bootstrap: a pool costs more than it saves here
}
BOOTSTRAP, SEED, DTYPE = (
    1000,
    1234,
    "float32",
)  # 0 iterations drop the standard errors, lm-eval's 100 000 take long


def inputs(model: Model, task: TaskFile, batch_size: int) -> Row:
    """Everything that decides the outcome of one evaluation."""
    versions = {
        name: importlib.metadata.version(name) for name in ("lm_eval", "transformers", "tokenizers", "torch")
    }
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


def evaluate(
    models: Sequence[Model],
    tasks: Sequence[TaskFile],
    folders: Sequence[Path],
    out: Path,
    *,
    batch_size: int,
    device: str = "auto",
) -> int:
    """Evaluate what is not done yet; returns the number of evaluations. ``folders`` hold the task files."""
    pending = {
        model.name: [
            task
            for task in tasks
            if not is_done(out / model.name / task.name, inputs(model, task, batch_size))
        ]
        for model in models
        if model.info["model"]
    }
    if not any(pending.values()):
        return 0
    import torch
    import transformers
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable
    from rich.console import Console
    from rich.progress import Progress
    from torch.utils import collect_env

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it reports every context that it cuts
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    seeds = dict.fromkeys(
        ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), SEED
    )
    encode: dict[str, Any] = {"default": handle_non_serializable, "ensure_ascii": False}
    # The environment that every result names: lm-eval asks pip and others for it, seconds each time.
    collect_env.get_pretty_env_info = functools.cache(collect_env.get_pretty_env_info)
    manager = TaskManager(include_path=[str(folder) for folder in folders], include_defaults=False)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no GPU", fix="use --device auto or cpu")
    count = 0
    with Progress(console=Console(file=sys.stderr)) as progress:
        bar = progress.add_task("evaluate", total=sum(map(len, pending.values())))
        for model in models:
            if not pending.get(model.name):
                continue
            lm = HFLM(pretrained=str(model.path), device=device, dtype=DTYPE, batch_size=batch_size)
            for task in pending[model.name]:
                progress.update(bar, description=f"{model.name} {task.name}")
                started = time.perf_counter()
                with quiet():
                    results = simple_evaluate(
                        model=lm,
                        tasks=[task.name],
                        task_manager=manager,
                        bootstrap_iters=BOOTSTRAP,
                        log_samples=True,
                        **seeds,
                    )
                samples = results.pop("samples")[task.name]
                target = out / model.name / task.name
                (target / "inputs.json").unlink(missing_ok=True)
                atomic_write(target / "results.json", json.dumps(results, indent=1, **encode) + "\n")
                lines = "".join(json.dumps(row, **encode) + "\n" for row in samples)
                atomic_write(target / "samples.jsonl", lines)
                # Not part of the digest: what a GPU node has evaluated is not done again where there is none.
                record = inputs(model, task, batch_size) | {
                    "device": device,
                    "seconds": round(time.perf_counter() - started, 3),
                }
                atomic_write(target / "inputs.json", json.dumps(record, indent=1) + "\n")
                progress.advance(bar)
                count += 1
    return count


@main_guard
def main(arguments: list[str] | None = None) -> None:
    """Evaluate exported models on lm-eval tasks, without network, and write table.csv."""
    parser = argparse.ArgumentParser(prog="python -m experiments.evaluate", description=main.__doc__)
    parser.add_argument(
        "--models", type=Path, nargs="+", required=True, metavar="DIR", help="exported folders"
    )
    parser.add_argument("--tasks-dir", type=Path, metavar="DIR", help="made by experiments.tasks.make")
    parser.add_argument("--tasks", nargs="+", metavar="NAME", help="default: every task of the folder")
    parser.add_argument(
        "--standard", nargs="+", default=[], metavar="NAME", help="tasks of lm-eval, fetched beforehand"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the study")
    # One by one, as lm-eval by itself does: padding within a batch changes last digits, and what shares a batch
    # depends on the tasks that are asked for together.
    parser.add_argument("--batch-size", type=int, default=1, metavar="N")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if any"
    )
    options = parser.parse_args(arguments)
    if options.batch_size < 1:
        raise UserError(
            f"--batch-size {options.batch_size} is not valid", fix="use a whole number of at least 1"
        )
    if options.tasks_dir is None and (options.tasks or not options.standard):
        raise UserError("no tasks given", fix="give --tasks-dir, --standard or both")
    os.environ.update(OFFLINE)  # before anything imports the hub's client
    tasks = read_tasks(options.tasks_dir, options.tasks) if options.tasks_dir else []
    tasks += read_standard(options.standard)
    folders = [*filter(None, [options.tasks_dir])]
    folders += dict.fromkeys(task.folder for task in standard_tasks(options.standard))
    models = read_models(options.models)
    rule = load_equivalence()
    check_writable(options.out)
    count = evaluate(
        models, tasks, folders, options.out, batch_size=options.batch_size, device=options.device
    )
    write_csv(options.out / "timings.csv", ("run", "task", "seconds"), timings(models, tasks, options.out))
    write_csv(options.out / "summary.csv", SUMMARY_COLUMNS, summary(models, tasks, options.out, rule))
    write_csv(options.out / "table.csv", COLUMNS, table(models, tasks, options.out, rule))
    total = sum(bool(model.info["model"]) for model in models) * len(tasks)
    print(f"{options.out / 'table.csv'}: {count} evaluations done, {total - count} taken from earlier ones")


if __name__ == "__main__":
    main()
