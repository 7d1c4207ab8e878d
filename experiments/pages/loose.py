"""Numbers of README and docs that come from no table: each has to be accounted for in ``docs/numbers.yaml``.

Code, links, comments and what stands between markers is not looked at, nor digits in names (``int8``, ``H100``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, field_validator

from experiments.common.files import ROOT
from experiments.common.yaml_settings import Settings, load_yaml, validate

LIST = Path("docs") / "numbers.yaml"
# What is blanked, in this order; line ends stay, so that lines keep their numbers.
NOT_READ = (
    re.compile(r"^( *)(```|~~~).*?^\1\2[ \t]*$", re.MULTILINE | re.DOTALL),
    re.compile(r"<!--= .*?<!--/-->|<!-- table:.*?<!-- /table -->|<!--.*?-->", re.DOTALL),
    re.compile(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL),
    re.compile(r"\]\([^)\s]*\)|https?://[^\s)>]+|<[^<>\n]+>"),
)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:[ ,]\d{3}(?!\d))*(?:\.\d+)*")


class Allowed(Settings):
    """Numbers that need no table.

    Args:
        reason: why: a version, a date, a setting and its file, a count and the test that holds it, a formula.
        match: regular expressions that cover the numbers with the words beside them.
        text: the same as plain text, in which a blank stands for any.
    """

    reason: str = Field(min_length=3)
    match: tuple[str, ...] = ()
    text: tuple[str, ...] = ()

    @property
    def expressions(self) -> tuple[str, ...]:
        """All as regular expressions."""
        return (*self.match, *(r"\s+".join(map(re.escape, text.split())) for text in self.text))

    @field_validator("match")
    @classmethod
    def _valid(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for expression in given:
            try:
                re.compile(expression)
            except re.error as error:
                raise ValueError(f"{expression} is no regular expression ({error}); correct it") from None
        return given


class AllowList(Settings):
    """``docs/numbers.yaml``: ``everywhere`` for all pages, ``pages`` for one each; ``generated`` names pages that a
    program writes whole from tables, and the test that compares them. A page takes several entries."""

    everywhere: tuple[Allowed, ...] = ()
    pages: dict[str, tuple[Allowed, ...]] = {}
    generated: dict[str, str] = {}


def prose(text: str) -> str:
    """The text with all that is not read as blanks, at the same places."""
    for shape in NOT_READ:
        text = shape.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    return text


def loose(text: str, allowed: Sequence[Allowed]) -> tuple[list[tuple[int, str, str]], set[str]]:
    """Numbers that nothing accounts for, as line, number and words around it, and the expressions that were used."""
    read = prose(text)
    spans, used = [], set()
    numbers = list(NUMBER.finditer(read))
    for one in allowed:
        for expression in one.expressions:
            covered = [found.span() for found in re.compile(expression).finditer(read)]
            if any(start < number.end() and number.start() < end for start, end in covered for number in numbers):
                used.add(expression)
            spans += covered
    found = []
    for number in numbers:
        if not any(start <= number.start() and number.end() <= end for start, end in spans):
            around = read[max(0, number.start() - 25) : number.end() + 25]
            found.append((read.count("\n", 0, number.start()) + 1, number[0], " ".join(around.split())))
    return found, used


def problems(root: Path = ROOT) -> list[str]:
    """One line for each number that is not accounted for, and for each entry of the list that fits nothing."""
    listed: AllowList = validate(AllowList, load_yaml(root / LIST), root / LIST)
    found: list[str] = []
    everywhere: set[str] = set()
    paths = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    for path in paths:
        name = path.relative_to(root).as_posix()
        if any(Path(name).match(pattern) for pattern in listed.generated):
            continue
        own = listed.pages.get(name, ())
        numbers, used = loose(path.read_text(encoding="utf-8"), (*listed.everywhere, *own))
        everywhere |= used
        found += [
            f"{name}:{line}: {number} comes from nowhere ({around}); give it a marker, or account for it in {LIST}"
            for line, number, around in numbers
        ]
        unused = [expression for one in own for expression in one.expressions if expression not in used]
        found += [f"{LIST}: {name}: {expression!r} fits nothing there; remove it" for expression in unused]
    idle = [expression for one in listed.everywhere for expression in one.expressions if expression not in everywhere]
    found += [f"{LIST}: everywhere: {expression!r} fits nothing; remove it" for expression in idle]
    names = {path.relative_to(root).as_posix() for path in paths}
    found += [f"{LIST}: there is no page {name}; remove it" for name in listed.pages if name not in names]
    for pattern in listed.generated:
        if not any(Path(name).match(pattern) for name in names):
            found.append(f"{LIST}: generated: no page fits {pattern}; remove it")
    return found


@functools.lru_cache
def counted(root: Path = ROOT) -> dict[str, int]:
    """Loose numbers of each page when nothing is listed, for who starts a list."""
    return {
        path.relative_to(root).as_posix(): len(loose(path.read_text(encoding="utf-8"), ())[0])
        for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    }
