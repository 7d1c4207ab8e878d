"""Figures of studies and benchmarks, one file each, drawn from tables alone.

A figure is a file here that says ``TABLES``, the tables that it reads, and ``CAPTION``, its text in the report (in
reStructuredText), and has ``draw(results: Path) -> Figure``. ``OPTIONAL`` names studies without whose tables it can be
drawn, and says so in its note. Tables of studies are named ``study/table.csv``, below the
folder of a scale; those of a benchmark lie in its folder, the first one is shown beside the figure. Files without
``TABLES`` hold what figures share. Both are read here without importing a figure, so that planning needs no plotting
library.
"""

from __future__ import annotations

from pathlib import Path

from experiments.common.source import constant

FOLDER = Path(__file__).parent


def _study(table: str) -> str:
    return table.partition("/")[0]


_READ: dict[str, tuple[str, ...]] = {
    path.stem: tables for path in sorted(FOLDER.glob("*.py")) if (tables := constant(path, "TABLES"))
}
# figure -> tables of studies that it reads
INPUTS = {name: tables for name, tables in _READ.items() if all("/" in table for table in tables)}
# figure -> those of them of which it draws what is there; the workflow makes them all the same
OPTIONAL = {
    name: tuple(table for table in tables if _study(table) in (constant(FOLDER / f"{name}.py", "OPTIONAL") or ()))
    for name, tables in INPUTS.items()
}
# figure -> studies whose tables it reads
FIGURES = {name: tuple(dict.fromkeys(map(_study, tables))) for name, tables in INPUTS.items()}
# figure of a benchmark -> files in the benchmark's folder that it reads
BENCHMARKS = {name: tables for name, tables in _READ.items() if name not in INPUTS}


def caption(name: str) -> str:
    """The text under a figure in the report."""
    return str(constant(FOLDER / f"{name}.py", "CAPTION") or "")
