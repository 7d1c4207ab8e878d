"""What a marker of a page refers to: a value, or rows, of a committed table or of a settings file.

A reference is one line of words: a file, conditions that choose rows, what is read of them, and how it is written::

    workstation/policies/comparisons.csv variant=cqm rival="fixed rank" difference_nats .4f

* file: a path below ``results/reference``, ``results`` or the project (CSV, YAML, JSON), or a name that the page
  defined (:mod:`experiments.pages.numbers`);
* conditions: ``column=text``, ``column!=text``, and ``<``, ``<=``, ``>``, ``>=`` with a number; values that are numbers
  are compared as numbers. Settings and JSON are one row, their keys joined by dots, but for a list of mappings, whose
  entries are rows (``paper_claims.yaml id=entropy_cost paper_value``);
* what: a column of the only row; ``low..high``, two columns as an interval; ``min(c)``, ``max(c)``, ``mean(c)``,
  ``median(c)``, ``range(c)`` (both ends), ``names(c)`` (all values) over the rows, ``max_abs(c)`` of
  absolute values; ``count`` of the rows;
* how: ``abs``, ``*100``, ``+1`` in the order of writing, then a format of Python (``.4f``, ``+.1f``, ``,d``) or
  ``words`` (``ten``). Without one, text as it stands and numbers with up to four digits.
"""

from __future__ import annotations

import csv
import functools
import json
import math
import operator
import re
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgc.errors import UserError, nearest
from experiments.common.files import ROOT
from experiments.common.yaml_settings import load_yaml

Row = Mapping[str, Any]
FOLDERS = ("results/reference", "results", ".")
FORMAT = re.compile(r"[+ ]?,?(\.\d+)?[defg]")
CONDITION = re.compile(r"([\w.]+)(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
OVER_ROWS = re.compile(r"(min|max|mean|median|range|names)(_abs)?\(([\w.]+)\)")
CHANGE = re.compile(r"([*+])(-?\d+(?:\.\d+)?)")
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "max": max,
    "mean": statistics.fmean,
    "median": statistics.median,
}
NOTHING = "-"  # what a page shows of a value that is missing
WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


class BadReference(Exception):
    """A reference that cannot be read; ``fix`` says what to write."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.message, self.fix = message, fix


@dataclass(frozen=True)
class Written:
    """How a value is read of rows, and written: the part of a reference after file and conditions."""

    what: str
    changes: tuple[str, ...] = ()
    form: str | None = None

    def text(self, rows: Sequence[Row]) -> str:
        """The value of these rows as a page shows it. Raises :class:`BadReference`."""
        parts = [self._one(value) for value in self._values(rows)]
        return " to ".join(parts) if set(parts) != {NOTHING} else NOTHING

    def _values(self, rows: Sequence[Row]) -> list[Any]:
        over = OVER_ROWS.fullmatch(self.what)
        if self.what == "count":
            return [len(rows)]
        if over and not rows:
            raise BadReference("no row is left", "widen the conditions")
        if over and over[1] == "names":
            return [", ".join(dict.fromkeys(str(_cell(row, over[3])) for row in rows))]
        if over:
            numbers = [value for row in rows if not math.isnan(value := number(_cell(row, over[3]), over[3]))]
            numbers = [abs(value) for value in numbers] if over[2] else numbers
            if not numbers:
                raise BadReference(f"column {over[3]} has no number in these rows", "choose others")
            return [min(numbers), max(numbers)] if over[1] == "range" else [STATISTICS[over[1]](numbers)]
        if len(rows) != 1:
            message = f"{len(rows)} rows fit, one is needed" if rows else "no row fits"
            raise BadReference(message, "add a condition" if rows else "correct the conditions")
        return [_cell(rows[0], name) for name in self.what.split("..")]

    def _one(self, value: Any) -> str:
        if not self.changes and self.form is None:
            return f"{value:.4g}" if isinstance(value, float) else str(value)
        changed = number(value, self.what)
        for change in self.changes:
            if change == "abs":
                changed = abs(changed)
            else:
                sign, by = CHANGE.fullmatch(change).groups()  # type: ignore[union-attr]
                changed = changed * float(by) if sign == "*" else changed + float(by)
        if not math.isfinite(changed):
            return NOTHING if math.isnan(changed) else "always"  # a limit that is never met
        if self.form == "words" or (self.form or "").endswith("d"):
            if changed != int(changed):
                raise BadReference(f"{changed:g} is not a whole number", "use a format such as .1f")
            whole = int(changed)
            if self.form == "words":
                return WORDS[whole] if 0 <= whole < len(WORDS) else str(whole)
            return format(whole, self.form or "")
        text = format(changed, self.form or ".4g")
        return text.lstrip("-+") if not float(text.replace(",", "")) else text  # -0.0


@dataclass(frozen=True)
class Reference:
    """A file and conditions, and, for a single value, how it is written."""

    path: Path
    conditions: tuple[tuple[str, str, str], ...]
    written: Written | None

    def rows(self) -> list[Row]:
        """The rows that fit. Raises :class:`BadReference` where the file or a column is missing."""
        rows: Sequence[Row] = table(self.path)
        for name, sign, wanted in self.conditions:
            rows = [row for row in rows if _holds(_cell(row, name), sign, wanted)]
        return list(rows)

    def text(self) -> str:
        """The single value as text. Raises :class:`BadReference`."""
        if self.written is None:
            raise BadReference("no column is named", "write one after the conditions")
        return self.written.text(self.rows())


def parse(text: str, names: Mapping[str, str] | None = None) -> Reference:
    """A reference from its words; ``names`` are what the page defined. Raises :class:`BadReference`."""
    words = split(text)
    if words and words[0] in (names or {}):
        words = [*split((names or {})[words[0]]), *words[1:]]
    if not words:
        raise BadReference("the reference is empty", "write a file, conditions and a column")
    conditions = []
    rest = words[1:]
    while rest and (found := CONDITION.fullmatch(rest[0])):
        conditions.append((found[1], found[2], found[3]))
        rest = rest[1:]
    return Reference(find(words[0]), tuple(conditions), written(rest) if rest else None)


def split(text: str) -> list[str]:
    """Words, those in quotes whole. Raises :class:`BadReference`."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadReference(str(error).lower(), "close the quotes") from None


def written(words: Sequence[str]) -> Written:
    """A column and how it is written. Raises :class:`BadReference` at a word that is none of these."""
    what, *rest = words
    form = rest.pop() if rest and (rest[-1] == "words" or FORMAT.fullmatch(rest[-1])) else None
    wrong = next((word for word in rest if word != "abs" and not CHANGE.fullmatch(word)), None)
    if wrong is not None:
        raise BadReference(f"{wrong!r} is neither abs, *NUMBER, +NUMBER nor a format", "correct or remove it")
    return Written(what, tuple(rest), form)


def find(name: str) -> Path:
    """The file; it need not be there. Raises :class:`BadReference` where the name leads out of the project."""
    paths = [(ROOT / folder / name).resolve() for folder in FOLDERS]
    if not all(path.is_relative_to(ROOT) for path in paths):
        raise BadReference(f"{name} is outside the project", "name a file below results/reference")
    return next((path for path in paths if path.is_file()), paths[0])


@functools.lru_cache(maxsize=256)
def table(path: Path) -> tuple[Row, ...]:
    """Rows of a file. Raises :class:`BadReference`."""
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    if not path.is_file():
        raise BadReference(f"there is no {shown}", "correct the file, or keep the study")
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as handle:
            return tuple(csv.DictReader(handle))
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else load_yaml(path)
    except (UserError, ValueError):
        raise BadReference(f"{shown} cannot be read", "name a CSV, YAML or JSON file") from None
    lists = [value for value in content.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if len(content) == 1 and lists:
        return tuple(lists[0])
    return (dict(_flat(content)),)


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, inner in value.items():
        found += _flat(inner, f"{prefix}{key}.") if isinstance(inner, dict) else [(f"{prefix}{key}", inner)]
    return found


def _cell(row: Row, name: str) -> Any:
    if name not in row:
        raise BadReference(f"there is no column {name}", nearest(name, row, "columns"))
    return row[name]


def number(value: Any, name: str) -> float:
    """A cell as a number, nan where it is empty. Raises :class:`BadReference` at other text."""
    if value in ("", None):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        raise BadReference(
            f"{name} is {value!r}, not a number", "remove the format, or choose another column"
        ) from None


def _holds(value: Any, sign: str, wanted: str) -> bool:
    try:
        return COMPARE[sign](float(value), float(wanted))
    except (TypeError, ValueError):
        if sign not in ("=", "!="):
            raise BadReference(f"{value!r} {sign} {wanted!r} compares text", "use = or !=") from None
        return COMPARE[sign](str(value), wanted)
