"""The methods board: every variant of every comparison of methods that is kept, in one table and one plot.

A row comes from ``summary.csv`` of a study, or from ``best.csv`` of a tuning budget, and a study joins by its analysis
(``ANALYSES``): a new method, variant or study needs nothing here. The page holds the rows as one JSON list, from which
its plot and switches work. Numbers that are missing, of a diverged run for one, are null: such a row is in the table,
not in the plot.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edgc.config import methods
from experiments.analyse.tables import bf16_ratio
from experiments.pages.kept import Kept

# Analyses that compare methods, and the table of theirs with a row for each variant.
ANALYSES = dict.fromkeys(("methods", "policies", "equal_bytes", "optimus_cc", "moe"), "summary.csv")
ANALYSES["budgets"] = "best.csv"
FAMILIES = {
    "dense": "dense",
    "quantization": "quantization",
    "sparsification": "sparsification",
    "powersgd": "PowerSGD",
    "edgc": "EDGC",
    "given": "given ranks",
    "other": "other",
}
MODULES = {  # beginning of a compressor's module -> family, the first that fits; a new file joins by itself
    "edgc.compressors.dense": "dense",
    "edgc.compressors.entrywise.sparse": "sparsification",
    "edgc.compressors.powersgd": "powersgd",
    "edgc.compressors": "quantization",
    "edgc.control": "edgc",
}
GIVEN = ("fixed", "schedule", "given")  # policies that follow nothing


def family_of(method: str, policy: str) -> str:
    """The family of a method by its name in the settings (``compression.method``) and its policy."""
    if method == "edgc" and policy in GIVEN:
        return "given"
    module = next((kind.__module__ for kind in methods() if kind.method == method), "")
    return next((family for start, family in MODULES.items() if module.startswith(start)), "other")


@dataclass(frozen=True)
class Row:
    """A variant of a study, as the board shows it."""

    study: str  # methods of one study share model, data and length, those of two do not
    setting: str  # the study's title
    scale: str
    source: str  # the table below the scale's folder
    variant: str
    label: str  # what the variant is called where people read it
    family: str  # key of ``FAMILIES``
    n: int  # seeds that finished
    seeds: int
    bytes: float | None  # gradient bytes sent by a replica over the run, as a share of an fp32 all-reduce
    bytes_bf16: float | None  # of a bf16 one, twice as much
    gap: float | None  # mean over seeds of the validation loss less that of the uncompressed run of the seed, nats
    low: float | None  # of its 95 % t interval over seeds; None with one seed
    high: float | None
    verdict: str  # of the test that the gap lies within the margin; empty where none was made


def rows(kept: Kept) -> Iterator[Row]:
    """Rows, study by study, in the order of the tables."""
    for name, study in kept.studies.items():
        source = f"{name}/{ANALYSES.get(study.analysis or '', '')}"
        table, runs = kept.table(source), kept.table(f"{name}/table.csv")
        if study.analysis not in ANALYSES or table is None:
            continue
        if runs is not None and "variant" in runs:  # which may know method and policy where the summary does not
            lacking = [column for column in ("method", "policy") if column not in table and column in runs]
            table = table.merge(runs.drop_duplicates("variant")[["variant", *lacking]], on="variant", how="left")
        for line in table.to_dict("records"):
            yield _row((name, study.title, kept.scale, source), line)


def _row(place: tuple[str, str, str, str], line: dict[str, Any]) -> Row:
    best = "above_best_nats" in line  # of a tuning budget: the best trial
    columns = ("bytes_ratio", "above_best_nats", "", "") if best else (
        "bytes_ratio_mean", "gap_nats_mean", "gap_nats_low", "gap_nats_high")  # fmt: skip
    share, gap, low, high = (number(line.get(name)) for name in columns)
    variant, label, verdict, method, policy = (
        text(line.get(name)) for name in ("variant", "label", "verdict", "method", "policy")
    )
    if method == "none" and gap == 0:  # uncompressed training itself: no difference was estimated
        low = high = None
    seeds, finished = int(number(line.get("n")) or 0), number(line.get("n_ok"))
    n, bf16 = seeds if finished is None else int(finished), None if share is None else bf16_ratio(share)
    return Row(*place, variant, label, family_of(method, policy), n, seeds, share, bf16, gap, low, high, verdict)


def percent(share: float | None) -> str:
    """A share in percent, three digits."""
    return "" if share is None else f"{100 * share:.3g} %"


def nats(value: float | None) -> str:
    """A signed difference, four decimals, which is a twentieth of the margin of equality."""
    return "" if value is None else f"{value:+.4f}" if value else "0"


def number(value: object) -> float | None:
    """A finite float, or None."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def text(value: object) -> str:
    """A cell as text; an empty one as none."""
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)
