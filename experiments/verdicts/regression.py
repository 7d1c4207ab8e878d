"""A fresh run against the committed reference.

``python -m experiments.verdicts.regression --scale ci --results results``

Compares tables, not runs, under ``experiments/verdicts/tolerances.yaml``. Exit code 0 when everything is inside, 1 when
something is outside, 2 for bad input. :mod:`experiments.verdicts.reference` writes the reference.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
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
        bounds = {"at least": self.at_least, "at most": self.at_most}
        return {
            "rows": "the same",
            "relative": f"± {100 * self.tolerance:g} %",
            "absolute": f"± {self.tolerance:g}",
            "bounds": " and ".join(f"{name} {value:g}" for name, value in bounds.items() if value is not None),
            "order": f"falls with {self.by}, slack {self.tolerance:g}",
        }[self.kind]

    def holds(self, old: Any, new: Any) -> bool:
        """True if a value of the reference and a fresh one agree; what both lack, such as the gap of a diverged run or
        the error of an uncompressed one, is no difference."""
        if self.kind == "rows":
            return bool(old == new)
        if pd.isna(old) and pd.isna(new):
            return True
        if self.kind == "bounds":
            low, high = -math.inf if self.at_least is None else self.at_least, self.at_most
            return bool(low <= float(new) <= (math.inf if high is None else high))
        return abs(float(new) - float(old)) <= self.tolerance * (abs(float(old)) if self.kind == "relative" else 1)


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
    columns = [check.column, *check.key, *check.where, *([check.by] if check.by else [])]
    lacking = next((name for name in columns if name not in frame), None)
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


def _text(values: dict[str, Any], key: str) -> str:
    value = values.get(key, "no row")
    return str(value) if not isinstance(value, float) else "–" if math.isnan(value) else f"{value:.5g}"


def compare(check: Check, reference: pd.DataFrame, fresh: pd.DataFrame) -> list[Outcome]:
    """Outcomes of one check on the selected rows of both tables; a check without rows is outside."""
    name = f"{check.study}: {check.column}"
    if check.kind == "order":
        return [_ordered(check, name, reference, fresh)]
    old, new = _keyed(reference, check), _keyed(fresh, check)
    outcomes = []
    for key in new if check.kind == "bounds" else dict.fromkeys([*old, *new]):
        both = key in new and (key in old or check.kind == "bounds")
        ok = both and check.holds(old.get(key, 0.0), new[key])
        outcomes.append(Outcome(name, key, _text(old, key), _text(new, key), check.stated, ok))
    return outcomes or [Outcome(name, "", "no row", "no row", check.stated, False)]


def _ordered(check: Check, name: str, reference: pd.DataFrame, fresh: pd.DataFrame) -> Outcome:
    means = [frame.groupby(check.by)[check.column].mean().dropna().sort_index() for frame in (reference, fresh)]
    steps = [a - b for a, b in itertools.pairwise(means[1])]
    ok = bool(steps) and all(step >= -check.tolerance for step in steps)
    old, new = (" ".join(f"{value:.3g}" for value in series) or "no row" for series in means)
    return Outcome(name, f"by {check.by}", old, new, check.stated, ok)


def load_tolerances(path: Path = TOLERANCES) -> list[Check]:
    """The checks, with the default key filled in."""
    tolerances: Tolerances = validate(Tolerances, load_yaml(path), path)
    ends_whole(path)
    return [check if check.key else check.model_copy(update={"key": tolerances.key}) for check in tolerances.checks]


def read_table(root: Path, check: Check, fix: str) -> pd.DataFrame:
    path = root / check.study / check.table
    if not path.is_file():
        raise UserError(f"{check.table} of study {check.study} is missing", where=path, fix=fix)
    return select(written_tables.read(path), check, path)


def text_of_another_python(reference: Path, fresh: Path) -> bool:
    """True if the fresh runs had another text since another Python, so another standard library, made it.

    If the Python is the same, or not known, a difference is one of this project's own, and every check is judged.
    """
    provenance, data = reference / "provenance.yaml", sorted(fresh.glob("data/*/data.yaml"))
    if not provenance.is_file() or len(data) != 1:
        return False
    old, new = load_yaml(provenance), load_yaml(data[0])
    pythons = {(old.get("versions") or {}).get("python"), new.get("python")}
    texts = {old.get("data_fingerprint"), new.get("fingerprint")}
    return all(len(pair) == 2 and None not in pair for pair in (pythons, texts))


def regress(checks: Sequence[Check], reference: Path, fresh: Path) -> list[Outcome]:
    """Every outcome of every check; both folders hold ``<study>/<table>``; ``UserError`` where one is missing."""
    if not reference.is_dir():
        raise UserError("there is no reference", where=reference, fix="write it with: make reference")
    other_text = text_of_another_python(reference, fresh)
    outcomes = []
    for check in checks:
        old = read_table(reference, check, "write the reference again: make reference")
        new = read_table(fresh, check, f"make it with: snakemake -c2 {check.study}")
        judged = not (check.same_text and other_text)
        outcomes += [replace(outcome, judged=judged) for outcome in compare(check, old, new)]
    return outcomes


@main_guard
def main(
    scale: Annotated[str, typer.Option(help="ci, workstation or paper")] = "ci",
    results: Annotated[Path, typer.Option(help="results folder")] = Path("results"),
    reference: Annotated[Path | None, typer.Option(help="default: RESULTS/reference/SCALE")] = None,
) -> None:
    """Compare fresh tables with the committed reference; every comparison goes to RESULTS/SCALE/regression.csv."""
    fresh, known = results / scale, reference or results / "reference" / scale
    outcomes = regress(load_tolerances(), known, fresh)
    atomic_write(fresh / "regression.csv", pd.DataFrame(outcomes).to_csv(index=False, lineterminator="\n"))
    _print(outcomes, scale)
    judged = [outcome for outcome in outcomes if outcome.judged]
    outside = sum(not outcome.ok for outcome in judged)
    if len(judged) < len(outcomes):
        print(
            f"{len(outcomes) - len(judged)} comparisons are not judged: another version of Python has another standard "
            "library, so this text is not the reference's"
        )
    print(f"{len(judged) - outside} of {len(judged)} comparisons inside the tolerance, {outside} OUTSIDE")
    if outside:
        raise SystemExit(1)


def _print(outcomes: Sequence[Outcome], scale: str) -> None:
    """Print every value outside, and the values inside as a line per check."""
    from rich.console import Console
    from rich.table import Table

    table = Table("check", "row", "reference", "fresh", "tolerance", "", title=f"Regression at scale {scale}")
    inside = Counter((outcome.check, outcome.tolerance) for outcome in outcomes if outcome.ok)
    for (name, tolerance), count in inside.items():
        table.add_row(name, f"{count} rows", "", "", tolerance, "ok")
    for row in (outcome for outcome in outcomes if not outcome.ok):
        mark = "[bold red]OUTSIDE[/]" if row.judged else "other text"
        table.add_row(row.check, row.row, row.reference, row.fresh, row.tolerance, mark)
    console = Console()
    Console(width=None if console.is_terminal else 120).print(table)


if __name__ == "__main__":
    typer.run(main)
