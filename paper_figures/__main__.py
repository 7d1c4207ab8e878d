"""``python -m paper_figures NAME --results results/ci --out results/ci/figures``: draw one figure, or ``all``."""

from __future__ import annotations

import argparse
import difflib
import importlib
from collections.abc import Sequence
from pathlib import Path

from edgc.errors import UserError
from paper_figures import BENCHMARKS, FIGURES


def render(name: str, results: Path, out: Path) -> list[Path]:
    """Draw figure ``name`` from the tables under ``results`` and write its PDF and PNG to ``out``."""
    known = [*FIGURES, *BENCHMARKS]
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known figures: {', '.join(known)}"
        raise UserError(f"unknown figure {name}", fix=hint)
    if not results.is_dir():
        raise UserError("results folder is missing", where=results, fix="give the folder of one scale, e.g. results/ci")
    from paper_figures import style

    return style.save(importlib.import_module(f"paper_figures.{name}").draw(results), out, name)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    names = ", ".join([*FIGURES, *BENCHMARKS])
    parser = argparse.ArgumentParser(prog="python -m paper_figures", description=__doc__)
    parser.add_argument("name", metavar="NAME", help=f"all (of a scale), or one of: {names}")
    parser.add_argument("--results", type=Path, default=Path("results/ci"), help="folder of one scale")
    parser.add_argument("--out", type=Path, default=None, help="folder of the figures (default RESULTS/figures)")
    args = parser.parse_args(argv)
    from paper_figures import style

    def program() -> None:
        for name in FIGURES if args.name == "all" else [args.name]:
            print("  ".join(str(path) for path in render(name, args.results, args.out or args.results / "figures")))

    style.guard(program)


if __name__ == "__main__":
    main()
