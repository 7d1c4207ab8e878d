"""``python -m experiments.pages.columns``: write docs/columns.md, which describes every column of the committed tables.

The descriptions stand in ``docs/columns.yaml``; which tables and columns there are, ``results/reference`` says.
"""

from __future__ import annotations

import csv
from pathlib import Path

import typer

from edgc.errors import UserError
from experiments.common.cli import main_guard
from experiments.common.files import ROOT, atomic_write
from experiments.common.yaml_settings import Settings, load_yaml, validate
from experiments.pages.marked_tables import markdown

DESCRIPTIONS = Path("docs") / "columns.yaml"
PAGE = Path("docs") / "columns.md"
INTRODUCTION = """# Tables and their columns

Every table that is committed, with all of its columns; tables that have the same stand together. A table of a study is
the same at every scale. Those of benchmarks lie in a folder for each machine. This page is written by `python -m
experiments.pages.columns` from `docs/columns.yaml`.
"""


class Descriptions(Settings):
    """``docs/columns.yaml``: of columns by name, of single tables, and endings of names with what they add."""

    suffixes: dict[str, str]
    columns: dict[str, str]
    tables: dict[str, dict[str, str]] = {}

    def of(self, table: str, column: str) -> str | None:
        """What a column holds; None where nothing says it."""
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


def undescribed(root: Path = ROOT) -> list[str]:
    """``table: column`` for each column without a description."""
    about = load(root)
    return [
        f"{name}: {column}"
        for name, columns in tables(root).items()
        for column in columns
        if not about.of(name, column)
    ]


def unused(root: Path = ROOT) -> list[str]:
    """Descriptions of columns that are not there; a table may be described before it is kept."""
    about, known = load(root), tables(root)
    names = {column for columns in known.values() for column in columns}
    stems = {column.removesuffix(suffix) for column in names for suffix in about.suffixes}
    found = [name for name in about.columns if name not in names | stems]
    for table, columns in about.tables.items():
        found += [f"{table}: {column}" for column in columns if column not in known.get(table, columns)]
    return found


def page(root: Path = ROOT) -> str:
    """The whole page. ``UserError`` where a column has no description."""
    missing = undescribed(root)
    about = load(root)
    if missing:
        fix = "describe it under `columns`, or under `tables` where it is that table's alone"
        raise UserError(f"column without a description: {missing[0]}", where=root / DESCRIPTIONS, fix=fix)
    alike: dict[str, list[str]] = {}
    for name, columns in tables(root).items():
        rows = [[f"`{column}`", str(about.of(name, column))] for column in columns]
        alike.setdefault(markdown(("column", "what it holds"), rows), []).append(name)
    return INTRODUCTION + "".join(f"\n## {', '.join(names)}\n\n{text}" for text, names in alike.items())


@main_guard
def main() -> None:
    """Write docs/columns.md."""
    atomic_write(ROOT / PAGE, page())
    print(PAGE)


if __name__ == "__main__":
    typer.run(main)
