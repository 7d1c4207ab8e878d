"""Rows of the report's first table: one claim of the paper each, our value, the verdict and what stands behind it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pandas as pd

from experiments.analyse.statistics import interval
from experiments.common.acting import NOT_TESTED
from experiments.common.figures import INPUTS
from experiments.pages.kept import Kept, Link
from experiments.verdicts.claim_measures import COUNTS, MEASURES, Measured, Missing
from experiments.verdicts.claims import DEPENDS, NOT_SUPPORTED, NOT_TESTABLE, PARTLY, SUPPORTED, Claim, load_claims

VERDICTS = (SUPPORTED, PARTLY, NOT_SUPPORTED, DEPENDS, NOT_TESTED, NOT_TESTABLE)
DECIMALS = re.compile(r"\d+\.\d{2,}")
SINGULAR = {"entropies": "entropy"}


@dataclass(frozen=True)
class ClaimRow:
    """What the table shows of a claim. Texts are those of ``claims.csv``, numbers to three digits; ``interval`` is the
    95 % t interval over seeds where our value is a mean of seeds, or rests on one. ``n`` are seeds, ``3 to 10`` where
    settings have different numbers of them. ``studies`` are those whose tables ``evidence`` names."""

    id: str
    claim: str
    verdict: str
    paper: str
    ours: str
    interval: str
    unit: str
    kind: str
    n: str
    counts: str
    note: str
    studies: list[str]
    seeds: list[int]
    evidence: list[Link]
    figure: str | None


def rows(kept: Kept, figures: Iterable[str]) -> list[ClaimRow] | None:
    """A row for each line of ``claims.csv``, in its order; None where there is no such table.

    Args:
        kept: the results.
        figures: names of the figures that the page shows.
    """
    table = kept.table("claims.csv")
    if table is None:
        return None
    known, drawn = {claim.id: claim for claim in load_claims()}, set(figures)
    return [_row(kept, line, known.get(str(line["id"])), drawn) for line in table.to_dict("records")]


def _row(kept: Kept, line: dict[str, Any], claim: Claim | None, figures: set[str]) -> ClaimRow:
    given = {key: "" if pd.isna(value) else value for key, value in line.items()}
    paths = [path for key in ("evidence", "beside") for path in str(given.get(key, "")).split("; ") if path]
    tables = {below: path for path in paths if (below := _below(kept.root, path))}
    evidence = next(iter(tables), None)
    study = evidence.partition("/")[0] if evidence else claim.study if claim else ""
    unit = str(given["unit"])
    return ClaimRow(
        id=str(given["id"]),
        claim=str(given["claim"]),
        verdict=str(given["verdict"]),
        paper=_with_unit(given["paper_value"], unit),
        ours=rounded(_with_unit(given["our_value"], unit)) if given["our_value"] != "" else "",
        interval=rounded(interval_of(kept.root, claim, given["our_value"])) if claim else "",
        unit=unit,
        kind=str(given["kind"]),
        n=_seed_count(given["n"], given.get("n_most", "")),
        counts=", ".join(counted(int(given[name]), name) for name in COUNTS if given.get(name)),
        note=str(given["note"]),
        studies=list(dict.fromkeys([below.partition("/")[0] for below in tables] or [study] * bool(study))),
        seeds=sorted({seed for below in tables for seed in _seeds(kept.table(below))}),
        evidence=[
            kept.link(kept.root / below, path) for below, path in tables.items() if (kept.root / below).is_file()
        ],
        figure=figure_of(evidence, study, figures),
    )


def rounded(text: str) -> str:
    """The text with its decimals cut down to three significant digits."""
    return DECIMALS.sub(lambda found: f"{float(found[0]):.3g}", text)


def _seed_count(fewest: Any, most: Any) -> str:
    """``3``, or ``3 to 10``; empty for none."""
    return " to ".join(f"{int(n)}" for n in (fewest, most) if n)


def counted(count: int, plural: str) -> str:
    """``1 run``, ``6 runs``."""
    return f"{count} {plural if count != 1 else SINGULAR.get(plural, plural.removesuffix('s'))}"


def _below(root: Path, path: str) -> str | None:
    """``methods/table.csv`` of ``results/ci/methods/table.csv``."""
    parts = PurePosixPath(path).parts
    return "/".join(parts[parts.index(root.name) + 1 :]) if root.name in parts else None


def _with_unit(value: object, unit: str) -> str:
    """Numbers with a percent sign where they are percents, with ``times`` where they are ratios; other units stand in
    the row's details."""
    text = str(value)
    number = text.removeprefix("-")[:1].isdigit()
    if number and "." in text and " " not in text:
        text = text.rstrip("0").rstrip(".")
    sign = "%" if unit.startswith("%") else "times" if unit.startswith("ratio") else ""
    return f"{text} {sign}" if sign and number else text


def interval_of(root: Path, claim: Claim, written: object) -> str:
    """The interval of a claim's value, as the tables give it now; empty where these are not the ones judged, or where
    a single seed or a simulation has none."""
    try:
        found = MEASURES[claim.measure](root)
    except (Missing, KeyError):  # KeyError: a table of an earlier version lacks a column
        return ""
    value = claim.combine(found.values, found.things)
    same = value == written if isinstance(value, str) else _close(value, written)
    return _interval(claim, found) if same else ""


def _close(value: float, written: object) -> bool:
    try:
        return math.isclose(value, float(str(written)), rel_tol=1e-5, abs_tol=1e-12)
    except ValueError:
        return False


def _interval(claim: Claim, found: Measured) -> str:
    if found.gap is not None and all(map(math.isfinite, found.gap)):
        mean, low, high = found.gap
        which = "most: " if claim.statistic == "each" and len(found.values) > 1 else ""
        return f"{which}{mean:+.4f} nats, {low:+.4f} to {high:+.4f}"
    numbers = [value for value in found.values if not isinstance(value, str)]
    if claim.statistic != "mean" or not len(numbers) == found.n > 1:
        return ""
    limits = interval(numbers)
    return f"{limits['low']:.4g} to {limits['high']:.4g}"


def _seeds(table: pd.DataFrame | None) -> list[int]:
    return [] if table is None or "seed" not in table else sorted({int(seed) for seed in table["seed"].dropna()})


def figure_of(evidence: str | None, study: str, figures: set[str]) -> str | None:
    """The figure of the study that shows the evidence best: called like the table (``entropy_moments`` of
    ``moments.csv``), else like the study, else one that reads the table, else any."""
    if evidence is None:
        return None
    stem = PurePosixPath(evidence).stem
    near = [name for name in INPUTS if name in figures and any(t.startswith(f"{study}/") for t in INPUTS[name])]
    called = [name for name in near if name.endswith(f"_{stem}")]
    reading = [name for name in near if evidence in INPUTS[name]]
    return next(iter([*called, *(name for name in near if name == study), *reading, *near]), None)
