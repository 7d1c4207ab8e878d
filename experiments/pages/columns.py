"""The columns of the committed tables, described in ``docs/columns.yaml``, for ``docs/templates/columns.md``."""

import csv
from pathlib import Path

from edgc.errors import UserError
from experiments.common.files import KEPT, ROOT
from experiments.common.yaml_settings import Settings, load_yaml, validate

DESCRIPTIONS = Path("docs") / "columns.yaml"


class Descriptions(Settings):
    """``docs/columns.yaml``: columns by name, those of single tables, and endings of names with what they add."""

    suffixes: dict[str, str]
    columns: dict[str, str]
    tables: dict[str, dict[str, str]] = {}

    def find(self, table: str, column: str) -> str | None:
        """The description of a column; None where nothing says it."""
        known = self.columns | self.tables.get(table, {})
        with_suffix = (
            f"{known[stem]}: {adds}"
            for suffix, adds in self.suffixes.items()
            if (stem := column.removesuffix(suffix)) != column and stem in known
        )
        return known.get(column) or next(with_suffix, None)


def tables() -> dict[str, dict[str, None]]:
    """Columns of every committed table, of all scales and machines together: ``policies/pairs.csv``."""
    columns: dict[str, dict[str, None]] = {}
    for path in sorted(KEPT.rglob("*.csv")):
        scale, *rest = path.relative_to(KEPT).parts
        name = f"bench/{rest[-1]}" if scale == "bench" else "/".join(rest)
        with path.open(encoding="utf-8", newline="") as handle:
            columns.setdefault(name, {}).update(dict.fromkeys(next(csv.reader(handle))))
    return dict(sorted(columns.items()))


def described() -> list[tuple[str, str, str]]:
    """Column, description and, where it is not the same in all of them, its tables; in the order of the alphabet.

    Raises ``UserError`` where a column has no description, and where one describes no column.
    """
    about: Descriptions = validate(Descriptions, load_yaml(ROOT / DESCRIPTIONS), ROOT / DESCRIPTIONS)
    known, where = tables(), ROOT / DESCRIPTIONS
    used = {name.removesuffix(end) for names in known.values() for name in names for end in ("", *about.suffixes)}
    # A table may be described before it is kept.
    over = [name for name in about.columns if name not in used]
    for table, own in about.tables.items():
        over += [f"{table}: {name}" for name in own if name not in known.get(table, own)]
    if over:
        raise UserError(f"description without a column: {over[0]}", where=where, fix="remove it")
    columns: dict[str, dict[str, list[str]]] = {}
    for table, column in ((table, column) for table, names in known.items() for column in names):
        text = about.find(table, column)
        if text is None:
            fix = "describe it under `columns`, or under `tables` where it is that table's alone"
            raise UserError(f"column without a description: {table}: {column}", where=where, fix=fix)
        columns.setdefault(column, {}).setdefault(text, []).append(table)
    return [
        (column, text, ", ".join(f"`{name}`" for name in names) if len(texts) > 1 else "")
        for column, texts in sorted(columns.items())
        for text, names in texts.items()
    ]
