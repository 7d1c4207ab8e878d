"""The columns of the committed tables, described in ``docs/columns.yaml``, for ``docs/templates/columns.md``."""

from __future__ import annotations

import csv
from pathlib import Path

from edgc.errors import UserError
from experiments.common.files import ROOT
from experiments.common.yaml_settings import Settings, load_yaml, validate

DESCRIPTIONS = Path("docs") / "columns.yaml"


class Descriptions(Settings):
    """``docs/columns.yaml``: columns by name, those of single tables, and endings of names with what they add."""

    suffixes: dict[str, str]
    columns: dict[str, str]
    tables: dict[str, dict[str, str]] = {}

    def find(self, table: str, column: str) -> str | None:
        """The description of a column; None where nothing says it."""
        known = {**self.columns, **self.tables.get(table, {})}
        if column in known:
            return known[column]
        for suffix, adds in self.suffixes.items():
            stem = column.removesuffix(suffix)
            if stem != column and stem in known:
                return f"{known[stem]}: {adds}"
        return None


def tables(root: Path = ROOT) -> dict[str, list[str]]:
    """Columns of every committed table, of all scales and machines together: ``policies/pairs.csv``."""
    found: dict[str, list[str]] = {}
    reference = root / "results" / "reference"
    for path in sorted(reference.rglob("*.csv")):
        scale, *rest = path.relative_to(reference).parts
        name = f"bench/{rest[-1]}" if scale == "bench" else "/".join(rest)
        with path.open(encoding="utf-8", newline="") as handle:
            header = next(csv.reader(handle))
        found.setdefault(name, []).extend(column for column in header if column not in found.get(name, []))
    return dict(sorted(found.items()))


def load(root: Path = ROOT) -> Descriptions:
    """The descriptions; ``UserError`` names the key at fault."""
    found: Descriptions = validate(Descriptions, load_yaml(root / DESCRIPTIONS), root / DESCRIPTIONS)
    return found


def unused(root: Path = ROOT) -> list[str]:
    """Descriptions of columns that no table has; a table may be described before it is kept."""
    about, known = load(root), tables(root)
    names = {column for columns in known.values() for column in columns}
    stems = {column.removesuffix(suffix) for column in names for suffix in about.suffixes}
    found = [name for name in about.columns if name not in names | stems]
    for table, columns in about.tables.items():
        found += [f"{table}: {column}" for column in columns if column not in known.get(table, columns)]
    return found


def described(root: Path = ROOT) -> list[tuple[str, str, str]]:
    """Column, description and, where it is not the same in all of them, its tables; in the order of the alphabet.

    Raises ``UserError`` where a column has no description.
    """
    about = load(root)
    found: dict[str, dict[str, list[str]]] = {}
    for table, columns in tables(root).items():
        for column in columns:
            text = about.find(table, column)
            if text is None:
                fix = "describe it under `columns`, or under `tables` where it is that table's alone"
                raise UserError(f"column without a description: {table}: {column}", where=root / DESCRIPTIONS, fix=fix)
            found.setdefault(column, {}).setdefault(text, []).append(table)
    return [
        (column, text, ", ".join(f"`{name}`" for name in names) if len(texts) > 1 else "")
        for column, texts in sorted(found.items())
        for text, names in texts.items()
    ]
