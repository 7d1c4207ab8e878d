"""Rows of the report's first table: one claim of the paper each, our value, the verdict and what stands behind it.

Texts of a row are those of ``claims.csv``, numbers to three digits; ``interval`` is the 95 % t interval over seeds
where our value is a mean of seeds, or rests on one. ``n`` are seeds, ``3 to 10`` where settings have different numbers
of them. ``studies`` are those whose tables ``evidence`` names.
"""

import contextlib
import math
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from experiments.common.acting import NOT_TESTED
from experiments.common.equivalence import interval
from experiments.common.figures import INPUTS
from experiments.pages.board import text
from experiments.pages.kept import Kept
from experiments.verdicts.claim_measures import MEASURES
from experiments.verdicts.claims import DEPENDS, NOT_SUPPORTED, NOT_TESTABLE, PARTLY, SUPPORTED, Claim, load_claims
from experiments.verdicts.measured import COUNTS, Measured, Missing

VERDICTS = (SUPPORTED, PARTLY, NOT_SUPPORTED, DEPENDS, NOT_TESTED, NOT_TESTABLE)
DECIMALS = re.compile(r"\d+\.\d{2,}")
SINGULAR = {"entropies": "entropy"}


def rows(kept: Kept, figures: Iterable[str]) -> list[dict[str, Any]] | None:
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


def _row(kept: Kept, line: dict[str, Any], claim: Claim | None, figures: set[str]) -> dict[str, Any]:
    cells = {key: text(value) for key, value in line.items()}
    paths = [path for key in ("evidence", "beside") for path in cells.get(key, "").split("; ") if path]
    # ``methods/table.csv`` of ``results/ci/methods/table.csv``
    tables = {path.partition(f"/{kept.scale}/")[2]: path for path in paths if f"/{kept.scale}/" in path}
    evidence = next(iter(tables), None)
    study = evidence.partition("/")[0] if evidence else claim.study if claim else ""
    frames = [frame for name in tables if (frame := kept.table(name)) is not None and "seed" in frame]
    ends = [int(float(n)) for name in ("n", "n_most") if (n := cells.get(name))]
    return {name: cells[name] for name in ("id", "claim", "verdict", "unit", "kind", "note")} | {
        "paper": _with_unit(cells["paper_value"], cells["unit"]),
        "ours": rounded(_with_unit(cells["our_value"], cells["unit"])),
        "interval": rounded(interval_of(kept.root, claim, line["our_value"])) if claim else "",
        "n": " to ".join(str(n) for n in ends if n),
        "counts": ", ".join(counted(int(float(n)), name) for name in COUNTS if (n := cells.get(name)) and float(n)),
        "studies": list(dict.fromkeys([name.partition("/")[0] for name in tables] or [study] * bool(study))),
        "seeds": sorted({int(seed) for frame in frames for seed in frame["seed"].dropna()}),
        "evidence": [
            kept.link(kept.root / name, path) for name, path in tables.items() if (kept.root / name).is_file()
        ],
        "figure": figure_of(evidence, study, figures),
    }


def rounded(words: str) -> str:
    """The text with its decimals cut down to three significant digits."""
    return DECIMALS.sub(lambda match: f"{float(match[0]):.3g}", words)


def counted(count: int, plural: str) -> str:
    """``1 run``, ``6 runs``."""
    return f"{count} {plural if count != 1 else SINGULAR.get(plural, plural.removesuffix('s'))}"


def _with_unit(words: str, unit: str) -> str:
    """Numbers with a percent sign where they are percents, with ``times`` where they are ratios; other units stand in
    the row's details."""
    number = words.removeprefix("-")[:1].isdigit()
    if number and "." in words and " " not in words:
        words = words.rstrip("0").rstrip(".")
    sign = "%" if unit.startswith("%") else "times" if unit.startswith("ratio") else ""
    return f"{words} {sign}" if sign and number else words


def interval_of(root: Path, claim: Claim, written: object) -> str:
    """The interval of a claim's value, as the tables give it now; empty where these are not the ones judged, or where
    a single seed or a simulation has none."""
    try:
        measured = MEASURES[claim.measure](root)
    except (Missing, KeyError):  # KeyError: a table of an earlier version lacks a column
        return ""
    value, same = claim.combine(measured.values, measured.things), False
    with contextlib.suppress(ValueError):  # of words
        same = math.isclose(float(value), float(str(written)), rel_tol=1e-5, abs_tol=1e-12)
    return _interval(claim, measured) if same or value == written else ""


def _interval(claim: Claim, measured: Measured) -> str:
    if measured.gap is not None and all(map(math.isfinite, measured.gap)):
        mean, low, high = measured.gap
        which = "most: " if claim.statistic == "each" and len(measured.values) > 1 else ""
        return f"{which}{mean:+.4f} nats, {low:+.4f} to {high:+.4f}"
    numbers = [value for value in measured.values if not isinstance(value, str)]
    if claim.statistic != "mean" or not len(numbers) == measured.n > 1:
        return ""
    limits = interval(numbers)
    return f"{limits['low']:.4g} to {limits['high']:.4g}"


def figure_of(evidence: str | None, study: str, figures: set[str]) -> str | None:
    """The figure of the study that shows the evidence best: called like the table (``entropy_moments`` of
    ``moments.csv``), else like the study, else one that reads the table, else any."""
    if evidence is None:
        return None
    near = [name for name in INPUTS if name in figures and any(t.startswith(f"{study}/") for t in INPUTS[name])]
    ending = f"_{PurePosixPath(evidence).stem}"
    best = (lambda name: name.endswith(ending), lambda name: name == study, lambda name: evidence in INPUTS[name])
    return min(near, key=lambda name: [not fits(name) for fits in best], default=None)
