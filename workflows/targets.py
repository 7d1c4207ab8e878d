"""Names that Snakemake is told to make, so that a misspelt one is refused before anything is planned."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from edgc.errors import UserError, nearest
from experiments.spec import matrix


def of_command_line() -> list[str]:
    """Targets that Snakemake was told to make; none where this process is not Snakemake's command."""
    if not any(Path(part).name == "snakemake" for part in (sys.argv[0], Path(sys.argv[0]).parent)):
        return []
    from snakemake.cli import get_argument_parser

    return list(get_argument_parser().parse_known_args(sys.argv[1:])[0].targets)


def check_studies(broken: Mapping[str, UserError], wanted: Sequence[str]) -> None:
    """Warn of studies that cannot be read; ``UserError`` for one whose name, file or figure is wanted, or everything.

    Args:
        broken: what is wrong with each.
        wanted: names, or paths of files; none: everything.
    """
    from experiments.common.figures import FIGURES  # reads the files of all figures, one of which may be wrong

    asked, known = set[str](), {name: (name,) for name in matrix.studies()}
    for target in wanted or ["all"]:
        names = (FIGURES | known).keys() & {*Path(target).parts, Path(target).stem}
        asked |= {study for name in names for study in (*FIGURES.get(name, ()), *known.get(name, ()))} or set(broken)
    if refused := [error for study, error in broken.items() if study in asked]:
        raise refused[0]
    for study, error in broken.items():
        print(f"warning: study {study} is left out: {error}", file=sys.stderr)


def check_targets(wanted: Sequence[str], known: Sequence[str]) -> None:
    """Refuse names that nothing makes, and frozen studies; of files Snakemake itself says that nothing makes them.

    Args:
        wanted: names, or paths of files.
        known: names of rules.

    Raises:
        UserError: naming the nearest name.
    """
    for name in wanted:
        for part in Path(name).parts:
            matrix.check_not_frozen(part)
        if "/" not in name and not Path(name).suffix and name not in known:
            raise UserError(f"unknown target {name!r}", where="the command line", fix=nearest(name, known))
