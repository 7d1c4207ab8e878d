"""Inputs of an evaluation: exported models and tasks, checked before lm-eval is imported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgc.checkpoints import manifest
from edgc.errors import UserError
from experiments.common.yaml_settings import Loader, parse_yaml

Row = dict[str, Any]
READ = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")  # of an exported model


@dataclass(frozen=True)
class Model:
    """One exported folder: ``info`` is its ``run.json``, ``digest`` covers all that an evaluation reads."""

    path: Path
    info: Row
    digest: str

    @property
    def name(self) -> str:
        return str(self.info["run"])


@dataclass(frozen=True)
class Task:
    """One task: its metrics by name (is higher better?), and the digest of all that defines it."""

    name: str
    version: str
    metrics: dict[str, bool]
    digest: str
    reference: Row  # "chance" and "best_constant", by metric
    documents: str | None = None  # fingerprint of a standard task's


def digest(*parts: bytes | str) -> str:
    """SHA-256 over the parts, each preceded by its length."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()


class TaskLoader(Loader):
    """Loader of task files: ``!function module.name`` becomes its text."""


TaskLoader.add_constructor("!function", lambda loader, node: str(node.value))


def read_model(path: Path) -> Model:
    """Check an exported folder without loading the model; ``UserError`` for what is missing or does not fit."""
    from tokenizers import Tokenizer

    marker = path / "run.json"
    if not marker.is_file():
        fix = "export the run first: python -m experiments.evaluation.export"
        raise UserError("no exported model", where=path, fix=fix)
    try:
        info: Row = json.loads(marker.read_text(encoding="utf-8"))
        exported, _ = info["model"], info["run"]
    except (ValueError, KeyError, TypeError):
        raise damaged(marker, "is cut short or altered") from None
    if not exported:
        return Model(path, info, "")
    for file in (path / name for name in READ):
        if not file.is_file():
            raise UserError(f"the exported model has no {file.name}", where=path, fix="export the run again")
        expected = info.get("files", {}).get(file.name)
        if expected and (problem := manifest.problem(file, manifest.Entry(**expected))):
            raise damaged(file, problem)
    size = Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab_size()
    if size != (rows := json.loads((path / "config.json").read_text(encoding="utf-8"))["vocab_size"]):
        raise UserError(f"the tokenizer has {size} tokens, the model {rows}", where=path, fix="export the run again")
    return Model(path, info, digest(*((path / name).read_bytes() for name in READ)))


def damaged(file: Path, problem: str) -> UserError:
    """Error about one file of an exported model, with the folder to delete."""
    folder = file.parent.parent  # all models of a study, which are exported together
    fix = f"delete the folder {folder} and start again: the models are exported again"
    return UserError(f"exported model is damaged: {file.name} {problem}", where=file, fix=fix)


def read_models(paths: Sequence[Path]) -> list[Model]:
    """Check all exported folders; two of one name would write to one place and are refused."""
    models: dict[str, Model] = {}
    for path in paths:
        model = read_model(path)
        if model.name in models:
            fix = f"{models[model.name].path} has the same name; give each run once"
            raise UserError(f"two models are called {model.name}", where=path, fix=fix)
        models[model.name] = model
    return list(models.values())


def read_tasks(folder: Path) -> list[Task]:
    """Tasks of a folder, by name; ``UserError`` where it holds none, or one without documents."""
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise UserError("no tasks", where=folder, fix="generate them: python -m experiments.evaluation.tasks.make")
    references = json.loads((folder / "tasks.json").read_text(encoding="utf-8"))["tasks"]
    tasks = []
    for path in files:
        content = parse_yaml(path.read_bytes(), path, TaskLoader)
        rows = folder / content["dataset_kwargs"]["file"]
        if not rows.is_file() or not rows.read_bytes().strip():
            raise UserError(f"task {path.stem} has zero documents", where=rows, fix="generate the tasks again")
        total = digest(*(file.read_bytes() for file in (path, folder / "utils.py", rows)))
        metrics = {entry["metric"]: bool(entry["higher_is_better"]) for entry in content["metric_list"]}
        version = str(content["metadata"]["version"])
        tasks.append(Task(path.stem, version, metrics, total, references[path.stem]))
    return tasks


def read_standard(path: Path) -> list[Task]:
    """Standard tasks by their records (:mod:`experiments.evaluation.standard_tasks`)."""
    return [
        Task(
            name,
            entry["version"],
            entry["metrics"],
            digest(entry["version"], entry["dataset"], entry["fingerprint"]),
            {"chance": entry["chance"]},
            entry["fingerprint"],
        )
        for name, entry in json.loads(path.read_text(encoding="utf-8"))["tasks"].items()
    ]
