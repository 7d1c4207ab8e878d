"""A run as one small Parquet file, and the files of its folder from it again.

A column has the content of a file of the run folder: a text in its first row (``run.yaml``, ``summary.json``,
``status``), or the rows of a table. Those of ``metrics.jsonl`` are two: a row is an event, a training step in column
``step``, any other as JSON in column ``event``. Shorter columns end in nulls. What no analysis of the study reads is
left out (``READERS``); all else comes back as it was, to the last bit.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import ArrowException, parquet, types

from edgc.errors import UserError
from experiments.training import outputs

TEXTS = (outputs.SETTINGS, outputs.SUMMARY, outputs.STATUS)
STEP, EVENT = "step", "event"
TIMED = ("methods", "policies", "optimus_cc", "rank_sweep", "sampling_ablation")
# Kinds of events, fields of a step or of its stages, and tables that are kept for these analyses alone (modules of
# experiments/analyse). What is not here is kept for all.
READERS: Mapping[str, tuple[str, ...]] = {
    "signature": (),  # names are in the summary
    "perplexity": (),  # exp(loss)
    "lr": (),
    "tokens_per_second": (),
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
    "seconds_pipeline": (),
    "pipeline_relative_error": ("optimus_cc",),
    "pipeline_bytes": ("optimus_cc",),
    "pipeline_bytes_dense": ("optimus_cc",),
    "tensors.parquet": ("entropy_trend", "moe"),
    "spectra.parquet": ("rank_model",),
    "sampling.parquet": ("sampling_ablation",),
}
TABLES = tuple(name for name in READERS if name.endswith(".parquet"))
TIMINGS = (
    "seconds_"  # fields of stages; float32 where all have six digits (experiments.training.run_log), which it tells
)
# The bytes of floats apart from each other, first bytes first, pack best. With these encodings a column in memory is as
# large as the file says that it is.
ENCODINGS = dict.fromkeys(("DOUBLE", "FLOAT"), "BYTE_STREAM_SPLIT")
ENCODINGS |= dict.fromkeys(("INT64", "INT32"), "DELTA_BINARY_PACKED")
KNOWN = {*ENCODINGS.values(), "PLAIN", "RLE"}
LARGEST = 2**25, 2**26  # bytes of a file, and both bytes and values that it says are in it


def pack(folder: Path, analysis: str | None) -> bytes:
    """A run that has ended as a Parquet file; the same run gives the same bytes.

    Args:
        folder: of the run.
        analysis: of its study, which says what is left out.

    Raises:
        UserError: a file of the run is missing or damaged.
    """
    status = outputs.read_status(folder)
    outputs.read_settings(folder)
    outputs.read_summary(folder, status)
    left = {name for name, readers in READERS.items() if analysis not in readers}
    events = [event for event in outputs.read_log(folder, status) if event[EVENT] not in left]
    events = [_without(event, left) if event[EVENT] == STEP else event for event in events]
    texts = [folder / name for name in TEXTS if (folder / name).is_file()]
    columns = {path.name: pyarrow.array([path.read_text(encoding="utf-8")]) for path in texts}
    steps = [event if event[EVENT] == STEP else None for event in events]
    others = [json.dumps(event) if step is None else None for event, step in zip(events, steps, strict=True)]
    six = all(_timed(step, _six_digits) == step for step in steps if step)
    columns[STEP] = pyarrow.array([_timed(step, np.float32) if step and six else step for step in steps])
    columns[EVENT] = pyarrow.array(others, pyarrow.string())
    for path in (folder / name for name in TABLES if name not in left and (folder / name).is_file()):
        try:
            columns[path.name] = parquet.read_table(path).to_struct_array().combine_chunks()
        except (OSError, ArrowException):
            raise outputs.damaged(path, "is cut short or altered") from None
    rows = max(map(len, columns.values()))
    table = pyarrow.table(
        {name: pyarrow.concat_arrays([a, pyarrow.nulls(rows - len(a), a.type)]) for name, a in columns.items()}
    )
    return _written(table, compression="zstd", compression_level=19)


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


def _written(table: pyarrow.Table, **options: Any) -> bytes:
    # Written empty first, for the names and types of columns inside of columns.
    first, buffer = io.BytesIO(), io.BytesIO()
    parquet.write_table(table.slice(0, 0), first)
    schema = parquet.ParquetFile(first).schema
    encodings = {
        leaf.path: ENCODINGS.get(leaf.physical_type, "PLAIN") for leaf in map(schema.column, range(len(schema)))
    }
    options |= {"use_dictionary": False, "column_encoding": encodings, "write_statistics": False}
    parquet.write_table(table, buffer, store_schema=False, **options)
    return buffer.getvalue()


def unpack(content: bytes, where: Path) -> dict[str, bytes]:
    """The files of a run folder, ``status`` last, from the content of the Parquet file ``where``.

    Raises:
        UserError: it is no such file, or says of itself that it is larger than a run can be (``LARGEST``).
    """
    try:
        file = parquet.ParquetFile(io.BytesIO(content))
        groups = [file.metadata.row_group(place) for place in range(file.metadata.num_row_groups)]
        leaves = [group.column(place) for group in groups for place in range(group.num_columns)]
        sizes = (sum(leaf.total_uncompressed_size for leaf in leaves), sum(leaf.num_values for leaf in leaves))
        if len(content) > LARGEST[0] or max(sizes) > LARGEST[1]:
            raise damaged(where, "it is larger than a run can be")
        for field in file.schema_arrow:
            fits = types.is_string if field.name in (*TEXTS, EVENT) else types.is_struct
            if field.name not in (*TEXTS, STEP, EVENT, *TABLES) or not (fits(field.type) or types.is_null(field.type)):
                raise damaged(where, f"column {field.name!r} is none of a kept run")
        if any(set(leaf.encodings) - KNOWN for leaf in leaves):
            raise damaged(where, "a column is encoded otherwise than in a kept run")
        table = file.read()
        columns = {name: table[name].combine_chunks() for name in table.column_names}
        six = any(leaf.path_in_schema.startswith(f"{STEP}.") and leaf.physical_type == "FLOAT" for leaf in leaves)
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
    except (ArrowException, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise damaged(where, " ".join(str(error).split())) from None


def damaged(where: Path, problem: str) -> UserError:
    """The error about a file of kept runs, with the folder to restore."""
    return UserError(f"kept run is damaged: {problem}", where=where, fix=f"git checkout HEAD -- {where.parent}")
