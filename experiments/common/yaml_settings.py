"""Settings in YAML files: a key given twice is refused, and pydantic's report becomes one line.

PyYAML takes the last of two equal keys and says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from yaml.constructor import ConstructorError

from edgc.errors import UserError, nearest

LONGEST = 60  # characters of a value in a message


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DuplicateKey(yaml.YAMLError):
    """A key stands twice in one mapping; ``lines`` are counted from 1."""

    def __init__(self, key: str, lines: tuple[int, int]) -> None:
        super().__init__(f"key {key} appears twice, in lines {lines[0]} and {lines[1]}")


# libyaml's parser where PyYAML was built with it: ten times as fast.
_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Loader(_Safe):
    """Reads plain values only; what PyYAML raises of one that it cannot make, such as a day that there is not, is an
    error of YAML at its line."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError):
            value = f" {_shortened(node.value)}" if isinstance(node, yaml.ScalarNode) else ""
            kind = node.tag.rpartition(":")[2]
            raise ConstructorError(None, None, f"{kind}{value} cannot be read", node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                continue  # what `<<` brings in may be said again
            line = key.start_mark.line + 1
            if key.value in seen:
                raise DuplicateKey(key.value, (seen[key.value], line))
            seen[key.value] = line
        return dict(super().construct_mapping(node, deep))


def ends_whole(path: Path) -> None:
    """Refuse a list without YAML's end of document, ``...``: cut short it would say nothing. Raises ``UserError``."""
    if not path.read_text(encoding="utf-8").endswith("\n...\n"):
        fix = "restore it from version control; its last line is `...`"
        raise UserError("the file is cut short", where=path, fix=fix)


def _shortened(text: str) -> str:
    """A value as a message names it."""
    return repr(text if len(text) <= LONGEST else f"{text[:LONGEST]}...")


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; missing, unreadable or malformed files are user errors."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), path)
    except UnicodeDecodeError:
        raise UserError("not a text in UTF-8", where=path, fix="restore the file") from None
    except FileNotFoundError:
        raise UserError("file not found", where=path, fix="check the name") from None
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror}", where=path) from None


def parse_yaml(text: str | bytes, where: object, loader: type[Loader] = Loader) -> dict[str, Any]:
    """The mapping that ``text`` is; ``UserError``, naming ``where``, for everything else."""
    try:
        value = yaml.load(text, loader)
    except DuplicateKey as error:
        raise UserError(str(error), where=where, fix="keep one of them") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        made = f": {error.problem}" if isinstance(error, ConstructorError) else ""
        fix = "correct the value" if made else "correct the syntax"
        raise UserError(f"not valid YAML{line}{made}", where=where, fix=fix) from None
    except RecursionError:
        raise UserError("too many levels", where=where, fix="correct the syntax") from None
    if not isinstance(value, dict):
        raise UserError("not a mapping of settings", where=where, fix="write `key: value` lines")
    return value


def validate(model: type[BaseModel], values: Mapping[str, Any], where: object) -> Any:
    """``model(**values)`` with pydantic's report turned into the first problem as one line."""
    try:
        return model(**values)
    except ValidationError as error:
        # A key that is misspelt is also missing under its name; the spelling is what helps.
        problems = error.errors()
        first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = _known_keys(model, first["loc"][:-1])
            fix = nearest(first["loc"][-1], known, "known keys")
            raise UserError(f"unknown key {key}", where=where, fix=fix) from None
        if first["type"] == "missing":
            raise UserError(f"missing key {key}", where=where, fix="add it") from None
        message = first["msg"].removeprefix("Value error, ")
        if key:
            message = f"{key} = {first['input']!r}: {message}"
        what, _, fix = message.partition("; ")
        raise UserError(what, where=where, fix=fix or "correct the value") from None


def _known_keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    current: Any = model
    for part in path:
        field = current.model_fields.get(part)
        current = field.annotation if field is not None else None
        if current is None or not hasattr(current, "model_fields"):
            return []
    return list(current.model_fields)
