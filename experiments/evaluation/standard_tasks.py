"""Data of lm-eval's standard tasks: fetched once where there is a network, used without one everywhere else.

``prefetch`` has lm-eval load every standard task of a study, which downloads its dataset into the cache of `datasets`.
``check`` loads them from there without a network, and records what they are: task version, dataset, revision, and a
fingerprint of the documents. An evaluation takes these records, and refuses other documents.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from filelock import FileLock, Timeout

from edgc.errors import UserError
from experiments.common.cli import main_guard
from experiments.common.files import atomic_write, check_writable
from experiments.evaluation.inputs import Row, digest
from experiments.spec import matrix
from experiments.spec.study import STANDARD

app = typer.Typer(add_completion=False, help="Data of lm-eval's standard tasks.")


def task_folder(name: str) -> Path:
    """lm-eval's folder with the file of a standard task; found without importing lm-eval, which takes seconds."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("lm-eval is not installed", fix="install the versions of requirements.lock")
    return Path(spec.submodule_search_locations[0], "tasks", STANDARD[name]).parent


def load(name: str) -> Any:
    """lm-eval's own task object; making it downloads the dataset, if that may be, and renders one document.

    Raises:
        UserError: the dataset cannot be had, or not be read.
    """
    from experiments.evaluation.evaluate import quiet, task_manager

    with quiet():
        try:  # in here, so that what was held back is not printed: one line says it
            task = task_manager((task_folder(name),)).load([name])["tasks"][name]
            return task, list(task.eval_docs)
        except Exception as error:  # of lm-eval, datasets, the hub's client, the network
            reason = error.__cause__ if type(error).__name__ == "DatasetGenerationError" and error.__cause__ else error
    lines = str(reason).strip().splitlines() or ["no message"]
    message = f"data of standard task {name} cannot be used: {type(reason).__name__}: {lines[0]}"
    raise UserError(message, fix="fetch it on a machine with network: make prefetch SCALE=paper")


def record(name: str) -> Row:
    """Facts about a task whose data is there; ``UserError`` where it is not, or not whole."""
    task, documents = load(name)
    split = task.config.test_split or task.config.validation_split
    rows = task.dataset[split]
    folder, expected = Path(rows.cache_files[0]["filename"]).parent, rows.info.splits[split].num_examples
    if not documents or len(documents) != expected:
        message = f"task {name} has {len(documents)} documents in the cache, {expected} were fetched"
        raise UserError(message, where=folder, fix="delete the folder: make prefetch SCALE=paper fetches it again")
    chance = {}
    if task.OUTPUT_TYPE == "multiple_choice":  # questions of one task may have different numbers of choices
        share = sum(1 / len(task.doc_to_choice(document)) for document in documents) / len(documents)
        chance = {metric: share for metric in task.higher_is_better() if metric in ("acc", "acc_norm")}
    return {
        "version": str(task.VERSION),
        "lm_eval": importlib.metadata.version("lm_eval"),
        "dataset": task.config.dataset_path,
        "config": folder.parts[-3],
        "revision": folder.name,
        "split": split,
        "documents": len(documents),
        "fingerprint": fingerprint(documents),
        "metrics": task.higher_is_better(),
        "chance": chance,
    }


def fingerprint(documents: Iterable[Row]) -> str:
    """Digest of a task's documents, in their order."""
    return digest(*(json.dumps(document, sort_keys=True, default=str) for document in documents))


def records(names: Iterable[str]) -> dict[str, Row]:
    """Records of tasks, each with a line that says what it is."""
    entries = {}
    for name in names:
        entry = entries[name] = record(name)
        where = f"{entry['dataset']} ({entry['config']}, {entry['revision'][:12]})"
        print(f"{name}: version {entry['version']}, {where}, {entry['documents']} documents", flush=True)
    return entries


def copies(name: str) -> list[Path]:
    """Folders of a task's dataset in the cache of `datasets`, with ``<revision>.incomplete`` of killed downloads."""
    import datasets
    from lm_eval.tasks._yaml_loader import load_yaml

    task = load_yaml(task_folder(name) / Path(STANDARD[name]).name, resolve_func=False)
    dataset = Path(datasets.config.HF_DATASETS_CACHE, task["dataset_path"].replace("/", "___"))
    return sorted(dataset.glob(f"{task.get('dataset_name') or '*'}/*/*/"))


def whole(copy: Path) -> bool:
    """Tell if a copy has all rows that were written into it; `datasets` stumbles over others."""
    import datasets

    try:
        splits = json.loads((copy / "dataset_info.json").read_text(encoding="utf-8"))["splits"].values()
        files = [path for path in copy.glob("*.arrow") if not path.name.startswith("cache-")]
        rows = sum(len(datasets.Dataset.from_file(str(path))) for path in files)
    except Exception:  # of the file system, JSON, arrow
        return False
    return copy.suffix != ".incomplete" and rows == sum(split["num_examples"] for split in splits)


def remove(copy: Path) -> None:
    """Remove a copy under the lock that `datasets` holds while it writes one; ``UserError`` where it does."""
    try:
        with FileLock(copy.with_name(f"{copy.name.removesuffix('.incomplete')}_builder.lock"), timeout=0):
            shutil.rmtree(copy)
    except Timeout:
        raise UserError("another process is fetching it", where=copy, fix="wait for its end") from None


Study = Annotated[str, typer.Option(help="Study whose tasks are meant.")]
Scale = Annotated[str, typer.Option(help="Scale at which the study is made.")]


@app.command("prefetch")
@main_guard
def prefetch(study: Study = "zero_shot", scale: Scale = "paper") -> None:
    """Download what is missing or damaged, on a machine with network."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    names = matrix.evaluation(study, scale).standard
    if not names:
        print(f"{study} evaluates no standard task at scale {scale}: nothing to fetch")
        return
    import datasets

    check_writable(Path(datasets.config.HF_DATASETS_CACHE))
    missing = []
    for name in names:
        try:
            for copy in copies(name):
                if not whole(copy):
                    remove(copy)
            records([name])
        except UserError as error:
            missing.append(name)
            print(f"{name}: not fetched: {error}", flush=True)
    if missing:
        message = f"{len(missing)} of {len(names)} tasks were not fetched: {', '.join(missing)}"
        raise UserError(message, fix="say it again where there is a network: make prefetch SCALE=paper")


@app.command("check")
@main_guard
def check(out: Annotated[Path, typer.Option(help="File for the records.")], study: Study, scale: Scale) -> None:
    """Load all tasks without a network, and write their records."""
    from experiments.evaluation.evaluate import OFFLINE

    os.environ.update(OFFLINE)  # before anything imports the hub's client
    entries = records(matrix.evaluation(study, scale).standard)
    atomic_write(out, json.dumps({"format": 2, "tasks": entries}, indent=1) + "\n")


if __name__ == "__main__":
    app()
