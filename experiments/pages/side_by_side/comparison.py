"""Theirs and ours in one table, on the same axes.

The paper's rows are its runs as the studies' files have them, with values of claims where one is known; everything else
of the paper reads "not known here", once a row. Our rows are those of a committed table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from edgc.errors import UserError, nearest
from experiments.common import written_tables
from experiments.pages.kept import is_simulated
from experiments.pages.side_by_side import markdown, settings
from experiments.pages.side_by_side.settings import NONE, PAPER, UNKNOWN, definition, side
from experiments.pages.side_by_side.spec import Column, Comparison, Setting
from experiments.spec.settings import RunConfig
from experiments.verdicts.claims import load_claims

KINDS = {"measured", "simulated", "extrapolated", "computed", "modelled network"}  # of a row, where a table says it


def number(value: object, column: Column) -> str:
    """One value as the column shows it: words as they are, numbers to its decimals or to four significant digits."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NONE
    if isinstance(value, (str, bool)):
        return column.names.get(str(value), str(value))
    scaled = float(value) * column.factor * (100 if column.percent else 1)  # type: ignore[arg-type]
    text = f"{scaled:.4g}" if column.decimals is None else f"{scaled:.{column.decimals}f}"
    if column.decimals is not None and float(text) == 0:
        text = text.removeprefix("-")
    return f"{text} %" if column.percent else text


def setting_of(run: RunConfig, path: str, where: object) -> Any:
    """``model.hidden`` of a run; ``UserError`` where it has no such setting."""
    found: Any = run
    for part in path.split("."):
        if not hasattr(found, part):
            known = [name for name in dir(found) if not name.startswith("_")]
            raise UserError(f"unknown setting {path!r}", where=where, fix=nearest(part, known))
        found = getattr(found, part)
    return found


def read(folder: Path, table: str, where: object) -> pd.DataFrame:
    """A committed table of a scale or of a benchmark; ``UserError`` where there is none."""
    path = folder / table
    if not path.is_file():
        known = [found.relative_to(folder).as_posix() for found in sorted(folder.rglob("*.csv"))]
        raise UserError(f"unknown table {table!r} of {folder.name}", where=where, fix=nearest(table, known))
    return written_tables.read(path, keep_default_na=False, na_values=["", "nan"])


def selected(frame: pd.DataFrame, spec: Comparison, where: object) -> pd.DataFrame:
    """The rows that ``where`` keeps, in the order of the table; ``UserError`` for columns that it lacks."""
    used = [*spec.where]
    for column in spec.columns:
        used += [name for name in (column.ours, column.low, column.high, column.across) if name]
    for name in used:
        if name not in frame:
            raise UserError(f"unknown column {name!r} of {spec.table}", where=where, fix=nearest(name, list(frame)))
    for name, wanted in spec.where.items():
        values = wanted if isinstance(wanted, list) else [wanted]
        frame = frame[frame[name].isin(values)]
    if frame.empty:
        raise UserError(f"no row of {spec.table} fits {spec.where}", where=where, fix="correct `where`")
    return frame


def render(spec: Comparison, results: Path, page: Path, where: object) -> str:
    """The comparison as Markdown: its title, the table, and from which files ours come, of which kind.

    Args:
        spec: as the page's entry has it.
        results: folder with a folder of committed results for each scale.
        page: the file that is written, from which links lead.
        where: the entry, for errors.
    """
    folders = {f"ours, {scale}": results / scale for scale in spec.scales}
    if spec.machine:
        folders = {"ours, by the clock": results / "bench" / spec.machine}
    elif spec.study and is_simulated(definition(spec.study)):
        folders = {"ours, SIMULATED": results / spec.scales[0]}
    frames = {name: selected(read(folder, spec.table, where), spec, where) for name, folder in folders.items()}
    header, rows = ["whose"], []
    spread = {
        column.name: sorted({value for frame in frames.values() for value in frame[column.across]})
        for column in spec.columns
        if column.across
    }
    for column in spec.columns:
        values = spread.get(column.name, ())
        header += [f"{column.name} {_named(value)} {column.unit}".strip() for value in values] or [column.name]
    if spec.theirs == "row":
        rows += [_once(row) for row in _theirs(spec, spread, where)]
    for name, frame in frames.items():
        rows += _ours(spec, spread, name, frame, _run(spec, folders[name], results), where)
    sources = [_source(spec, folders[name], frame, page) for name, frame in frames.items()]
    parts = [f"**{spec.title}**", markdown.table(header, rows), "Ours: " + "; ".join(sources) + "."]
    return "\n\n".join([*parts, spec.note] if spec.note else parts)


def _run(spec: Comparison, folder: Path, results: Path) -> RunConfig | None:
    """The run whose settings columns are divided by or multiplied with, where one does that."""
    if spec.study is None or not any(column.over or column.times for column in spec.columns):
        return None
    return side(Setting(study=spec.study, scale=folder.name), results).run


def _named(value: object) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _theirs(spec: Comparison, spread: dict[str, list[Any]], where: object) -> list[list[str]]:
    if spec.paper is None:
        return [["paper", *(text for column in spec.columns for text in _of_paper(column, None, spread, where))]]
    runs = {run.variant: run for run in settings.runs(spec.paper.study, PAPER).values()}
    for name in spec.paper.variants:
        if name not in runs:
            raise UserError(f"paper.variants: unknown variant {name!r}", where=where, fix=nearest(name, runs))
    return [
        ["paper", *(text for column in spec.columns for text in _of_paper(column, runs[name], spread, where))]
        for name in spec.paper.variants or runs
    ]


@cache
def _claimed() -> dict[str, float | str]:
    """What the paper says for each claim."""
    return {claim.id: claim.paper_value for claim in load_claims()}


def _once(row: list[str]) -> list[str]:
    """A row says once that values are not known; the other cells of that kind are empty."""
    first = row.index(UNKNOWN) if UNKNOWN in row else len(row)
    return [cell if cell != UNKNOWN or at == first else "" for at, cell in enumerate(row)]


def _of_paper(column: Column, run: RunConfig | None, spread: dict[str, list[Any]], where: object) -> list[str]:
    count = len(spread.get(column.name, (None,)))
    if column.claim and (column.only is None or (run is not None and run.variant == column.only)):
        value = _claimed()[column.claim]
        shown = value if isinstance(value, str) else f"{value:g}" + (" %" if column.percent else "")
        return [column.text.format(shown)] * count
    if run is None or not column.theirs:
        return [UNKNOWN] * count
    values = [setting_of(run, path, where) for path in column.theirs]
    if any(value is None for value in values):
        return [NONE] * count
    if len(values) == 1 and isinstance(values[0], str):
        return values * count
    return [number(_in_settings(math.prod(values), column, run, where), column)] * count


def _in_settings(value: float, column: Column, run: RunConfig, where: object) -> float:
    """A value divided and multiplied by the settings that the column names."""
    if column.over:
        value /= setting_of(run, column.over, where)
    return value * setting_of(run, column.times, where) if column.times else value


def _ours(
    spec: Comparison,
    spread: dict[str, list[Any]],
    name: str,
    frame: pd.DataFrame,
    run: RunConfig | None,
    where: object,
) -> list[list[str]]:
    keys = [column.ours for column in spec.columns if column.ours and not column.across]
    groups: Sequence[pd.DataFrame] = [frame.iloc[[index]] for index in range(len(frame))]
    if spread:
        groups = [group for _, group in frame.groupby(keys, sort=False, dropna=False)]
    rows = []
    for group in groups:
        row = [name]
        for column in spec.columns:
            if column.across:
                by = dict(zip(group[column.across], group[column.ours], strict=True))
                row += [_shown(by.get(value), column, run, where) for value in spread[column.name]]
            else:
                row.append(_value(column, group.iloc[0], run, where))
        rows.append(row)
    return rows


def _value(column: Column, row: pd.Series, run: RunConfig | None, where: object) -> str:
    if column.ours is None:
        return NONE
    shown = _shown(row[column.ours], column, run, where)
    if column.low and column.high and row[column.low] < row[column.high]:
        low, high = (_shown(row[name], column, run, where) for name in (column.low, column.high))
        return f"{shown} ({low} to {high})"
    return shown


def _shown(value: Any, column: Column, run: RunConfig | None, where: object) -> str:
    value = value.item() if hasattr(value, "item") else value
    if run is not None and isinstance(value, (int, float)):
        value = _in_settings(value, column, run, where)
    return number(value, column)


def _source(spec: Comparison, folder: Path, frame: pd.DataFrame, page: Path) -> str:
    """``[methods/summary.csv](...) (workstation), MEASURED, n = 3 seeds``."""
    target = markdown.link(spec.table, folder / spec.table, page)
    kinds = set(frame["kind"]) if "kind" in frame else set()
    if not kinds or not kinds <= KINDS:
        kinds = {"measured"}
    if spec.study and is_simulated(definition(spec.study)):
        return f"{target}, SIMULATED"
    seeds, said = _seeds(frame), ", ".join(kind.upper() for kind in sorted(kinds))
    return f"{target} ({folder.name}), {said}" + (f", seeds: {seeds}" if seeds else "")


def _seeds(frame: pd.DataFrame) -> str:
    """How many seeds the rows are of: ``3``, or ``3 to 10``."""
    name = next((name for name in ("n_seeds", "n", "seeds") if name in frame), None)
    if name is None:
        return str(frame["seed"].nunique()) if "seed" in frame else ""
    least, most = int(frame[name].min()), int(frame[name].max())
    return str(least) if least == most else f"{least} to {most}"
