"""Runs of a study that are kept: a Parquet file each, written once.

They lie in ``results/reference/SCALE/STUDY/runs``, where ``SHA256SUMS`` names them with their checksums, in order of
the study's runs; ``sha256sum -c`` reads it, too. A new run adds a file and a line. Tables too long for CSV are kept as
Parquet beside the others of their study.

A column has the content of a file of the run folder: a text in its first row (``run.yaml``, ``summary.json``,
``status``), or the rows of a table. Those of ``metrics.jsonl`` are two: a row is an event, a training step in column
``step``, any other as JSON in column ``event``. Shorter columns end in nulls. What no analysis of the study reads is
left out (``READERS``); all else comes back as it was, to the last bit.

``python -m experiments.verdicts.archive --scale S --study S`` puts the runs back into the results folder, where the
workflow goes on with them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow
import typer
from pyarrow import ArrowException, parquet, types

from edgc.errors import UserError
from experiments.common import written_tables
from experiments.common.cli import main_guard
from experiments.common.figures import INPUTS
from experiments.common.files import atomic_write
from experiments.spec import matrix
from experiments.training import outputs
from experiments.training.outputs import SETTINGS, STATUS

FOLDER, SUMS = "runs", "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64})  (\w[\w.+-]*)\.parquet")
CURVES = "curves.csv"
TEXTS = (outputs.SETTINGS, outputs.SUMMARY, outputs.STATUS)
STEP, EVENT = "step", "event"
TIMED = ("methods", "policies", "rank_sweep", "sampling_ablation")
# Kinds of events, fields of a step or of its stages, and tables that are kept for these analyses alone (modules of
# experiments/analyse). What is not here is kept for all.
READERS: Mapping[str, tuple[str, ...]] = {
    "signature": (),  # names are in the summary
    "lr": (),
    "grad_norm": ("entropy_trend",),
    "grad_norm_clipped": ("entropy_trend",),
    "worker_error": ("rank_sweep",),
    "error_feedback_ratio": ("rank_sweep",),
    "mean_error": ("rank_sweep",),
    "seconds": TIMED,
    "seconds_compress": TIMED,
    "seconds_communicate": TIMED,
    "seconds_decompress": TIMED,
    "seconds_entropy": ("sampling_ablation",),
    "seconds_exposed": (),
    "pipeline_relative_error": (),
    "pipeline_bytes": (),
    "pipeline_bytes_dense": (),
    "tensors.parquet": ("entropy_trend",),
    "spectra.parquet": ("rank_model",),
    "sampling.parquet": ("sampling_ablation",),
}
TABLES = tuple(name for name in READERS if name.endswith(".parquet"))
TIMINGS = "seconds_"  # fields of stages; float32 where all have six digits (experiments.training.run_log)
LARGEST = 2**25, 2**26  # bytes of a file, and both bytes and values that it says are in it


def damaged(where: Path, problem: str) -> UserError:
    """The error about a file of kept runs, with the folder to restore."""
    return UserError(f"kept run is damaged: {problem}", where=where, fix=f"git checkout HEAD -- {where.parent}")


def pack(folder: Path, analysis: str | None) -> bytes:
    """A run that has ended as a Parquet file; the same run gives the same bytes.

    Args:
        folder: of the run.
        analysis: of its study, which says what is left out.

    Raises:
        UserError: a file of the run is missing or damaged.
    """
    status = outputs.read_status(folder)
    outputs.check(folder)
    outputs.read_summary(folder, status)
    left = {name for name, readers in READERS.items() if analysis not in readers}
    events = [event for event in outputs.read_log(folder, status) if event[EVENT] not in left]
    steps = [_without(event, left) if event[EVENT] == STEP else None for event in events]
    others = [json.dumps(event) if step is None else None for event, step in zip(events, steps, strict=True)]
    columns = {name: pyarrow.array([(folder / name).read_text()]) for name in TEXTS if (folder / name).is_file()}
    if all(_timed(step, _six_digits) == step for step in steps if step):
        steps = [step and _timed(step, np.float32) for step in steps]
    columns |= {STEP: pyarrow.array(steps), EVENT: pyarrow.array(others, pyarrow.string())}
    for path in (folder / name for name in TABLES if name not in left and (folder / name).is_file()):
        try:
            columns[path.name] = parquet.read_table(path).to_struct_array().combine_chunks()
        except (OSError, ArrowException):
            raise outputs.damaged(path, "is cut short or altered") from None
    rows = max(map(len, columns.values()))
    table = pyarrow.table(
        {name: pyarrow.concat_arrays([a, pyarrow.nulls(rows - len(a), a.type)]) for name, a in columns.items()}
    )
    empty = io.BytesIO()
    parquet.write_table(table.slice(0, 0), empty)
    schema = parquet.ParquetFile(empty).schema  # with columns inside of columns
    floats = [leaf.path for leaf in map(schema.column, range(len(schema))) if leaf.physical_type in ("DOUBLE", "FLOAT")]
    return _parquet(table, floats, use_dictionary=False, write_statistics=False, store_schema=False)


def _without(value: Any, left: set[str]) -> Any:
    """A step without the fields ``left``, those of its stages, too."""
    if isinstance(value, list):
        return [_without(item, left) for item in value]
    return {k: _without(item, left) for k, item in value.items() if k not in left} if isinstance(value, dict) else value


def _timed(step: dict[str, Any], change: Any) -> dict[str, Any]:
    """A step with ``change`` made to what its stages timed."""
    stages = [
        {k: change(v) if k.startswith(TIMINGS) and v is not None else v for k, v in stage.items()}
        for stage in step["stages"]
    ]
    return step | {"stages": stages}


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")


def _parquet(table: pyarrow.Table, floats: list[str], **options: Any) -> bytes:
    """A table as Parquet, the bytes of the columns ``floats`` apart from each other: these pack best."""
    buffer = io.BytesIO()
    options |= {"compression": "zstd", "compression_level": 19, "use_byte_stream_split": floats or False}
    parquet.write_table(table, buffer, **options)
    return buffer.getvalue()


def files_of(content: bytes) -> dict[str, bytes]:
    """The files of a run folder, ``status`` last, from the content of its Parquet file.

    Raises:
        ValueError: it has other columns, or says of itself that it is larger than a run can be (``LARGEST``); any other
            exception of pyarrow, or of a value of another kind, where it is no file of a run.
    """
    file = parquet.ParquetFile(io.BytesIO(content))
    groups = [file.metadata.row_group(place) for place in range(file.metadata.num_row_groups)]
    leaves = [group.column(place) for group in groups for place in range(group.num_columns)]
    sizes = (sum(leaf.total_uncompressed_size for leaf in leaves), sum(leaf.num_values for leaf in leaves))
    # Only without a dictionary is a column in memory as large as the file says that it is.
    if max(sizes) > LARGEST[1] or any("DICTIONARY" in name for leaf in leaves for name in leaf.encodings):
        raise ValueError("it is larger than a run can be")
    for field in file.schema_arrow:
        fits = types.is_string if field.name in (*TEXTS, EVENT) else types.is_struct
        if field.name not in (*TEXTS, STEP, EVENT, *TABLES) or not (fits(field.type) or types.is_null(field.type)):
            raise ValueError(f"column {field.name!r} is none of a kept run")
    six = any(leaf.path_in_schema.startswith(f"{STEP}.") and leaf.physical_type == "FLOAT" for leaf in leaves)
    table = file.read()
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    lines = [
        text if step is None else json.dumps(_timed(step, _six_digits if six else float))
        for step, text in zip(columns[STEP].to_pylist(), columns[EVENT].to_pylist(), strict=True)
    ]
    files = {outputs.LOG: "".join(f"{line}\n" for line in lines if line is not None).encode()}
    for name in TABLES:
        if name in columns:
            buffer = io.BytesIO()
            parquet.write_table(pyarrow.Table.from_struct_array(columns[name].drop_null()), buffer)
            files[name] = buffer.getvalue()
    texts = [name for name in TEXTS if name in columns or name != outputs.SUMMARY]  # a run that failed may lack it
    return files | {name: columns[name][0].as_py().encode() for name in texts}


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
    if path.is_symlink() or path.parent.is_symlink() or not path.is_file() or path.stat().st_size > LARGEST[0]:
        raise damaged(path, "it is missing, a link, or larger than a run can be")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != checksums(kept).get(name):
        raise damaged(path, f"its checksum is not that of {SUMS}")
    try:
        return files_of(content)
    except (ArrowException, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise damaged(path, str(error)) from None


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
            new[name] = pack(runs / name, analysis)
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
    return _parquet(table, floats, use_dictionary=others)


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
