"""Settings in YAML files: a key given twice is refused, and pydantic's report becomes one line.

PyYAML takes the last of two equal keys and says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from edgc.errors import UserError, nearest


class Settings(BaseModel):
    """Base of all settings: frozen; unknown keys, and numbers that are not finite, are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DuplicateKey(Exception):
    """A key that stands twice in a mapping."""


# What PyYAML raises at a value that it cannot make: a day 2020-13-45, `!!bool maybe`, `!!int ''`.
BAD_VALUE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
# libyaml's parser where PyYAML was built with it: ten times as fast.
_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Loader(_Safe):
    """Loader of plain values only; a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                continue  # what `<<` brings in may be said again
            line = key.start_mark.line + 1
            if key.value in lines:
                raise DuplicateKey(f"key {key.value} appears twice, in lines {lines[key.value]} and {line}")
            lines[key.value] = line
        return dict(super().construct_mapping(node, deep))


def ends_whole(path: Path) -> None:
    """Refuse a list without YAML's end of document, ``...``: cut short it would say nothing. Raises ``UserError``."""
    if not path.read_text(encoding="utf-8").endswith("\n...\n"):
        fix = "restore it from version control; its last line is `...`"
        raise UserError("the file is cut short", where=path, fix=fix)


def load_yaml(path: Path) -> dict[str, Any]:
    """Mapping in a YAML file, empty for one of comments alone; ``UserError`` where it is missing or malformed."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), path)
    except UnicodeDecodeError:
        raise UserError("not a text in UTF-8", where=path, fix="restore the file") from None
    except FileNotFoundError:
        raise UserError("file not found", where=path, fix="check the name") from None
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror}", where=path) from None


def parse_yaml(text: str | bytes, where: object, loader: type[Loader] = Loader) -> dict[str, Any]:
    """Mapping that ``text`` stands for; ``UserError``, naming ``where``, for everything else."""
    try:
        value = yaml.load(text, loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" at line {mark.line + 1}" if mark else ""
        raise UserError(f"not valid YAML{line}: {error.problem}", where=where, fix="correct it") from None
    except DuplicateKey as error:
        raise UserError(str(error), where=where, fix="keep one of them") from None
    except (yaml.YAMLError, *BAD_VALUE) as error:
        raise UserError(f"not valid YAML: {error}", where=where, fix="correct it") from None
    if value is None and text.strip():
        return {}  # nothing but comments
    if not isinstance(value, dict):
        raise UserError("not a mapping of settings", where=where, fix="write `key: value` lines")
    return value


def validate(model: type[BaseModel], values: Mapping[str, Any], where: object) -> Any:
    """Build ``model(**values)``, with the first problem of pydantic's report as one line."""
    try:
        return model(**values)
    except ValidationError as error:
        # A key that is misspelt is also missing under its name; the spelling is what helps.
        first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
        key, kind = ".".join(map(str, first["loc"])), first["type"]
        if kind == "extra_forbidden":
            fix = nearest(first["loc"][-1], _known_keys(model, first["loc"][:-1]), "known keys")
            raise UserError(f"unknown key {key}", where=where, fix=fix) from None
        if kind == "missing":
            raise UserError(f"missing key {key}", where=where, fix="add it") from None
        message, _, fix = first["msg"].removeprefix("Value error, ").partition("; ")
        if key:
            message = f"{key} = {first['input']!r}: {message}"
        raise UserError(message, where=where, fix=fix or "correct the value") from None


def _known_keys(model: Any, path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        field = getattr(model, "model_fields", {}).get(part)
        model = field.annotation if field is not None else None
    return list(getattr(model, "model_fields", ()))
