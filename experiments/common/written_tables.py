"""Tables, read only if they end with their last line's end and parse."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgc.errors import UserError

if TYPE_CHECKING:
    import pandas as pd


def csv_text(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """A table as text, numbers in full; ``columns`` are by default those of the first row."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def damaged(path: Path, problem: str) -> UserError:
    """The error about a table, with the file to delete."""
    fix = "delete it and start again: it is made again"
    return UserError(f"table is damaged: {path.name} {problem}", where=path, fix=fix)


def kept(path: Path) -> Path | None:
    """The file that holds a table: ``path``, else the Parquet file of its name; None where neither is there."""
    return next((file for file in (path, path.with_suffix(".parquet")) if file.is_file()), None)


def read(path: Path, **options: Any) -> pd.DataFrame:
    """A table by pandas, whose ``options`` for CSV are given on; ``UserError`` where it was cut short or altered."""
    import pandas as pd

    if path.suffix == ".parquet":
        return read_parquet(path)
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        raise damaged(path, "is cut short" if content else "is empty")
    try:
        return pd.read_csv(io.BytesIO(content), **options)
    except (ValueError, UnicodeDecodeError):  # pandas' errors about a file are of these
        raise damaged(path, "is not a table") from None


def read_parquet(path: Path) -> pd.DataFrame:
    """A table that is kept as Parquet; ``UserError`` where it was cut short or altered."""
    import pandas as pd
    from pyarrow import ArrowInvalid

    try:
        return pd.read_parquet(path)
    except (ArrowInvalid, OSError, ValueError):
        raise UserError("table is damaged", where=path, fix="restore it from version control") from None
