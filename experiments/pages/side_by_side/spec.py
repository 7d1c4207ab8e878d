"""What ``pages.yaml`` may say: the paper's figures and tables, and which of our tables stand beside them.

Values of the paper are not written there: they come from ``results/paper_claims.yaml`` by the id of a claim, and its
settings from the studies' files at scale ``paper``, which hold what the authors' scripts say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from edgc.errors import UserError, nearest
from experiments.common.yaml_settings import Settings, load_yaml, validate
from experiments.spec import matrix
from experiments.verdicts.claims import load_claims

PATH = Path(__file__).with_name("pages.yaml")
Value = str | int | float | bool
Name = Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")]


class Column(Settings):
    """One column of a comparison, filled from a table of ours and from what is known of the paper.

    ``ours`` is a column of our table, with ``low`` and ``high`` the ends of its interval. ``theirs`` are settings of
    the paper's run (``model.hidden``), multiplied where there are several; ``claim`` is the value that a claim states,
    in the row of variant ``only`` where that is given. Both are divided by the setting ``over`` of their run and
    multiplied with ``times``. ``names`` puts words in place of those of our table. ``across`` spreads the column over
    the values of another one.
    """

    name: str
    ours: str | None = None
    low: str | None = None
    high: str | None = None
    theirs: tuple[str, ...] = ()
    claim: str | None = None
    only: str | None = None
    text: str = "{}"
    over: str | None = None
    times: str | None = None
    factor: float = 1.0
    decimals: int | None = Field(None, ge=0)
    percent: bool = False
    names: dict[str, str] = {}
    across: str | None = None
    unit: str = ""

    @model_validator(mode="after")
    def _whole(self) -> Column:
        if (self.low is None) != (self.high is None) or (self.low and not self.ours):
            raise ValueError("an interval has two ends and a value; give ours, low and high")
        if self.claim and self.theirs:
            raise ValueError("theirs and claim are two sources of one value; give one of them")
        if self.only and not self.claim:
            raise ValueError("only says in which row the claim's value stands; give claim as well")
        return self


class PaperRows(Settings):
    """Rows of the paper: runs of a study at scale ``paper``, by default all of its variants."""

    study: Name
    variants: tuple[str, ...] = ()


class Comparison(Settings):
    """A table with the paper's rows above ours.

    ``where`` keeps the rows of our table with these values. Without ``paper`` the paper has one row; ``theirs: none``
    leaves it out where the table is about a thing that the paper does not have. ``machine`` names the folder of a
    benchmark, whose tables are of no study.
    """

    title: str
    table: Annotated[str, Field(pattern=r"^([a-z0-9_]+/)?[a-z0-9_]+\.csv$")]
    machine: str | None = None
    scales: Annotated[tuple[Name, ...], Field(min_length=1)] = ("workstation",)
    where: dict[str, Value | list[Value]] = {}
    paper: PaperRows | None = None
    theirs: Literal["row", "none"] = "row"
    columns: Annotated[tuple[Column, ...], Field(min_length=1)]
    note: str = ""

    @property
    def study(self) -> str | None:
        """None for a benchmark's table."""
        return None if self.machine else self.table.partition("/")[0]

    @model_validator(mode="after")
    def _of_study(self) -> Comparison:
        if (self.machine is None) != ("/" in self.table):
            raise ValueError(f"table {self.table}: write study/table.csv, or machine and table.csv for a benchmark")
        return self


class Setting(Settings):
    """One column of the table of settings: a run of a study at a scale, by default its first."""

    study: Name
    scale: Name = "workstation"
    run: str | None = None
    name: str = ""


class Sides(Settings):
    """The settings compared. ``unknown`` says what is not known of theirs."""

    theirs: tuple[Setting, ...] = ()
    ours: tuple[Setting, ...] = ()
    unknown: str = ""


class Policy(Settings):
    """Runs of which the page says whether EDGC's policy acted."""

    study: Name
    scale: Name = "workstation"
    variants: tuple[str, ...] = ()


class Picture(Settings):
    """A committed figure of ours."""

    name: Name
    scale: Name = "workstation"


class Page(Settings):
    """One figure or table of the paper; ``item`` says what part of it that is."""

    id: Name
    title: str
    item: str
    shows: str
    unknown: str = ""
    claims: tuple[str, ...] = ()
    settings: Sides = Sides()
    comparisons: tuple[Comparison, ...] = ()
    figures: tuple[Picture, ...] = ()
    policies: tuple[Policy, ...] = ()
    drawing: str = ""
    differs: tuple[str, ...] = ()
    decides: tuple[str, ...] = ()


class Pages(Settings):
    """The whole file. ``scales``: whose verdicts the pages show; ``words``: what they take for known."""

    scales: Annotated[tuple[Name, ...], Field(min_length=1)]
    about: str
    versions: dict[str, str]
    words: dict[str, str] = {}
    pages: Annotated[tuple[Page, ...], Field(min_length=1)]


def load_pages(path: Path = PATH) -> Pages:
    """The pages; ``UserError`` names the key at fault, also where a study or a claim does not exist.

    Every claim of the paper belongs to exactly one page.
    """
    values = load_yaml(path)
    for entry in values.get("pages") or ():  # one by one first: then the error names the page
        if isinstance(entry, dict):
            validate(Page, entry, f"{path}, page {entry.get('id')}")
    found: Pages = validate(Pages, values, path)
    names = [page.id for page in found.pages]
    _once(names, "page", path)
    known, studies = [claim.id for claim in load_claims()], matrix.studies()
    shown = [claim for page in found.pages for claim in page.claims]
    _once(shown, "claim", path)
    for page in found.pages:
        where = f"{path}, page {page.id}"
        for claim in (*page.claims, *(c.claim for t in page.comparisons for c in t.columns if c.claim)):
            if claim not in known:
                raise UserError(f"unknown claim {claim!r}", where=where, fix=nearest(claim, known))
        for study in _studies(page):
            if study not in studies:
                raise UserError(f"unknown study {study!r}", where=where, fix=nearest(study, studies))
    missing = [claim for claim in known if claim not in shown]
    if missing:
        raise UserError(f"claim {missing[0]} is on no page", where=path, fix="add it to `claims` of the page it is of")
    return found


def _once(names: list[str], what: str, path: Path) -> None:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"{what} {twice} appears twice", where=path, fix="keep one of them")


def _studies(page: Page) -> list[str]:
    sides, tables = page.settings, page.comparisons
    named = [item.study for item in (*sides.theirs, *sides.ours)] + [item.study for item in page.policies]
    named += [table.paper.study for table in tables if table.paper]
    return [*named, *(table.study for table in tables if table.study)]
