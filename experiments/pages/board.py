"""The methods board: every variant of every comparison of methods that is kept, in one table and one plot.

A row comes from ``summary.csv`` of a study, or from ``best.csv`` of a tuning budget, and a study joins by its analysis
(``ANALYSES``): a new method, variant or study needs nothing here. The page holds the rows as one JSON list, from which
its plot and switches work. The fields of a row:

==============  =====================================================================================================
``study``       name of the study; methods of one study share model, data and length, those of two do not
``setting``     the study's title
``scale``       of the runs, e.g. ``ci``
``variant``     name of the variant in its study
``label``       what the variant is called where people read it
``family``      key of ``FAMILIES``, by the compressor's file and the policy
``n``           seeds that finished; ``seeds``: seeds in all
``bytes``       gradient bytes sent by a replica over the run, as a share of an fp32 all-reduce; ``bytes_bf16``: of a
                bf16 one, twice as much
``gap``         mean over seeds of the validation loss less that of the uncompressed run of the same seed, nats
``low, high``   its 95 % t interval over seeds; null with one seed
``verdict``     of the test that the gap lies within the margin; empty where none was made
``source``      the table below the scale's folder
``shown``       the numbers above as the table writes them
==============  =====================================================================================================

Numbers that are missing, of a diverged run for one, are null: such a row is in the table and not in the plot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from edgc.config import methods
from experiments.analyse.tables import bf16_ratio
from experiments.pages.kept import Kept

# Analyses that compare methods, and the table of theirs with a row for each variant.
ANALYSES = {
    "methods": "summary.csv",
    "policies": "summary.csv",
    "equal_bytes": "summary.csv",
    "optimus_cc": "summary.csv",
    "moe": "summary.csv",
    "budgets": "best.csv",
}
FAMILIES = {
    "dense": "dense",
    "quantization": "quantization",
    "sparsification": "sparsification",
    "powersgd": "PowerSGD",
    "edgc": "EDGC",
    "given": "given ranks",
    "other": "other",
}
MODULES = {  # files of compressors -> family; a new file in one of these folders joins by itself
    "edgc.compressors.dense": "dense",
    "edgc.compressors.entrywise.quantize": "quantization",
    "edgc.compressors.natural": "quantization",
    "edgc.compressors.quantization": "quantization",
    "edgc.compressors.entrywise": "sparsification",
    "edgc.compressors.powersgd": "powersgd",
    "edgc.control.policies": "edgc",
}
GIVEN = ("fixed", "schedule", "given")  # policies that follow nothing


@dataclass(frozen=True)
class BoardRow:
    """A variant of a study; the fields are explained above."""

    study: str
    setting: str
    scale: str
    variant: str
    label: str
    family: str
    n: int
    seeds: int
    bytes: float | None
    bytes_bf16: float | None
    gap: float | None
    low: float | None
    high: float | None
    verdict: str
    source: str

    @property
    def shown(self) -> dict[str, str]:
        """The numbers as text."""
        return {
            "n": str(self.n) if self.n == self.seeds else f"{self.n} of {self.seeds}",
            "bytes": percent(self.bytes),
            "bytes_bf16": percent(self.bytes_bf16),
            "gap": nats(self.gap),
            "interval": f"{nats(self.low)} to {nats(self.high)}" if self.low is not None else "",
        }

    def record(self) -> dict[str, Any]:
        """The row for the page's JSON."""
        return asdict(self) | {"shown": self.shown}


def percent(share: float | None) -> str:
    """A share in percent, three digits."""
    return "" if share is None else f"{100 * share:.3g} %"


def nats(value: float | None) -> str:
    """A signed difference, four decimals, which is a twentieth of the margin of equality."""
    return "" if value is None else f"{value:+.4f}" if value else "0"


def family_of(method: str, policy: str) -> str:
    """The family of a method by its name in the settings (``compression.method``) and its policy."""
    if method == "edgc" and policy in GIVEN:
        return "given"
    for kind in methods():
        if kind.method == method:
            known = [name for name in MODULES if f"{kind.__module__}.".startswith(f"{name}.")]
            return MODULES[max(known, key=len)] if known else "other"
    return "other"


def rows(kept: Kept) -> Iterator[BoardRow]:
    """All rows, study by study, in the order of the tables."""
    for name, study in kept.studies.items():
        file = ANALYSES.get(study.analysis or "")
        table = kept.table(f"{name}/{file}") if file else None
        if table is None:
            continue
        for line in _with_methods(kept, name, table).to_dict("records"):
            yield _row(kept, name, study.title, f"{name}/{file}", line)


def missing(kept: Kept) -> list[str]:
    """Comparisons of methods that have results here, but not the table of which the board's rows come."""
    studies = {name: ANALYSES[study.analysis] for name, study in kept.studies.items() if study.analysis in ANALYSES}
    return [f"{name}/{file}" for name, file in studies.items() if not (kept.root / name / file).is_file()]


def _with_methods(kept: Kept, study: str, table: pd.DataFrame) -> pd.DataFrame:
    """``table`` with the columns ``method`` and ``policy``, those that it lacks from the table of runs."""
    runs = kept.table(f"{study}/table.csv")
    lacking = [name for name in ("method", "policy") if name not in table]
    if runs is None or not lacking or "variant" not in runs:
        return table
    there = [name for name in lacking if name in runs]
    return table.merge(runs.drop_duplicates("variant")[["variant", *there]], on="variant", how="left")


def _row(kept: Kept, study: str, setting: str, source: str, line: dict[str, Any]) -> BoardRow:
    best = "above_best_nats" in line  # of a tuning budget: the best trial
    share = number(line.get("bytes_ratio" if best else "bytes_ratio_mean"))
    gap, low, high = (
        number(line.get(name))
        for name in (("above_best_nats", "", "") if best else ("gap_nats_mean", "gap_nats_low", "gap_nats_high"))
    )
    method, policy = (text(line.get(name)) for name in ("method", "policy"))
    if method == "none" and gap == 0:  # uncompressed training itself: no difference was estimated
        low = high = None
    seeds = int(number(line.get("n")) or 0)
    finished = number(line.get("n_ok"))
    return BoardRow(
        study=study,
        setting=setting,
        scale=kept.scale,
        variant=text(line.get("variant")),
        label=text(line.get("label")),
        family=family_of(method, policy),
        n=seeds if finished is None else int(finished),
        seeds=seeds,
        bytes=share,
        bytes_bf16=None if share is None else bf16_ratio(share),
        gap=gap,
        low=low,
        high=high,
        verdict=text(line.get("verdict")),
        source=source,
    )


def number(value: object) -> float | None:
    """A finite float, or None."""
    if isinstance(value, str) or value is None:
        return None
    found = float(value)  # type: ignore[arg-type]
    return found if math.isfinite(found) else None


def text(value: object) -> str:
    """A cell as text; an empty one as none."""
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)
