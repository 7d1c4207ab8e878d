"""Runs of a study in one committed file, and the tables and figures that follow from them again.

``runs.tar.xz`` holds what the analysis reads of every run folder, in the order of the study's runs, tables in the
smallest form of the same rows. The same runs give the same bytes: names of users, times and modes are left out.

``python -m experiments.verdicts.archive replay --scale S`` computes the committed tables and figures again from such
files and compares them byte for byte; with ``--write`` it replaces figures. ``restore`` puts the runs back into the
results folder, where the workflow goes on with them; ``save`` keeps those of a study that is not finished yet
(``runs-so-far.tar.xz``), so that its training can be spread over nights and machines.
"""

from __future__ import annotations

import io
import itertools
import lzma
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pyarrow import ArrowException, parquet

import paper_figures
from edgc.errors import UserError
from experiments.common.cli import main_guard
from experiments.common.files import atomic_write
from experiments.verdicts import details

Compared = tuple[Path, str]  # a committed file, and how it came out
SAME, DIFFERENT = "same", "DIFFERENT"
FIGURES = ("{}.png", "{}-*.svg")  # files of a figure that are committed
NAME = "runs.tar.xz"
SO_FAR = "runs-so-far.tar.xz"  # of a study of which only some have ended; its tables are of these where no NAME is
PRESET: Any = 9 | lzma.PRESET_EXTREME  # typeshed knows 0 to 9; twice the time of 9 for 7 % less
FIRST = ("run.yaml", "metrics.jsonl", "summary.json")  # `status` is unpacked last: a run with one is whole
LAST = "status"
app = typer.Typer(add_completion=False)


def pack(folder: Path, names: Sequence[str]) -> bytes:
    """The run folders ``names`` under ``folder`` as an archive, in this order.

    Raises:
        UserError: if a run has not ended, or a table of it is damaged.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz", format=tarfile.USTAR_FORMAT, preset=PRESET) as archive:
        for name in names:
            if not (folder / name / LAST).is_file():
                fix = f"train it first: snakemake -c2 {folder.name}"
                raise UserError(f"run {name} has not ended", where=folder, fix=fix)
            tables = sorted(path.name for path in (folder / name).glob("*.parquet"))
            for file in (*FIRST, *tables, LAST):
                path = folder / name / file
                if path.is_file():
                    # A run writes its tables fast, not small.
                    content = _smallest(path) if file in tables else path.read_bytes()
                    entry = tarfile.TarInfo(f"{name}/{file}")
                    entry.size, entry.mode = len(content), 0o644
                    archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _smallest(path: Path) -> bytes:
    try:
        return details.compact(parquet.read_table(path))
    except (OSError, ArrowException) as error:
        fix = "remove the run's folder and train it again"
        raise UserError(f"damaged table: {' '.join(str(error).split())}", where=path, fix=fix) from None


def unpack(archive: Path, folder: Path) -> list[str]:
    """Put the runs of ``archive`` into ``folder``; returns their names in order.

    Raises:
        UserError: if it cannot be read, or a run of it is in the folder already; nothing is written then.
    """
    with _opened(archive) as opened:
        files = opened.getmembers()
        names = _runs(opened)
        there = [name for name in names if (folder / name).exists()]
        if there:
            fix = "remove it, or give another results folder with --results"
            raise UserError(f"run {there[0]} is there already", where=folder, fix=fix)
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            opened.extract(file, folder, filter="data")
    # Younger than the YAML of the study and its text, and none younger than another, for runs follow runs: the workflow
    # would train them again.
    now = time.time()
    for file in files:
        os.utime(folder / file.name, (now, now))
    return names


@contextmanager
def _opened(archive: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(archive, mode="r:xz") as opened:
            yield opened
    except (OSError, EOFError, tarfile.TarError) as error:
        fix = "restore it from version control"
        raise UserError(f"cannot unpack the runs: {error}", where=archive, fix=fix) from None


def save(study: str, names: Sequence[str], fresh: Path, reference: Path) -> int:
    """Keep those of the runs ``names`` that have ended, beside what a finished study keeps; returns how many.

    Raises:
        UserError: if none has ended, or fewer than are kept already.
    """
    ended = [name for name in names if (fresh / study / name / LAST).is_file()]
    target = reference / study / SO_FAR
    before = members(target) if target.is_file() else []
    lost = [name for name in before if name in names and name not in ended]
    if lost or not ended:
        what = f"run {lost[0]} is kept and not in the results" if lost else f"no run of {study} has ended"
        fix = f"make restore STUDY={study} first" if lost else f"train it first: snakemake -c2 {study}"
        raise UserError(what, where=fresh / study, fix=fix)
    atomic_write(target, pack(fresh / study, ended))
    return len(ended)


def members(archive: Path) -> list[str]:
    """Names of the runs in ``archive``, in order."""
    with _opened(archive) as opened:
        return _runs(opened)


def _runs(opened: tarfile.TarFile) -> list[str]:
    return list(dict.fromkeys(name.partition("/")[0] for name in opened.getnames()))


def replay(reference: Path, studies: Sequence[str], scratch: Path, *, write: bool = False) -> Iterator[Compared]:
    """Compute the committed files of ``studies`` again; yields each with how its bytes came out.

    Args:
        reference: committed results of a scale.
        studies: those with an archive.
        scratch: an empty folder to compute in.
        write: whether figures and the tables that only they read are replaced where they differ or are missing.
    """
    from experiments.analyse.__main__ import analyse

    for study in studies:
        whole = reference / study / NAME  # the tables are of it also where a study has grown since
        archive = whole if whole.is_file() else reference / study / SO_FAR
        analyse(study, scratch / study, unpack(archive, scratch / study))
        for path in sorted((reference / study).glob("*.csv")):
            table = scratch / study / path.name
            yield path, compare(path, table.read_bytes() if table.is_file() else None)
        for name in details.details(study):
            path, table = reference / study / f"{name}.parquet", scratch / study / f"{name}.csv"
            if write or path.is_file():
                yield path, compare(path, details.packed(table) if table.is_file() else None, write=write)
    for name, needed in paper_figures.FIGURES.items():
        if set(needed) <= set(studies):
            yield from redraw(name, reference, scratch, write=write, new=write)


def redraw_others(reference: Path, studies: Sequence[str], scratch: Path, *, write: bool = False) -> Iterator[Compared]:
    """Draw the committed figures of other studies than ``studies``, and of benchmarks, again from committed tables."""
    for name, needed in paper_figures.FIGURES.items():
        if not set(needed) <= set(studies):
            yield from redraw(name, reference, scratch, write=write)
    for machine in sorted((reference.parent / "bench").glob("*/")):
        for name in paper_figures.BENCHMARKS:
            yield from redraw(name, machine, scratch / machine.name, write=write)


def redraw(name: str, tables: Path, scratch: Path, *, write: bool = False, new: bool = False) -> Iterator[Compared]:
    """Draw a committed figure again from ``tables``; ``new``: also one that is not there yet but whose tables are."""
    from paper_figures.__main__ import render

    committed = {path for kind in FIGURES for path in (tables / "figures").glob(kind.format(name))}
    drawable = name not in paper_figures.INPUTS or not details.missing(name, tables)
    if committed or (new and drawable):
        written = render(name, tables, scratch / "figures") if drawable else []
        drawn = {tables / "figures" / path.name: path for path in written if path.name != f"{name}.svg"}
        drawn = {path: one for path, one in drawn.items() if path.suffix != ".pdf"}
        for path in sorted(committed | (drawn.keys() if new else set())):
            yield path, compare(path, drawn[path].read_bytes() if path in drawn else None, write=write)


def compare(committed: Path, content: bytes | None, *, write: bool = False) -> str:
    """``same``, ``DIFFERENT``, or ``written`` where ``committed`` has been replaced by what was computed."""
    if content is not None and committed.is_file() and committed.read_bytes() == content:
        return SAME
    if not write or content is None:
        return DIFFERENT
    atomic_write(committed, content)
    return "written"


def archived(reference: Path, study: str | None = None, kinds: Sequence[str] = (NAME,)) -> list[Path]:
    """Files with runs of all studies, or of ``study`` alone, under ``reference``; ``UserError`` if there are none."""
    found = sorted(path for kind in kinds for path in reference.glob(f"{study or '*'}/{kind}"))
    if not found:
        fix = "see which there are: ls results/reference/*/*/runs*.tar.xz"
        raise UserError(f"no runs are kept of {study or 'any study'}", where=reference, fix=fix)
    return found


def _has_tables(archive: Path) -> bool:
    return any(archive.parent.glob("*.csv"))


Scale = Annotated[str, typer.Option(help="ci, workstation or paper")]
Study = Annotated[str | None, typer.Option(help="this study alone")]
Results = Annotated[Path, typer.Option(help="results folder")]


@app.command("replay")
@main_guard
def replay_command(
    scale: Scale = "ci",
    study: Study = None,
    results: Results = Path("results"),
    write: Annotated[bool, typer.Option("--write", help="replace figures, and tables that only they read")] = False,
) -> None:
    """Compute the committed tables and figures again from the committed runs, and compare them byte for byte.

    Without ``--study`` also figures of what has no runs, such as benchmarks, from their tables.
    """
    reference = results / "reference" / scale
    archives = archived(reference, study, (NAME, SO_FAR))
    names = list(dict.fromkeys(path.parent.name for path in archives if _has_tables(path)))
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / scale
        others = redraw_others(reference, names, scratch, write=write) if study is None else ()
        for path, found in itertools.chain(replay(reference, names, scratch, write=write), others):
            print(f"{found:9}  {path}", flush=True)
            different += found == DIFFERENT
    if different:
        print(f"error: {different} files came out different", file=sys.stderr)
        raise SystemExit(1)


@app.command("restore")
@main_guard
def restore_command(scale: Scale = "ci", study: Study = None, results: Results = Path("results")) -> None:
    """Put the committed runs into the results folder; of a study whose runs are made anew, those of this time."""
    kept = archived(results / "reference" / scale, study, (NAME, SO_FAR))
    newest = {path.parent: path for path in sorted(kept, key=lambda path: path.name == SO_FAR)}
    for path in newest.values():
        print(f"{path.parent.name}: {len(unpack(path, results / scale / path.parent.name))} runs")


if __name__ == "__main__":
    app()
