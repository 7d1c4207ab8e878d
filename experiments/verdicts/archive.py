"""Runs of a study that are kept: a Parquet file each (:mod:`experiments.verdicts.kept_run`), written once.

They lie in ``results/reference/SCALE/STUDY/runs``, where ``SHA256SUMS`` names them with their checksums, in order of
the study's runs; ``sha256sum -c`` reads it, too. A new run adds a file and a line. Tables too long for CSV are kept as
Parquet beside the others of their study.

``python -m experiments.verdicts.archive --scale S --study S`` puts the runs back into the results folder, where the
workflow goes on with them.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import pyarrow
import typer
from pyarrow import parquet

from edgc.errors import UserError
from experiments.common import written_tables
from experiments.common.cli import main_guard
from experiments.common.figures import INPUTS
from experiments.common.files import atomic_write
from experiments.spec import matrix
from experiments.training.outputs import SETTINGS, STATUS
from experiments.verdicts import kept_run
from experiments.verdicts.kept_run import damaged

FOLDER, SUMS = "runs", "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64})  (\w[\w.+-]*)\.parquet")
CURVES = "curves.csv"


def checksums(kept: Path) -> dict[str, str]:
    """SHA-256 of every kept run of a study by its name, in order; empty where none is kept.

    Args:
        kept: folder of the study below ``results/reference``.

    Raises:
        UserError: the list is damaged.
    """
    path = kept / FOLDER / SUMS
    if not path.exists():
        return {}
    *lines, rest = path.read_text(encoding="ascii", errors="replace").split("\n")
    sums = {line[2]: line[1] for text in lines if (line := LINE.fullmatch(text))}
    if rest or not 0 < len(lines) == len(sums):
        raise damaged(path, "a line of the list is not '<SHA-256>  <run>.parquet', or two are of one run")
    return sums


def read(kept: Path, name: str) -> dict[str, bytes]:
    """The files of run ``name``, ``status`` last; ``UserError`` where it is missing, altered or a link."""
    path = kept / FOLDER / f"{name}.parquet"
    if path.is_symlink() or path.parent.is_symlink() or not path.is_file() or path.stat().st_size > kept_run.LARGEST[0]:
        raise damaged(path, "it is missing, a link, or larger than a run can be")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != checksums(kept).get(name):
        raise damaged(path, f"its checksum is not that of {SUMS}")
    return kept_run.unpack(content, path)


def unpack(kept: Path, folder: Path) -> list[str]:
    """Put all kept runs of a study into ``folder``; returns their names in order.

    Raises:
        UserError: one is damaged, or in the folder already; nothing is written then.
    """
    names = list(checksums(kept))
    if not names:
        raise UserError(f"no runs are kept of {kept.name}", where=kept, fix="see which: ls results/reference/*/*/runs")
    if there := [name for name in names if (folder / name).exists()]:
        fix = "remove it, or give another results folder with --results"
        raise UserError(f"run {there[0]} is there already", where=folder, fix=fix)
    runs = {name: read(kept, name) for name in names}
    folder.mkdir(parents=True, exist_ok=True)
    # Younger than the YAML of the study and its text, and none younger than another, for runs follow runs: the workflow
    # would train them again.
    now = time.time()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:
        for name, files in runs.items():
            (Path(scratch) / name).mkdir()
            for file, content in files.items():
                (Path(scratch) / name / file).write_bytes(content)
                os.utime(Path(scratch) / name / file, (now, now))
        for name in names:
            (Path(scratch) / name).rename(folder / name)
    return names


def add(runs: Path, kept: Path, names: Sequence[str], *, replace: bool = False) -> list[str]:
    """Keep those of the runs ``names`` in folder ``runs`` that have ended; returns the names of all that are kept then.

    A run that is kept already is not written again. One that the study no longer has goes.

    Args:
        replace: whether what is kept gives way: to other runs of the same names, and where none has ended now.

    Raises:
        UserError: none is kept then, a run is damaged, or without ``replace`` another of its name is kept.
    """
    known, analysis = checksums(kept), matrix.load_study(kept.name).analysis
    sums, new = dict[str, str](), dict[str, bytes]()
    for name in names:
        ended, settings = (runs / name / STATUS).is_file(), runs / name / SETTINGS
        if name in known and (not ended or read(kept, name)[SETTINGS] == settings.read_bytes()):
            if ended or not replace:
                sums[name] = known[name]
        elif ended:
            if name in known and not replace:
                fix = f"make save STUDY={kept.name} ARGS=--replace, after which these runs are kept and no others"
                raise UserError(f"another run {name} is kept", where=kept / FOLDER, fix=fix)
            new[name] = kept_run.pack(runs / name, analysis)
            sums[name] = hashlib.sha256(new[name]).hexdigest()
    if not sums:
        raise UserError(f"no run of {kept.name} has ended", where=runs, fix=f"train it: snakemake -c2 {kept.name}")
    for name, content in new.items():
        atomic_write(kept / FOLDER / f"{name}.parquet", content)
    atomic_write(kept / FOLDER / SUMS, "".join(f"{sums[name]}  {name}.parquet\n" for name in sums))
    for name in known.keys() - sums.keys():
        (kept / FOLDER / f"{name}.parquet").unlink(missing_ok=True)
    return list(sums)


def studies(reference: Path) -> list[str]:
    """Studies with kept runs under ``reference``, the committed results of a scale."""
    return sorted(path.parents[1].name for path in reference.glob(f"*/{FOLDER}/{SUMS}"))


def long_tables(study: str) -> list[str]:
    """Names without ending of the tables of ``study`` that are kept as Parquet: those that figures are drawn from, and
    the learning curves, which the report shows of every run."""
    drawn = {table for tables in INPUTS.values() for table in tables}
    definition = matrix.load_study(study)
    details = [name for name in definition.tables if name not in definition.results]
    return [Path(name).stem for name in details if name == CURVES or f"{study}/{name}" in drawn]


def packed_table(path: Path) -> bytes:
    """A CSV as Parquet, numbers as the CSV has them, so that a figure drawn from either has the same bytes;
    ``UserError`` where it is damaged."""
    table = pyarrow.Table.from_pandas(written_tables.read(path), preserve_index=False)
    floats = [field.name for field in table.schema if pyarrow.types.is_floating(field.type)]
    others = [name for name in table.column_names if name not in floats] or False
    buffer, split = io.BytesIO(), floats or False  # the bytes of floats apart from each other pack best
    options = {"compression": "zstd", "compression_level": 19, "use_byte_stream_split": split}
    parquet.write_table(table, buffer, use_dictionary=others, **options)
    return buffer.getvalue()


@main_guard
def main(
    study: Annotated[str | None, typer.Option(help="this study alone")] = None,
    scale: Annotated[str, typer.Option(help="ci, workstation or paper")] = "ci",
    results: Annotated[Path, typer.Option(help="results folder")] = Path("results"),
) -> None:
    """Put the kept runs into the results folder."""
    reference = results / "reference" / scale
    for name in [study] if study else studies(reference):
        print(f"{name}: {len(unpack(reference / name, results / scale / name))} runs")


if __name__ == "__main__":
    typer.run(main)
