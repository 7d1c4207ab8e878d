"""Tables of one study: ``python -m experiments.analyse --study S --scale ci --results results``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from edgc.errors import UserError
from experiments.analyse.runs import load_runs
from experiments.analyse.tables import curves, write_table
from experiments.common.cli import main_guard
from experiments.spec import matrix
from experiments.spec.study import analyses


def analyse(study: str, folder: Path, names: list[str] | None = None) -> list[Path]:
    """Read the runs under ``folder`` and write the study's tables there, learning curves too; returns their paths.

    Args:
        names: run folders in the wanted order; None takes every run folder, sorted.

    Raises:
        UserError: unknown study, one that is frozen or has no analysis, missing folder or missing runs.
    """
    matrix.check_not_frozen(study)
    analysis = matrix.load_study(study).analysis
    if analysis is None:
        fix = f"add analysis: with one of {', '.join(analyses())}"
        raise UserError(f"no analysis for study {study}", where=matrix.study_path(study), fix=fix)
    runs = load_runs(folder, names)
    tables = importlib.import_module(f"experiments.analyse.{analysis}").tables(runs) | {"curves": curves(runs)}
    for name, rows in tables.items():
        write_table(folder / f"{name}.csv", rows)
    return [folder / f"{name}.csv" for name in tables]


@main_guard
def main(
    study: Annotated[str, typer.Option(help="name of a file in experiments/studies")],
    scale: Annotated[str, typer.Option(help="name of a file in experiments/scales")] = "ci",
    results: Annotated[Path, typer.Option(help="results folder")] = Path("results"),
) -> None:
    """Write the tables of one study beside its run folders."""
    names = [run.name for run in matrix.runs(study, scale)]
    print(*analyse(study, results / scale / study, names), sep="\n")


if __name__ == "__main__":
    typer.run(main)
