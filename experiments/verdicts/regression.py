"""A fresh run against the committed reference.

``python -m experiments.verdicts.regression --scale ci --results results``

Compares tables, not runs, under ``experiments/verdicts/tolerances.yaml``. Exit code 0 when everything is inside, 1 when
something is outside, 2 for bad input. :mod:`experiments.verdicts.reference` writes the reference.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import typer
from pydantic import Field, model_validator

from edgc.errors import UserError
from experiments.common import written_tables
from experiments.common.cli import main_guard
from experiments.common.files import atomic_write
from experiments.common.yaml_settings import Settings, ends_whole, load_yaml, validate

TOLERANCES = Path(__file__).parent / "tolerances.yaml"
Scalar = str | float | int | bool


class Check(Settings):
    """One line of ``tolerances.yaml``; what the kinds mean stands there."""

    study: str
    table: str = "table.csv"
    kind: Literal["rows", "relative", "absolute", "bounds", "order"]
    column: str
    key: list[str] = []
    where: dict[str, Scalar | list[Scalar]] = {}
    tolerance: float = Field(0.0, ge=0.0)
    at_least: float | None = None
    at_most: float | None = None
    by: str | None = None
    direction: Literal["falls", "rises"] = "falls"
    same_text: bool = False

    @model_validator(mode="after")
    def _complete(self) -> Check:
        if self.kind == "bounds" and self.at_least is None and self.at_most is None:
            raise ValueError("kind bounds needs a bound; give at_least or at_most")
        if self.kind == "order" and self.by is None:
            raise ValueError("kind order needs `by`; name the column to order by")
        return self

    @property
    def stated(self) -> str:
        """The tolerance in words."""
        if self.kind in ("relative", "absolute"):
            return f"± {100 * self.tolerance:g} %" if self.kind == "relative" else f"± {self.tolerance:g}"
        if self.kind == "bounds":
            low = "" if self.at_least is None else f"at least {self.at_least:g}"
            high = "" if self.at_most is None else f"at most {self.at_most:g}"
            return " and ".join(part for part in (low, high) if part)
        return f"{self.direction} with {self.by}, slack {self.tolerance:g}" if self.kind == "order" else "the same"


class Tolerances(Settings):
    """The whole file; ``key`` is the default key of a check."""

    key: list[str] = Field(min_length=1)
    checks: list[Check] = Field(min_length=1)


@dataclass(frozen=True)
class Outcome:
    """One compared value; ``judged`` is False where the texts differ and the check is about training on the same."""

    check: str
    row: str
    reference: str
    fresh: str
    tolerance: str
    ok: bool
    judged: bool = True


def select(frame: pd.DataFrame, check: Check, where: object) -> pd.DataFrame:
    """The rows that a check is about; ``UserError`` where the table lacks a column that it names."""
    wanted = [check.column, *check.key, *check.where, *([check.by] if check.by else [])]
    lacking = next((name for name in wanted if name not in frame), None)
    if lacking:
        fix = "correct tolerances.yaml or make the table again"
        raise UserError(f"column {lacking} is missing for check {check.study} {check.column}", where=where, fix=fix)
    for column, value in check.where.items():
        frame = frame[frame[column].isin(value if isinstance(value, list) else [value])]
    return frame


def _keyed(frame: pd.DataFrame, check: Check) -> dict[str, Any]:
    # A key may have no value, such as the rank of a row that is over several.
    parts = frame[check.key].astype(object).fillna("").astype(str)
    names = parts.agg(" ".join, axis=1) if len(frame) else []
    return dict(zip(names, frame[check.column], strict=True))


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _inside(check: Check, old: float, new: float) -> bool:
    if math.isnan(old) and math.isnan(new):
        return True  # a value that both lack, such as the gap of a diverged run, is no difference
    room = check.tolerance * abs(old) if check.kind == "relative" else check.tolerance
    return abs(new - old) <= room


def compare(check: Check, reference: pd.DataFrame, fresh: pd.DataFrame) -> list[Outcome]:
    """All outcomes of one check on the selected rows of both tables; a check without rows is outside."""
    name = f"{check.study}: {check.column}"
    if check.kind == "order":
        return [_ordered(check, name, reference, fresh)]
    old, new = _keyed(reference, check), _keyed(fresh, check)
    found = []
    keys: Iterable[str] = dict.fromkeys([*old, *new]) if check.kind != "bounds" else new
    for key in keys:
        a, b = old.get(key), new.get(key)
        if check.kind == "bounds":
            low = -math.inf if check.at_least is None else check.at_least
            high = math.inf if check.at_most is None else check.at_most
            both_lack = key in old and pd.isna(a) and pd.isna(b)  # such as the error of the uncompressed run
            ok = both_lack or low <= float(b) <= high  # type: ignore[arg-type]
        elif key not in old or key not in new:
            ok = False
        elif check.kind == "rows":
            ok = a == b
        else:
            ok = _inside(check, float(a), float(b))  # type: ignore[arg-type]
        shown = ("no row" if key not in old else _text(a), "no row" if key not in new else _text(b))
        found.append(Outcome(name, key, *shown, check.stated, bool(ok)))
    return found or [Outcome(name, "", "no row", "no row", check.stated, False)]


def _ordered(check: Check, name: str, reference: pd.DataFrame, fresh: pd.DataFrame) -> Outcome:
    lists = [frame.groupby(check.by)[check.column].mean().dropna().sort_index() for frame in (reference, fresh)]
    values = list(lists[1])
    sign = 1 if check.direction == "falls" else -1
    steps = [sign * (a - b) for a, b in itertools.pairwise(values)]
    ok = len(values) >= 2 and all(step >= -check.tolerance for step in steps)
    texts = [" ".join(f"{value:.3g}" for value in series) or "no row" for series in lists]
    return Outcome(name, f"by {check.by}", texts[0], texts[1], check.stated, ok)


def load_tolerances(path: Path = TOLERANCES) -> list[Check]:
    """The checks, with the default key filled in."""
    found: Tolerances = validate(Tolerances, load_yaml(path), path)
    ends_whole(path)
    return [check if check.key else check.model_copy(update={"key": found.key}) for check in found.checks]


def read_table(root: Path, check: Check, fix: str) -> pd.DataFrame:
    path = root / check.study / check.table
    if not path.is_file():
        raise UserError(f"{check.table} of study {check.study} is missing", where=path, fix=fix)
    return select(written_tables.read(path), check, path)


def text_of_another_python(reference: Path, fresh: Path) -> bool:
    """Whether the fresh runs had another text since another Python, so another standard library, made it.

    If the Python is the same, or not known, a difference is one of this project's own, and every check is judged.
    """
    kept, made = reference / "provenance.yaml", sorted(fresh.glob("data/*/data.yaml"))
    if not kept.is_file() or len(made) != 1:
        return False
    old, new = load_yaml(kept), load_yaml(made[0])
    pythons = {(old.get("versions") or {}).get("python"), new.get("python")}
    texts = {old.get("data_fingerprint"), new.get("fingerprint")}
    return all(len(pair) == 2 and None not in pair for pair in (pythons, texts))


def regress(checks: Sequence[Check], reference: Path, fresh: Path) -> list[Outcome]:
    """Every outcome of every check; both folders hold ``<study>/<table>``; ``UserError`` where one is missing."""
    if not reference.is_dir():
        raise UserError("there is no reference", where=reference, fix="write it with: make reference")
    other_text = text_of_another_python(reference, fresh)
    found = []
    for check in checks:
        old = read_table(reference, check, "write the reference again: make reference")
        new = read_table(fresh, check, f"make it with: snakemake -c2 {check.study}")
        outcomes = compare(check, old, new)
        if check.same_text and other_text:
            outcomes = [replace(outcome, judged=False) for outcome in outcomes]
        found += outcomes
    return found


@main_guard
def main(
    scale: Annotated[str, typer.Option(help="ci, workstation or paper")] = "ci",
    results: Annotated[Path, typer.Option(help="results folder")] = Path("results"),
    reference: Annotated[Path | None, typer.Option(help="default: RESULTS/reference/SCALE")] = None,
    tolerances: Annotated[Path, typer.Option(help="the checks")] = TOLERANCES,
    every: Annotated[bool, typer.Option("--all", help="print every comparison, not one line per check")] = False,
) -> None:
    """Compare fresh tables with the committed reference; every comparison goes to RESULTS/SCALE/regression.csv."""
    fresh, known = results / scale, reference or results / "reference" / scale
    checks = load_tolerances(tolerances)
    found = regress(checks, known, fresh)
    atomic_write(fresh / "regression.csv", pd.DataFrame(found).to_csv(index=False, lineterminator="\n"))
    _print(found, scale, every=every)
    judged = [outcome for outcome in found if outcome.judged]
    outside = sum(not outcome.ok for outcome in judged)
    if len(judged) < len(found):
        print(
            f"{len(found) - len(judged)} comparisons are not judged: another version of Python has another standard "
            "library, so this text is not the reference's"
        )
    print(f"{len(judged) - outside} of {len(judged)} comparisons inside the tolerance, {outside} OUTSIDE")
    if outside:
        raise SystemExit(1)


def _print(found: Sequence[Outcome], scale: str, *, every: bool) -> None:
    """Every value outside; the values inside as one line per check unless ``every``."""
    from rich.console import Console
    from rich.table import Table

    table = Table("check", "row", "reference", "fresh", "tolerance", "", title=f"Regression at scale {scale}")
    inside = Counter((outcome.check, outcome.tolerance) for outcome in found if outcome.ok)
    for outcome in found:
        mark = "ok" if outcome.ok else "[bold red]OUTSIDE[/]" if outcome.judged else "other text"
        cells = (outcome.row, outcome.reference, outcome.fresh)
        if outcome.ok and not every:
            rows = inside.pop((outcome.check, outcome.tolerance), 0)
            if not rows:
                continue
            if rows > 1:
                cells = (f"{rows} rows", "", "")
        table.add_row(outcome.check, *cells, outcome.tolerance, mark)
    console = Console()
    Console(width=None if console.is_terminal else 120).print(table)


if __name__ == "__main__":
    typer.run(main)
