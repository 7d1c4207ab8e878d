"""A verdict on every claim of the paper.

``python -m experiments.verdicts.claims --scale ci --results results [--print]``;
``--results results/reference`` judges by what is committed.

The claims and the rules behind the verdicts stand in ``results/paper_claims.yaml`` and were written before the runs.
Measured and simulated values never meet in one row: a row's ``kind`` is the one that its evidence states, and
``extrapolated`` where measured values are carried on to what the claim is about. The verdicts:
``supported``, ``partly``, ``not supported``; ``depends`` of what is simulated, which by itself can neither support nor
refute; ``not tested`` where EDGC's policy did not act
(:mod:`experiments.analyse.acting`), so that the runs are those of a fixed rank and say nothing of it; ``not testable
here`` where this scale has no evidence, or too little.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import Field, model_validator

from edgc.errors import UserError
from experiments.analyse.tables import write_table
from experiments.common.acting import NOT_TESTED
from experiments.common.cli import main_guard
from experiments.common.files import ROOT
from experiments.common.yaml_settings import Settings, ends_whole, load_yaml, validate
from experiments.verdicts import simulated_claims
from experiments.verdicts.claim_measures import MEASURES
from experiments.verdicts.measured import COUNTS, Measured, Missing, join

CLAIMS = ROOT / "results" / "paper_claims.yaml"
ABOUT = ("id", "claim", "paper_value", "our_value", "unit", "kind", "scale")
COLUMNS = (*ABOUT, "n", "n_most", *COUNTS, "verdict", "evidence", "beside", "note")  # n: seeds
SUPPORTED, PARTLY, NOT_SUPPORTED, NOT_TESTABLE = "supported", "partly", "not supported", "not testable here"
DEPENDS = "depends"
Value = float | str
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {"mean": statistics.fmean, "min": min}


class Condition(Settings):
    """One bound on the value, or the words that it may be; exactly one key is given."""

    at_most: float = math.inf
    at_least: float = -math.inf
    one_of: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _one_key(self) -> Condition:
        if len(self.model_fields_set) != 1:
            raise ValueError("a condition has exactly one key; give one of at_most, at_least, one_of")
        return self

    def holds(self, value: Value) -> bool:
        if isinstance(value, str) or self.one_of:
            return value in self.one_of
        return self.at_least <= value <= self.at_most


class Rule(Settings):
    """Conditions tried in this order; when none holds, the claim is not supported."""

    supported: Condition
    partly: Condition | None = None

    def verdict(self, value: Value) -> str:
        if self.supported.holds(value):
            return SUPPORTED
        return PARTLY if self.partly is not None and self.partly.holds(value) else NOT_SUPPORTED


class Claim(Settings):
    """One entry of ``paper_claims.yaml``."""

    id: str
    claim: str
    paper_value: float | str
    unit: str
    kind: Literal["measured", "simulated"]
    study: str
    measure: str
    statistic: Literal["mean", "min", "worst", "range", "each"]
    rule: Rule
    depends: str = ""
    scales: tuple[str, ...] = ()
    why_not: str = ""

    @model_validator(mode="after")
    def _known(self) -> Claim:
        if self.measure not in MEASURES:
            raise ValueError(f"measure {self.measure} does not exist; use one of {', '.join(MEASURES)}")
        if (self.kind == "simulated") != bool(self.depends):
            raise ValueError("what is simulated says in `depends` on what it depends, and nothing else does")
        return self

    def combine(self, values: Sequence[Value], things: str = "runs") -> Value:
        """One value for several: their mean; of words how often each was found among the ``things``; where the rule
        looks at one end of the numbers, both ends."""
        if self.statistic in ("worst", "each"):
            counts = ", ".join(f"{word} in {n}" for word, n in Counter(map(str, values)).most_common())
            return f"{counts} of {len(values)} {things}" if len(values) > 1 else str(values[0])
        numbers = [value for value in values if not isinstance(value, str)]
        if self.statistic == "range" or (self.statistic == "min" and len(set(numbers)) > 1):
            return simulated_claims.extent(numbers)
        return STATISTICS[self.statistic](numbers)

    def verdict(self, values: Sequence[Value]) -> str:
        """The verdict by the rule: of each, supported where all values hold, partly where some do; what is not decided
        does not hold. What is simulated only says on what a claim depends."""
        if self.kind == "simulated":
            return DEPENDS
        if self.statistic == "each":
            holding = sum(map(self.rule.supported.holds, values))
            return SUPPORTED if holding == len(values) else PARTLY if holding else NOT_SUPPORTED
        if self.statistic == "worst":
            return max(map(self.rule.verdict, values), key=(SUPPORTED, PARTLY, NOT_SUPPORTED).index)
        return self.rule.verdict(STATISTICS[self.statistic]([v for v in values if not isinstance(v, str)]))


class Claims(Settings):
    """The whole file."""

    claims: list[Claim] = Field(min_length=1)


def load_claims(path: Path = CLAIMS) -> list[Claim]:
    """The claims with their rules; ``UserError`` names the key at fault."""
    claims: list[Claim] = validate(Claims, load_yaml(path), path).claims
    [(name, count)] = Counter(claim.id for claim in claims).most_common(1)
    if count > 1:
        raise UserError(f"claim {name} appears twice", where=path, fix="give every claim its own id")
    ends_whole(path)
    return claims


def judge(claim: Claim, scale: str, root: Path) -> dict[str, Any]:
    """One row of ``claims.csv``. ``root`` is the folder of the scale, e.g. ``results/ci``, or what is kept of it,
    ``results/reference/ci``."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= claim.model_dump(include={"id", "claim", "paper_value", "unit", "kind"})
    row |= {"scale": scale, "n": 0, "verdict": NOT_TESTABLE}
    if claim.scales and scale not in claim.scales:
        return row | {"note": claim.why_not or f"testable at {', '.join(claim.scales)} only"}
    try:
        measured: Measured = MEASURES[claim.measure](root)
    except Missing as reason:
        return row | {"note": f"no evidence: {reason}"}
    place = Path(*root.parts[-3 if root.parent.name == "reference" else -2 :])
    evidence, *more = ((place / table).as_posix() for table in (measured.evidence, *measured.more_evidence))
    row |= {
        "kind": "extrapolated" if measured.extrapolated else measured.kind,
        "note": measured.note,
        **measured.counts,
    }
    row |= {"n": measured.n, "n_most": measured.n_most, "evidence": evidence, "beside": "; ".join(more) or None}
    if measured.kind != claim.kind:
        return row | {"note": f"the claim asks for {claim.kind} evidence, this is {measured.kind}"}
    value = claim.combine(measured.values, measured.things)
    row["our_value"] = value if isinstance(value, str) else float(f"{value:.6g}")
    if exposed := measured.readings.get(simulated_claims.EXPOSED):
        row["our_value"] = f"{value}, or of {simulated_claims.EXPOSED} {simulated_claims.extent(exposed)}"
    if measured.acted is False:
        return row | {"verdict": NOT_TESTED}
    if claim.statistic == "range":
        number, holds = float(claim.paper_value), claim.rule.supported.holds
        notes = [claim.depends, simulated_claims.account(measured, holds, number)]
        row["note"] = join(*notes, measured.note, simulated_claims.at_assumed_rank(measured, number))
    verdict = claim.verdict(measured.values)
    return row | {"verdict": PARTLY if verdict == SUPPORTED and measured.extrapolated else verdict}


@main_guard
def main(
    scale: Annotated[str, typer.Option(help="ci, workstation or paper")] = "ci",
    results: Annotated[Path, typer.Option(help="results folder")] = Path("results"),
    show: Annotated[bool, typer.Option("--print", help="also print the table")] = False,
) -> None:
    """Write results/<scale>/claims.csv."""
    root = results.resolve() / scale
    if not root.is_dir():
        fix = f"run the studies first: snakemake -c2 all --config scale={scale}"
        raise UserError(f"no results at scale {scale}", where=results / scale, fix=fix)
    rows = [judge(claim, scale, root) for claim in load_claims()]
    import pandas as pd

    write_table(root / "claims.csv", pd.DataFrame(rows, columns=list(COLUMNS)))
    if show:
        print_table(rows, scale)
    print(results / scale / "claims.csv")


def print_table(rows: Sequence[dict[str, Any]], scale: str) -> None:
    """Print the rows, each with the number of its seeds and its note below."""
    print(f"Claims at scale {scale}")
    for row in rows:
        ours = "" if row["our_value"] is None else f", ours {row['our_value']}"
        seeds = f"{row['n']} to {row['n_most']}" if row["n_most"] else row["n"]
        counts = ", ".join([f"seeds: {seeds}", *(f"{row[name]} {name}" for name in COUNTS if row[name])])
        print(f"\n{row['verdict'].upper()}: {row['claim']}")
        print(f"  paper {row['paper_value']}{ours} ({row['unit']}, {row['kind']}; {counts})")
        if row["note"]:
            print(f"  {row['note']}")


if __name__ == "__main__":
    typer.run(main)
