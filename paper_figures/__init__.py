"""Figures of studies and benchmarks, drawn from tables alone.

A file here says ``TABLES``, the tables that its figure reads, and ``CAPTION``, its text in the report (in
reStructuredText), and has ``draw(results: Path) -> Figure``. The figure is called as the file, unless ``TABLES`` maps
the names of several figures to their tables: each is then drawn by ``draw(results, name)``, and ``WORDS`` maps it to
what stands in the braces of its caption. ``OPTIONAL`` names studies without whose tables a figure can be drawn, and
says so in its note. Tables of studies are named ``study/table.csv``, below the folder of a scale; those of a benchmark
lie in its folder. Files without ``TABLES`` hold what figures share. All of
this is read here without importing a figure, so that planning needs no plotting library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.common.source import constant

FOLDER = Path(__file__).parent


def _study(table: str) -> str:
    return table.partition("/")[0]


def _read() -> dict[str, tuple[str, tuple[str, ...]]]:
    said = {path.stem: tables for path in sorted(FOLDER.glob("*.py")) if (tables := constant(path, "TABLES"))}
    several = {stem: tables if isinstance(tables, dict) else {stem: tables} for stem, tables in said.items()}
    return {name: (stem, tables) for stem, own in several.items() for name, tables in own.items()}


_FOUND = _read()
# figure -> its module
MODULES = {name: f"paper_figures.{stem}" for name, (stem, _) in _FOUND.items()}
# figure -> tables of studies that it reads
INPUTS = {name: tables for name, (_, tables) in _FOUND.items() if all("/" in table for table in tables)}
# figure of a benchmark -> files in the benchmark's folder that it reads
BENCHMARKS = {name: tables for name, (_, tables) in _FOUND.items() if name not in INPUTS}


def _said(name: str, what: str) -> Any:
    return constant(FOLDER / f"{_FOUND[name][0]}.py", what)


# figure -> those of its tables of which it draws what is there; the workflow makes them all the same
OPTIONAL = {
    name: tuple(table for table in tables if _study(table) in (_said(name, "OPTIONAL") or ()))
    for name, tables in INPUTS.items()
}
# figure -> studies whose tables it reads
FIGURES = {name: tuple(dict.fromkeys(map(_study, tables))) for name, tables in INPUTS.items()}


def caption(name: str) -> str:
    """The text under a figure in the report."""
    text, words = str(_said(name, "CAPTION") or ""), _said(name, "WORDS")
    return text.format(**words[name]) if words else text
