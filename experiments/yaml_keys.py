"""YAML in which a key that stands twice in one mapping is an error: PyYAML takes the last one and says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from edgc.errors import UserError


class DuplicateKey(yaml.YAMLError):
    """A key stands twice in one mapping; ``lines`` are counted from 1."""

    def __init__(self, key: str, lines: tuple[int, int]) -> None:
        super().__init__(f"key {key} appears twice, in lines {lines[0]} and {lines[1]}")


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                continue  # what `<<` brings in may be said again
            line = key.start_mark.line + 1
            if key.value in seen:
                raise DuplicateKey(key.value, (seen[key.value], line))
            seen[key.value] = line
        return dict(super().construct_mapping(node, deep))


def ends_whole(path: Path) -> None:
    """Refuse a list that does not end with YAML's end of document, ``...``: a shorter one would say nothing.

    Raises:
        UserError: the file was cut short.
    """
    if not path.read_text(encoding="utf-8").endswith("\n...\n"):
        fix = "restore it from version control; its last line is `...`"
        raise UserError("the file is cut short", where=path, fix=fix)


def load(text: str) -> Any:
    """The content of one YAML document.

    Raises:
        DuplicateKey: a key stands twice in one mapping.
        yaml.YAMLError: the text is not valid YAML.
    """
    return yaml.load(text, _Loader)
