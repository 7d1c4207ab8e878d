"""Names that the pipeline can make, so that a misspelt one is refused before anything is planned."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from edgc.errors import UserError, nearest
from experiments.common.files import ROOT
from experiments.spec import matrix

NAMED_RULE = re.compile(r"^ *rule +([a-z_]+):", re.MULTILINE)


def targets() -> list[str]:
    """Named targets: every study, every figure of several studies, and those of the Snakefile beside them."""
    from experiments.common.figures import FIGURES  # reads the files of all figures, one of which may be wrong

    named = NAMED_RULE.findall((ROOT / "Snakefile").read_text(encoding="utf-8"))
    joint = [name for name, studies in FIGURES.items() if len(set(studies)) > 1]
    return [*dict.fromkeys((*matrix.studies(), *joint, *named, "everything", "texts"))]


def of_command_line() -> list[str]:
    """Targets that Snakemake was told to make; none where this process is not Snakemake's command."""
    if not any(Path(part).name == "snakemake" for part in (sys.argv[0], Path(sys.argv[0]).parent)):
        return []
    from snakemake.cli import get_argument_parser

    return list(get_argument_parser().parse_known_args(sys.argv[1:])[0].targets)


def check_targets(wanted: Sequence[str], rules: Sequence[str] = ()) -> None:
    """Refuse names that nothing makes, and frozen studies; of files Snakemake itself says that nothing makes them.

    Args:
        wanted: names, or paths of files.
        rules: names that are known, too.

    Raises:
        UserError: naming the nearest name.
    """
    for name in wanted:
        for part in Path(name).parts:
            matrix.check_not_frozen(part)
        if "/" not in name and not Path(name).suffix and name not in (*targets(), *rules):
            fix = nearest(name, targets())
            raise UserError(f"unknown target {name!r}", where="the command line", fix=fix)
