"""Numbers and tables in README and docs that come from committed tables.

``python -m experiments.pages.numbers fill [FILES]`` writes them, ``... check [FILES]`` lists those that are stale, and
the numbers that come from nowhere (:mod:`experiments.pages.loose`). Markers are comments, which no reader sees:

* a number: ``<!--= REFERENCE -->0.0077<!--/-->``; references: :mod:`experiments.pages.references`;
* a shorter name for the start of a reference, in a line of its own: ``<!-- let cqm = FILE variant=cqm -->``;
* a table, a column a line (:mod:`experiments.pages.marked_tables`)::

      <!-- table: workstation/policies/comparisons.csv variant=cqm sort=rival
      rival "EDGC against"
      difference_nats "difference, nats" +.4f -->
      ...
      <!-- /table -->

* the verdicts on the paper's claims: ``<!-- table: verdicts SCALE PAGE -->``; links lead from PAGE, by default README.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from edgc.errors import UserError
from experiments.common.cli import main_guard
from experiments.common.files import ROOT, atomic_write
from experiments.pages import loose
from experiments.pages.marked_tables import table_text
from experiments.pages.references import BadReference, parse

INLINE = re.compile(r"(<!--= (.*?) -->)(.*?)(<!--/-->)", re.DOTALL)
BLOCK = re.compile(r"(<!-- table: (.*?) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)
NAME = re.compile(r"^<!-- let (\w+) = (.*?) -->$", re.MULTILINE | re.DOTALL)
MARKS = re.compile(r"<!--= |<!--/-->|<!-- table:|<!-- /table -->|<!-- let ")
# CommonMark takes a line that starts with a comment as HTML: it would end the paragraph, and no link in it would work.
AT_START = re.compile(r"^[ \t]*(?:(?:[-*+>]|\d+\.)[ \t]+)*<!--=", re.MULTILINE)
CODE = re.compile(r"^( *)(```|~~~).*?^\1\2[ \t]*$|(?<!`)(`+)(?!`).*?(?<!`)\3(?!`)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Stale:
    """A marker whose text is not what its table says."""

    line: int
    reference: str
    stands: str
    should: str


def pages(root: Path = ROOT) -> list[Path]:
    """README and all pages of the documentation."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def filled(text: str, where: object) -> tuple[str, list[Stale]]:
    """The text with every marker as its table says, and those that were not.

    Args:
        text: of a Markdown file.
        where: its name, for errors.

    Raises ``UserError``, which names file and line, at a marker that cannot be read.
    """
    names = {found[1]: found[2] for found in NAME.finditer(text)}
    outside = _check_shape(text, where)
    stale: list[Stale] = []

    def replace(make: Callable[[str], str]) -> Callable[[re.Match[str]], str]:
        def one(found: re.Match[str]) -> str:
            if not outside(found.start()):
                return found[0]
            line = line_of(text_now, found.start())
            try:
                value = make(found[2])
            except BadReference as error:
                raise UserError(
                    f"{error.message}: {_short(found[2])}", where=f"{where}:{line}", fix=error.fix
                ) from None
            if value != found[3]:
                stale.append(Stale(line, _short(found[2]), found[3], value))
            return found[1] + value + found[4]

        return one

    text_now = text
    text_now = INLINE.sub(replace(lambda reference: parse(reference, names).text()), text_now)
    outside = _outside_code(text_now)
    text_now = BLOCK.sub(replace(lambda reference: table_text(reference, names)), text_now)
    return text_now, stale


def _short(reference: str) -> str:
    return " ".join(reference.split())[:100]


def line_of(text: str, position: int) -> int:
    """The line of a position, counted from 1."""
    return text.count("\n", 0, position) + 1


def _outside_code(text: str) -> Callable[[int], bool]:
    spans = [found.span() for found in CODE.finditer(text)]
    return lambda position: not any(start <= position < end for start, end in spans)


def _check_shape(text: str, where: object) -> Callable[[int], bool]:
    """Every marker is whole, and none starts a line; returns what tells whether a position is outside code."""
    outside = _outside_code(text)
    whole = [found.span() for shape in (INLINE, BLOCK, NAME) for found in shape.finditer(text)]
    for mark in MARKS.finditer(text):
        if outside(mark.start()) and not any(start <= mark.start() < end for start, end in whole):
            line = line_of(text, mark.start())
            fix = "a number is <!--= REFERENCE -->0<!--/-->, a table ends with <!-- /table -->"
            raise UserError(f"a marker is not whole: {mark[0]}", where=f"{where}:{line}", fix=fix)
    for found in AT_START.finditer(text):
        if outside(found.start()):
            line = line_of(text, found.end())
            fix = "begin the line with a word: CommonMark takes such a line as HTML"
            raise UserError("a line begins with a marker", where=f"{where}:{line}", fix=fix)
    return outside


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise UserError("cannot read the page", where=path, fix="check the name") from None


def _shown(path: Path) -> str:
    return path.resolve().relative_to(ROOT).as_posix() if path.resolve().is_relative_to(ROOT) else str(path)


app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__.partition("\n")[0])
Files = Annotated[list[Path] | None, typer.Argument(help="Markdown files; by default README.md and docs")]


@app.command()
@main_guard
def fill(files: Files = None) -> None:
    """Write every number and table that a marker names."""
    for path in files or pages():
        text = _read(path)
        new, stale = filled(text, _shown(path))
        if new != text:
            atomic_write(path, new)
        for one in stale:
            print(f"{_shown(path)}:{one.line}: {one.stands.strip()[:40]!r} -> {one.should.strip()[:40]!r}")


@app.command()
@main_guard
def check(files: Files = None) -> None:
    """List stale markers, and numbers that no marker and no line of docs/numbers.yaml accounts for; exit code 1."""
    problems = []
    for path in files or pages():
        _, stale = filled(_read(path), _shown(path))
        problems += [
            f"{_shown(path)}:{one.line}: {one.stands.strip()[:40]!r} should be {one.should.strip()[:40]!r}"
            f" ({one.reference}); make numbers"
            for one in stale
        ]
    if not files:
        problems += loose.problems()
    for problem in problems:
        print(problem)
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    app()
