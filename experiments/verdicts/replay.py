"""Committed tables and figures, computed again from the committed runs and compared byte for byte.

``python -m experiments.verdicts.replay --scale S``; with ``--write`` it replaces figures, the tables that only they
read, and those of simulated studies, which follow from their settings alone.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from edgc.errors import UserError
from experiments.analyse.__main__ import analyse
from experiments.common.cli import main_guard
from experiments.common.figures import BENCHMARKS, FIGURES, INPUTS, missing
from experiments.common.files import ROOT, atomic_write
from experiments.spec import matrix
from experiments.verdicts import archive

Compared = tuple[Path, str]  # a committed file, and how it came out
SAME, DIFFERENT = "same", "DIFFERENT"
KINDS = ("{}.png", "{}-*.svg")  # files of a figure that are committed


def tables(reference: Path, study: str, scratch: Path, *, write: bool = False) -> Iterator[Compared]:
    """The committed tables of a study, each with how it came out.

    Args:
        reference: committed results of a scale.
        scratch: an empty folder to compute in.
        write: whether long tables, and those of a simulated study, are replaced where they differ or are missing.
    """
    committed, computed = reference / study, scratch / study
    definition = matrix.load_study(study)
    if definition.simulated:
        command = [sys.executable, "-m", str(definition.program), "--study", study, "--out", str(computed)]
        if code := subprocess.run(command, check=False, stdout=subprocess.DEVNULL, cwd=ROOT).returncode:
            raise SystemExit(code)
        for name in definition.results:
            yield committed / name, compare(committed / name, (computed / name).read_bytes(), write=write)
        return
    analyse(study, computed, archive.unpack(committed, computed))
    for path in sorted(committed.glob("*.csv")):
        table = computed / path.name
        yield path, compare(path, table.read_bytes() if table.is_file() else None)
    for name in archive.long_tables(study):
        path, table = committed / f"{name}.parquet", computed / f"{name}.csv"
        if write or path.is_file():
            yield path, compare(path, archive.packed_table(table) if table.is_file() else None, write=write)


def figures(
    reference: Path, studies: Sequence[str], scratch: Path, *, others: bool = False, write: bool = False
) -> Iterator[Compared]:
    """The committed figures of ``studies`` alone, and with ``write`` those that could be; with ``others`` all committed
    ones, of benchmarks, too."""
    alone = [name for name, needed in FIGURES.items() if set(needed) <= set(studies)]
    # What a simulated study shows follows at any scale, and is not kept at every one.
    new = [name for name in alone if not set(FIGURES[name]) <= set(simulated(reference))]
    yield from redraw(FIGURES if others else alone, reference, scratch, write=write, new=new if write else ())
    folders = [*sorted((reference.parent / "bench").glob("*/")), reference.parent / "rehearsal"]
    for folder in folders if others else ():
        yield from redraw(BENCHMARKS, folder, scratch / folder.name, write=write)


def redraw(
    names: Iterable[str], folder: Path, scratch: Path, *, write: bool = False, new: Sequence[str] = ()
) -> Iterator[Compared]:
    """Committed figures, from the tables in ``folder``; of those in ``new`` also what is not there yet.

    They are drawn by their program, for nothing here stands on the figures.
    """
    old = {name: {path for kind in KINDS for path in (folder / "figures").glob(kind.format(name))} for name in names}
    drawable = [name for name in old if (old[name] or name in new) and not (name in INPUTS and missing(name, folder))]
    if drawable:
        places = ["--results", str(folder.resolve()), "--out", str(scratch / "figures")]
        command = [sys.executable, "-m", "paper_figures", *drawable, *places]
        if code := subprocess.run(command, check=False, stdout=subprocess.DEVNULL, cwd=ROOT).returncode:
            raise SystemExit(code)
    for name, committed in old.items():
        paths = [path for kind in KINDS for path in (scratch / "figures").glob(kind.format(name)) if name in drawable]
        drawn = {folder / "figures" / path.name: path for path in paths}
        for path in sorted(committed | (drawn.keys() if name in new else set())):
            yield path, compare(path, drawn[path].read_bytes() if path in drawn else None, write=write)


def compare(committed: Path, content: bytes | None, *, write: bool = False) -> str:
    """``same``, ``DIFFERENT``, or ``written`` where ``committed`` has been replaced by what was computed."""
    if content is not None and committed.is_file() and committed.read_bytes() == content:
        return SAME
    if not write or content is None:
        return DIFFERENT
    atomic_write(committed, content)
    return "written"


def simulated(reference: Path) -> list[str]:
    """Simulated studies whose tables are committed."""
    return [name for name in matrix.studies() if matrix.load_study(name).simulated and (reference / name).is_dir()]


@main_guard
def main(
    scale: Annotated[str, typer.Option(help="ci, workstation or paper")] = "ci",
    study: Annotated[str | None, typer.Option(help="this study alone")] = None,
    results: Annotated[Path, typer.Option(help="results folder")] = Path("results"),
    write: Annotated[
        bool, typer.Option("--write", help="replace figures, their own tables, and simulated ones")
    ] = False,
) -> None:
    """Compute the committed tables and figures again from the committed runs, and compare them byte for byte.

    Without ``--study`` also figures of what has no runs, such as benchmarks, from their tables. Studies that are frozen
    are named with the commit that computed them.
    """
    reference = results / "reference" / scale
    kept, frozen = [study] if study else [*archive.studies(reference), *simulated(reference)], matrix.frozen()
    for name in frozen:
        if study in (None, name) and (reference / name).is_dir():
            print(f"frozen at {matrix.load_study(name).frozen}  {reference / name}", flush=True)
    names, different = [name for name in kept if name not in frozen], 0
    if not kept:
        raise UserError("no runs are kept", where=reference, fix="see which: ls results/reference/*/*/runs")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / scale
        compared = [tables(reference, name, scratch, write=write) for name in names]
        for outcomes in (*compared, figures(reference, names, scratch, others=study is None, write=write)):
            for path, outcome in outcomes:
                print(f"{outcome:9}  {path}", flush=True)
                different += outcome == DIFFERENT
    if different:
        print(f"error: {different} files came out different", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
