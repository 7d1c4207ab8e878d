"""Names that the pipeline can make, so that a misspelt one is refused before anything is planned."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from edgc.errors import UserError, nearest
from experiments.common.files import ROOT
from experiments.spec import matrix

NAMED_RULE = re.compile(r"^ *rule +([a-z_]+):", re.MULTILINE)
FOLDERS = ("data", "figures", "benchmarks", "logs")
FILES = ("claims.csv", "report.html", "regression.csv")


def targets() -> list[str]:
    """The named targets: every study, every figure of several studies, and those of the Snakefile beside them."""
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


def check_studies(broken: Mapping[str, UserError], wanted: Sequence[str]) -> None:
    """Refuse a study that cannot be read where it is asked for: by its name, or because everything is.

    Args:
        broken: what is wrong with each such study.
        wanted: names, or paths of files; none: everything.

    Raises:
        UserError: the first of ``broken`` that is asked for.
    """
    if not broken:
        return
    from experiments.common.figures import FIGURES

    needed = set[str]()
    for target in wanted:
        parts = {*Path(target).parts, Path(target).stem}
        studies = parts.intersection(matrix.studies()).union(*(FIGURES[part] for part in parts.intersection(FIGURES)))
        needed |= studies or set(broken)
    for study in needed - broken.keys():
        definition = matrix.load_study(study)
        needed = needed.union(definition.needs or (), [(definition.scenarios or {}).get("of", study)])
    for study, error in broken.items():
        if not wanted or study in needed:
            raise error


def check_targets(wanted: Sequence[str], scale: str, folder: Path, others: Collection[str] = ()) -> None:
    """Refuse targets that nothing makes.

    Args:
        wanted: names, or paths of files.
        scale: of the runs.
        folder: of the scale's results. Of a path in it the first names are looked at; others are left to Snakemake.
        others: names that are known, too.

    Raises:
        UserError: naming the nearest names.
    """
    from experiments.common.figures import FIGURES

    for name in wanted:
        path, studies = Path(name), matrix.studies()
        parts = path.relative_to(folder).parts if path.is_relative_to(folder) else ()
        matrix.check_not_frozen(parts[0] if parts else name)
        if "/" not in name and not path.suffix:
            part, problem, known = name, "", [*targets(), *others]
        elif parts and parts[0] not in studies:
            part, problem, known = parts[0], f": nothing makes {parts[0]}", [*studies, *FOLDERS, *FILES]
            if len(parts) == 2 and parts[0] == "figures":
                part, problem, known = Path(parts[1]).stem, ": no such figure", list(FIGURES)
        elif len(parts) == 3 and not matrix.load_study(parts[0]).needs:
            part, problem = parts[1], ": no such run"
            known = [run.name for run in matrix.runs(parts[0], scale)]
        else:
            continue
        if part not in known:
            fix = nearest(part, targets() if part is name else known)
            raise UserError(f"unknown target {name!r}{problem}", where="the command line", fix=fix)
