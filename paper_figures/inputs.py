"""The tables that figures are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgc.errors import UserError
from experiments.common import written_tables

if TYPE_CHECKING:
    import pandas as pd


def read(results: Path, study: str, table: str = "table.csv") -> pd.DataFrame:
    """One table of a study, kept as CSV or as Parquet, or ``UserError`` with the command that makes it."""
    path = results / study / table
    kept = written_tables.kept(path)
    if kept is None:
        fix = f"make it with: snakemake -c2 {study}"
        raise UserError(f"table {table} of study {study} is missing", where=path, fix=fix)
    return written_tables.read(kept)


def tables(results: Path, names: Sequence[str]) -> list[pd.DataFrame]:
    """Several tables, such as ``methods/table.csv``."""
    return [read(results, *name.split("/")) for name in names]


def first_setting(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the first setting of a study, variants called as in the study's file; of a study without settings
    all. The first variant of a table is ``none`` or ``cqm``."""
    prefix = str(table["variant"].iloc[0]).removesuffix("none").removesuffix("cqm")
    rows = table[table["variant"].str.startswith(prefix)]
    return rows.assign(variant=rows["variant"].str.removeprefix(prefix))


def read_benchmark(path: Path, what: str, make: str) -> pd.DataFrame:
    """One table of a benchmark, in which "none" is a name, or ``UserError`` with the target that makes it."""
    import pandas as pd

    if not path.is_file():
        raise UserError(f"there is no table of {what}", where=path, fix=f"make it with: make {make}")
    return pd.read_csv(path, keep_default_na=False, na_values=[""])
