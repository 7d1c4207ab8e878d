"""Figures and the tables that they are drawn from, as the files in ``paper_figures`` declare them.

Read without importing a figure, so that planning needs no plotting library.
"""

from __future__ import annotations

from pathlib import Path

from experiments.common.files import ROOT
from experiments.common.source import constant

FOLDER = ROOT / "paper_figures"


MODULES: dict[str, str] = {}  # figure -> its module
INPUTS: dict[str, tuple[str, ...]] = {}  # figure -> tables of studies that it reads
BENCHMARKS: dict[str, tuple[str, ...]] = {}  # figure of a benchmark -> files in the benchmark's folder that it reads
FIGURES: dict[str, tuple[str, ...]] = {}  # figure -> studies whose tables it reads

for _path in sorted(FOLDER.glob("*.py")):
    _read = constant(_path, "TABLES") or {}
    for _name, _tables in (_read if isinstance(_read, dict) else {_path.stem: _read}).items():
        MODULES[_name] = f"paper_figures.{_path.stem}"
        if not all("/" in table for table in _tables):
            BENCHMARKS[_name] = _tables
            continue
        INPUTS[_name] = _tables
        FIGURES[_name] = tuple(dict.fromkeys(table.partition("/")[0] for table in _tables))


def caption(figure: str) -> str:
    """Text under a figure in the report, in Markdown."""
    path = FOLDER / f"{MODULES[figure].partition('.')[2]}.py"
    text, words = constant(path, "CAPTION") or "", constant(path, "WORDS")
    text = str(text[figure] if isinstance(text, dict) else text)
    return text.format(**words[figure]) if words else text


def missing(figure: str, results: Path) -> list[str]:
    """Tables without which a figure of studies cannot be drawn and that are not in the scale's folder ``results``."""
    from experiments.common.written_tables import kept

    return [table for table in INPUTS[figure] if kept(results / table) is None]
