"""``python -m paper_figures NAME... --results results/ci --out results/ci/figures``: draw figures, or ``all``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgc.errors import UserError, nearest
from experiments.common.cli import main_guard
from experiments.common.figures import BENCHMARKS, FIGURES, MODULES, missing
from experiments.common.files import place_of_output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KNOWN = [*FIGURES, *BENCHMARKS]


def draw(name: str, results: Path) -> Figure:
    """Figure ``name`` from the tables under ``results``, by the function of its name, else by ``draw``."""
    module = importlib.import_module(MODULES[name])
    if own := getattr(module, name, None):
        return own(results)
    return module.draw(results, name) if isinstance(module.TABLES, dict) else module.draw(results)


def render(name: str, results: Path, out: Path) -> list[Path]:
    """Draw figure ``name`` from the tables under ``results`` and write its PDF, SVG and PNG to ``out``."""
    if name not in KNOWN:
        raise UserError(f"unknown figure {name}", fix=nearest(name, KNOWN, "known figures"))
    if not results.is_dir():
        raise UserError("results folder is missing", where=results, fix="give the folder of one scale, e.g. results/ci")
    from paper_figures import saving

    written = saving.save(draw(name, results), out, name)
    more = getattr(importlib.import_module(MODULES[name]), f"{name}_pages", None)
    return [*written, *(more(results, out) if more else [])]


@main_guard
def main(
    names: Annotated[list[str], typer.Argument(help=f"all (of a scale), or some of: {', '.join(KNOWN)}")],
    results: Annotated[Path, typer.Option(help="folder of one scale")] = Path("results/ci"),
    out: Annotated[
        Path | None, typer.Option(help="folder of the figures; default: RESULTS/figures, of kept results in build")
    ] = None,
) -> None:
    """Draw figures, or all of a scale, from the tables that are there."""
    lacking = {name: missing(name, results) for name in FIGURES} if names == ["all"] else {name: [] for name in names}
    for name, tables in lacking.items():
        if tables and not all(lacking.values()):  # where no figure has its tables, the first one says which it lacks
            print(f"left out {name}: no {', '.join(tables)}", file=sys.stderr)
            continue
        print("  ".join(str(path) for path in render(name, results, out or place_of_output(results) / "figures")))


if __name__ == "__main__":
    typer.run(main)
