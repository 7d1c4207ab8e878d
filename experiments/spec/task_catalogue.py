"""Tasks that a study evaluates, and the content of lm-eval's own files about its standard tasks.

lm-eval's task files are read as text: importing lm-eval takes seconds, and a plan or a check does not need it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import PositiveInt, field_validator

from edgc.errors import UserError, nearest
from experiments.common.yaml_settings import Loader, Settings, parse_yaml

# Name in lm-eval -> its file below lm_eval/tasks. Building an index of all its tasks would take 12 to 25 s.
STANDARD = {
    "lambada_openai": "lambada/lambada_openai.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "mathqa": "mathqa/mathqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "race": "race/race.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "wikitext": "wikitext/wikitext.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "copa": "super_glue/copa/default.yaml",
}
# What lm-eval takes where a task file does not say `higher_is_better`.
HIGHER_IS_BETTER = {
    **dict.fromkeys(("acc", "acc_norm"), True),
    **dict.fromkeys(("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"), False),
}


def unknown(name: str) -> str:
    """Error about a name that is no standard task, with the one that was meant."""
    return f"unknown standard task {name!r}; {nearest(name, STANDARD, 'known tasks')}"


class Evaluation(Settings):
    """Tasks and options of a study with ``needs``, which evaluates models.

    ``held_out``: the tasks made from the held-out text; ``standard``: names of lm-eval's tasks, whose data is
    fetched beforehand; ``batch_size``: documents at once; ``device``: ``auto`` takes a GPU where there is one.
    """

    held_out: bool = False
    standard: list[str] = []
    batch_size: PositiveInt = 16
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @field_validator("standard")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in STANDARD:
                raise ValueError(unknown(name))
        if len(set(names)) < len(names):
            raise ValueError("a task is named twice; name each once")
        return names


@dataclass(frozen=True)
class StandardTask:
    """Content of lm-eval's files about a task; ``split`` is the one that is evaluated.

    ``files`` are all that define the task: its YAML, what that includes, and the modules that they call.
    """

    name: str
    version: str
    dataset: str
    config: str | None
    split: str
    metrics: dict[str, bool]
    files: tuple[Path, ...]

    @property
    def folder(self) -> Path:
        return self.files[0].parent


def standard_task(name: str) -> StandardTask:
    """Read a task's files; ``UserError`` for an unknown name, or an lm-eval without this task."""
    if name not in STANDARD:
        message, _, fix = unknown(name).partition("; ")
        raise UserError(message, fix=fix)
    path = tasks_folder() / STANDARD[name]
    if not path.is_file():
        fix = "install the versions of requirements.lock"
        raise UserError(f"this lm-eval has no task {name}", where=path, fix=fix)
    content, files = task_files(path)
    metrics = {
        entry["metric"]: bool(entry.get("higher_is_better", HIGHER_IS_BETTER[entry["metric"]]))
        for entry in content["metric_list"]
    }
    return StandardTask(
        name=name,
        version=str(content["metadata"]["version"]),
        dataset=content["dataset_path"],
        config=content.get("dataset_name"),
        split=content.get("test_split") or content["validation_split"],
        metrics=metrics,
        files=tuple(files),
    )


def standard_tasks(names: Sequence[str]) -> list[StandardTask]:
    return [standard_task(name) for name in names]


def lm_eval_version() -> str:
    return importlib.metadata.version("lm_eval")


def tasks_folder() -> Path:
    """lm-eval's folder of tasks, found without importing it."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("lm-eval is not installed", fix="install the versions of requirements.lock")
    return Path(spec.submodule_search_locations[0], "tasks")


def task_files(path: Path) -> tuple[dict[str, Any], list[Path]]:
    """The YAML at ``path`` over what it includes, as lm-eval merges them, and all files that define the task."""
    files = [path]

    class TaskLoader(Loader):
        """``!function module.name`` becomes its text, and its module one of the files."""

    def function(loader: Loader, node: yaml.ScalarNode) -> str:
        module = path.parent / (node.value.rpartition(".")[0].replace(".", "/") + ".py")
        files.extend([module] if module.is_file() else [])
        return str(node.value)

    TaskLoader.add_constructor("!function", function)
    content = parse_yaml(path.read_bytes(), path, TaskLoader)
    includes = content.pop("include", [])
    merged: dict[str, Any] = {}
    for include in includes if isinstance(includes, list) else [includes]:
        included, more = task_files(path.parent / include)
        merged |= included
        files += more
    return merged | content, list(dict.fromkeys(files))
