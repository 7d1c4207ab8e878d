"""Figures and the tables that they are drawn from, as the files in ``paper_figures`` declare them.

Read without importing a figure, so that planning needs no plotting library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.common.files import ROOT
from experiments.common.source import constant

FOLDER = ROOT / "paper_figures"


def _declared() -> dict[str, tuple[str, tuple[str, ...]]]:
    """File and tables of every figure."""
    tables = {path.stem: read for path in sorted(FOLDER.glob("*.py")) if (read := constant(path, "TABLES"))}
    several = {stem: read if isinstance(read, dict) else {stem: read} for stem, read in tables.items()}
    return {name: (stem, read) for stem, figures in several.items() for name, read in figures.items()}


_DECLARED = _declared()
# figure -> its module
MODULES = {name: f"paper_figures.{stem}" for name, (stem, _) in _DECLARED.items()}
# figure -> tables of studies that it reads
INPUTS = {name: tables for name, (_, tables) in _DECLARED.items() if all("/" in table for table in tables)}
# figure of a benchmark -> files in the benchmark's folder that it reads
BENCHMARKS = {name: tables for name, (_, tables) in _DECLARED.items() if name not in INPUTS}


def _constant(figure: str, name: str) -> Any:
    return constant(FOLDER / f"{_DECLARED[figure][0]}.py", name)


# figure -> those of its tables of which it draws what is there; the workflow makes them all the same
OPTIONAL = {
    name: tuple(table for table in tables if table.partition("/")[0] in (_constant(name, "OPTIONAL") or ()))
    for name, tables in INPUTS.items()
}
# figure -> studies whose tables it reads
FIGURES = {name: tuple(dict.fromkeys(table.partition("/")[0] for table in read)) for name, read in INPUTS.items()}


def caption(figure: str) -> str:
    """Text under a figure in the report, in reStructuredText."""
    text, words = _constant(figure, "CAPTION") or "", _constant(figure, "WORDS")
    text = str(text[figure] if isinstance(text, dict) else text)
    return text.format(**words[figure]) if words else text


def missing(figure: str, results: Path) -> list[str]:
    """Tables without which a figure of studies cannot be drawn and that are not in the scale's folder ``results``."""
    from experiments.common.written_tables import kept

    needed = [table for table in INPUTS[figure] if table not in OPTIONAL[figure]]
    return [table for table in needed if kept(results / table) is None]
