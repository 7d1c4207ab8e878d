"""What an evaluation is made from: exported models and task files, checked before lm-eval is imported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    marker = path / "run.json"
    if not marker.is_file():
        fix = "export the run first: python -m experiments.evaluation.export"
        raise UserError("no exported model", where=path, fix=fix)
    info = _read_json(marker)
    if "model" not in info or "run" not in info:
        raise damaged(marker, "lacks model or run")
    if not info["model"]:
        return Model(path, info, "")
    files = [path / name for name in READ]
    contents = []
    for file in files:
        if not file.is_file():
            raise UserError(f"the exported model has no {file.name}", where=path, fix="export the run again")
        contents.append(file.read_bytes())
        expected = info.get("files", {}).get(file.name)
        if expected is not None and hashlib.sha256(contents[-1]).hexdigest() != expected["sha256"]:
            short = len(contents[-1]) < expected["bytes"]
            raise damaged(file, "is cut short" if short else "has another content than was written")
    from tokenizers import Tokenizer

    expected = _read_json(files[0]).get("vocab_size")
    try:
        size = Tokenizer.from_file(str(files[1])).get_vocab_size()
    except Exception:  # `tokenizers` raises bare Exception
        raise damaged(files[1], "is no tokenizer") from None
    if size != expected:
        fix = "export the run again with its own data folder"
        raise UserError(f"the tokenizer has {size} tokens, the model {expected}", where=path, fix=fix)
    return Model(path, info, digest(*contents))


def damaged(file: Path, problem: str) -> UserError:
    """The error about one file of an exported model, with the folder to delete."""
    folder = file.parent.parent  # all models of a study, which are exported together
    fix = f"delete the folder {folder} and start again: the models are exported again"
    return UserError(f"exported model is damaged: {file.name} {problem}", where=file, fix=fix)


def _read_json(path: Path) -> Row:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise damaged(path, "is cut short or altered")
    return found


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


class _Loader(Loader):
    """Reads task files; ``!function`` becomes its text."""


_Loader.add_constructor("!function", lambda loader, node: str(node.value))


def read_tasks(folder: Path, names: Sequence[str] | None) -> list[TaskFile]:
    """The asked tasks of a folder (all of them when ``names`` is None), in the order asked or by name.

    Raises:
        UserError: missing folder, unknown name, missing rows, zero documents.
    """
    if not folder.is_dir():
        fix = "generate it: python -m experiments.evaluation.tasks.make"
        raise UserError("no folder of tasks", where=folder, fix=fix)
    known: dict[str, tuple[Path, Row]] = {}
    for path in sorted(folder.glob("*.yaml")):
        content = parse_yaml(path.read_bytes(), path, _Loader)
        known[content["task"]] = (path, content)
    about = folder / "tasks.json"
    manifest = json.loads(about.read_text(encoding="utf-8"))["tasks"] if about.is_file() else {}
    tasks = []
    for name in names or sorted(known):
        if name not in known:
            fix = f"known tasks: {', '.join(sorted(known))}"
            raise UserError(f"unknown task {name!r}", where=folder, fix=fix)
        path, content = known[name]
        parts = [path.read_bytes(), (folder / "utils.py").read_bytes()]
        file = (content.get("dataset_kwargs") or {}).get("file")
        if file is not None:
            rows = folder / file
            if not rows.is_file():
                raise UserError(f"task {name} has no rows", where=rows, fix="generate the tasks again")
            if not rows.read_bytes().strip():
                raise UserError(f"task {name} has zero documents", where=rows, fix="generate the tasks again")
            parts.append(rows.read_bytes())
        metrics = {entry["metric"]: bool(entry["higher_is_better"]) for entry in content["metric_list"]}
        version = str(content["metadata"]["version"])
        tasks.append(TaskFile(name, version, metrics, digest(*parts), manifest.get(name, {})))
    if not tasks:
        raise UserError("the folder holds no task", where=folder, fix="generate the tasks again")
    return tasks
