"""Inputs of an evaluation: exported models and task files, checked before lm-eval is imported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgc.checkpoints import manifest
from edgc.errors import UserError
from experiments.spec.task_catalogue import task_files

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
class TaskFile:
    """One task: its metrics by name (is higher better?), and the digest of all that defines it."""

    name: str
    version: str
    metrics: dict[str, bool]
    digest: str
    reference: Row  # "chance" and "best_constant", by metric


def digest(*parts: bytes | str) -> str:
    """SHA-256 over the parts, each preceded by its length."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()


def read_model(path: Path) -> Model:
    """Check an exported folder without loading the model; ``UserError`` for what is missing or does not fit."""
    from tokenizers import Tokenizer

    marker = path / "run.json"
    if not marker.is_file():
        fix = "export the run first: python -m experiments.evaluation.export"
        raise UserError("no exported model", where=path, fix=fix)
    info = _read_json(marker)
    if "model" not in info or "run" not in info:
        raise damaged(marker, "lacks model or run")
    if not info["model"]:
        return Model(path, info, "")
    config, tokenizer = path / "config.json", path / "tokenizer.json"
    for file in (path / name for name in READ):
        if not file.is_file():
            raise UserError(f"the exported model has no {file.name}", where=path, fix="export the run again")
        expected = info.get("files", {}).get(file.name)
        if expected and (problem := manifest.problem(file, manifest.Entry(**expected))):
            raise damaged(file, problem)
    vocab_size = _read_json(config).get("vocab_size")
    try:
        size = Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    except Exception:  # `tokenizers` raises bare Exception
        raise damaged(tokenizer, "is no tokenizer") from None
    if size != vocab_size:
        fix = "export the run again with its own data folder"
        raise UserError(f"the tokenizer has {size} tokens, the model {vocab_size}", where=path, fix=fix)
    return Model(path, info, digest(*((path / name).read_bytes() for name in READ)))


def damaged(file: Path, problem: str) -> UserError:
    """Error about one file of an exported model, with the folder to delete."""
    folder = file.parent.parent  # all models of a study, which are exported together
    fix = f"delete the folder {folder} and start again: the models are exported again"
    return UserError(f"exported model is damaged: {file.name} {problem}", where=file, fix=fix)


def _read_json(path: Path) -> Row:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise damaged(path, "is cut short or altered") from None


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


def read_tasks(folder: Path, names: Sequence[str] | None) -> list[TaskFile]:
    """Tasks of a folder by ``names``, in their order (None: all of them, by name).

    Raises:
        UserError: missing folder, unknown name, missing rows, zero documents.
    """
    if not folder.is_dir():
        fix = "generate it: python -m experiments.evaluation.tasks.make"
        raise UserError("no folder of tasks", where=folder, fix=fix)
    known = {content["task"]: (content, files) for content, files in map(task_files, sorted(folder.glob("*.yaml")))}
    if not known:
        raise UserError("the folder holds no task", where=folder, fix="generate the tasks again")
    about = folder / "tasks.json"
    references = json.loads(about.read_text(encoding="utf-8"))["tasks"] if about.is_file() else {}
    tasks = []
    for name in names or sorted(known):
        if name not in known:
            fix = f"known tasks: {', '.join(sorted(known))}"
            raise UserError(f"unknown task {name!r}", where=folder, fix=fix)
        content, files = known[name]
        parts = [*files]
        if file := (content.get("dataset_kwargs") or {}).get("file"):
            parts.append(folder / file)
            if not parts[-1].is_file() or not parts[-1].read_bytes().strip():
                problem = "zero documents" if parts[-1].is_file() else "no rows"
                raise UserError(f"task {name} has {problem}", where=parts[-1], fix="generate the tasks again")
        metrics = {entry["metric"]: bool(entry["higher_is_better"]) for entry in content["metric_list"]}
        version, total = str(content["metadata"]["version"]), digest(*(path.read_bytes() for path in parts))
        tasks.append(TaskFile(name, version, metrics, total, references.get(name, {})))
    return tasks
