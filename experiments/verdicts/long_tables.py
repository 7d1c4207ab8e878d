"""Tables too long for CSV, kept as compressed Parquet beside the others of their study: those that figures are drawn
from, and the learning curves, which the report shows of every run.

Numbers stay as the CSV has them, so that a figure drawn from either has the same bytes.
"""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow
from pyarrow import parquet

from experiments.common import written_tables
from experiments.common.figures import INPUTS
from experiments.spec import matrix

CURVES = "curves.csv"


def long_tables(study: str) -> list[str]:
    """Names without ending of the tables of ``study`` that are kept as Parquet."""
    read = {table for tables in INPUTS.values() for table in tables}
    definition = matrix.load_study(study)
    own = [name for name in definition.tables if name not in definition.results]
    return [Path(name).stem for name in own if name == CURVES or f"{study}/{name}" in read]


def packed(path: Path) -> bytes:
    """A CSV as Parquet; ``UserError`` where it is damaged."""
    table = pyarrow.Table.from_pandas(written_tables.read(path), preserve_index=False)
    floats = [field.name for field in table.schema if pyarrow.types.is_floating(field.type)]
    others = [name for name in table.column_names if name not in floats] or False
    buffer, split = io.BytesIO(), floats or False  # the bytes of floats apart from each other pack best
    options = {"compression": "zstd", "compression_level": 19, "use_byte_stream_split": split}
    parquet.write_table(table, buffer, use_dictionary=others, **options)
    return buffer.getvalue()
