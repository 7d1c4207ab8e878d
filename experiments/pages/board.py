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

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

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


def family_of(method: str, policy: str) -> str:
    """The family of a method by its name in the settings (``compression.method``) and its policy."""
    if method == "edgc" and policy in GIVEN:
        return "given"
    module = next((kind.__module__ for kind in methods() if kind.method == method), "")
    known = [name for name in MODULES if f"{module}.".startswith(f"{name}.")]
    return MODULES[max(known, key=len)] if known else "other"


def _sources(kept: Kept) -> dict[str, str]:
    """The table of each study that compares methods."""
    return {name: ANALYSES[study.analysis] for name, study in kept.studies.items() if study.analysis in ANALYSES}


def rows(kept: Kept) -> Iterator[dict[str, Any]]:
    """Rows, study by study, in the order of the tables."""
    for name, file in _sources(kept).items():
        table = kept.table(f"{name}/{file}")
        if table is None:
            continue
        given = {"study": name, "setting": kept.studies[name].title, "scale": kept.scale, "source": f"{name}/{file}"}
        for line in _with_methods(kept, name, table).to_dict("records"):
            yield _row(given, line)


def missing(kept: Kept) -> list[str]:
    """Comparisons of methods that have results here, but not the table of which the board's rows come."""
    return [f"{name}/{file}" for name, file in _sources(kept).items() if not (kept.root / name / file).is_file()]


def _with_methods(kept: Kept, study: str, table: pd.DataFrame) -> pd.DataFrame:
    """``table`` with the columns ``method`` and ``policy``, those that it lacks from the table of runs."""
    runs = kept.table(f"{study}/table.csv")
    if runs is None or "variant" not in runs:
        return table
    lacking = [name for name in ("method", "policy") if name not in table and name in runs]
    return table.merge(runs.drop_duplicates("variant")[["variant", *lacking]], on="variant", how="left")


def _row(given: dict[str, str], line: dict[str, Any]) -> dict[str, Any]:
    best = "above_best_nats" in line  # of a tuning budget: the best trial
    columns = ("bytes_ratio", "above_best_nats", "", "") if best else (
        "bytes_ratio_mean", "gap_nats_mean", "gap_nats_low", "gap_nats_high")  # fmt: skip
    share, gap, low, high = (number(line.get(name)) for name in columns)
    method, policy = (text(line.get(name)) for name in ("method", "policy"))
    if method == "none" and gap == 0:  # uncompressed training itself: no difference was estimated
        low = high = None
    seeds = int(number(line.get("n")) or 0)
    finished = number(line.get("n_ok"))
    n = seeds if finished is None else int(finished)
    row: dict[str, Any] = given | {name: text(line.get(name)) for name in ("variant", "label", "verdict")}
    bf16 = None if share is None else bf16_ratio(share)
    row |= {"family": family_of(method, policy), "n": n, "seeds": seeds, "bytes": share, "bytes_bf16": bf16}
    shown = {
        "n": str(n) if n == seeds else f"{n} of {seeds}",
        "bytes": percent(share),
        "bytes_bf16": percent(bf16),
        "gap": nats(gap),
        "interval": f"{nats(low)} to {nats(high)}" if low is not None else "",
    }
    return row | {"gap": gap, "low": low, "high": high, "shown": shown}


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
