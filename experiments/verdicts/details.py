"""Tables too long for CSV, kept as compressed Parquet beside the others of their study: those that figures are drawn
from, and the learning curves, which the report shows of every run.

Numbers stay as the CSV has them, so that a figure drawn from either has the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pyarrow
from pyarrow import parquet

import paper_figures
from experiments.common import written_tables
from experiments.spec import matrix

CURVES = "curves.csv"
LEVEL = 19  # of zstd: a few seconds a table, read as fast as at any other


def details(study: str) -> list[str]:
    """Names without ending of the tables of ``study`` that a figure or the report's curves read and that are not
    committed as CSV."""
    read = {table for tables in paper_figures.INPUTS.values() for table in tables}
    definition = matrix.load_study(study)
    own = [name for name in definition.tables if name not in definition.results]
    return [Path(name).stem for name in own if name == CURVES or f"{study}/{name}" in read]


def packed(table: Path) -> bytes:
    """A CSV as Parquet; ``UserError`` where it is damaged."""
    return compact(pyarrow.Table.from_pandas(written_tables.read(table), preserve_index=False))


def compact(table: pyarrow.Table) -> bytes:
    """A table as a small Parquet file; the same table gives the same bytes."""
    floats = [field.name for field in table.schema if pyarrow.types.is_floating(field.type)]
    others = [name for name in table.column_names if name not in floats]
    buffer = io.BytesIO()
    # The bytes of floats apart from each other, first bytes first, pack best.
    parquet.write_table(
        table,
        buffer,
        compression="zstd",
        compression_level=LEVEL,
        use_dictionary=others or False,
        use_byte_stream_split=floats or False,
    )
    return buffer.getvalue()


def missing(name: str, results: Path) -> Sequence[str]:
    """The tables that figure ``name`` needs and that are not under ``results``, as CSV or as Parquet."""
    optional = paper_figures.OPTIONAL[name]
    tables = [results / table for table in paper_figures.INPUTS[name] if table not in optional]
    return [str(path) for path in tables if written_tables.kept(path) is None]
