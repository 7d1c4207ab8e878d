"""The methods comparison: validation perplexity against bytes sent, and ranks over time (paper, main comparison)."""

from __future__ import annotations

from typing import Any

import pandas as pd

from experiments.analyse import time_to_target
from experiments.analyse.runs import Run
from experiments.analyse.statistics import quartiles
from experiments.analyse.tables import identity, method_columns, result, summarise, uncompressed_losses
from experiments.analyse.windows import decision_columns

RESULTS = ("table.csv", "summary.csv", "time_to_target.csv", "timings.csv")
DETAILS = ("curves.csv",)
SUMMARISED = ("validation_perplexity", "validation_loss", "gap_nats", "bytes_ratio", "bytes_ratio_bf16", "mean_rank")
SETTINGS = ("factor_dtype", "one_sided", "bits", "rounding", "density")  # empty where a method has none


def tables(runs: list[Run]) -> dict[str, Any]:
    """``table`` (a row per run), ``summary`` (per variant), ``timings`` and ``time_to_target``
    (:mod:`experiments.analyse.time_to_target`): what all studies that compare runs have in common."""
    baseline = uncompressed_losses(runs)
    table = pd.DataFrame(
        identity(run)
        | method_columns(run, SETTINGS)
        | decision_columns(run)
        | result(run, baseline)
        | {"error": run.summary.get("error")}
        for run in runs
    )
    return {
        "table": table,
        "summary": summarise(table, SUMMARISED, ["variant", "label", "method", "policy"]),
        "timings": [timing(run) for run in runs],
        "time_to_target": time_to_target.table(runs),
    }


def timing(run: Run) -> dict[str, Any]:
    """Seconds per step of one run: medians and quartiles as measured on this machine."""
    row = identity(run) | {"seconds_total": run.number("seconds_total")}
    row |= {f"seconds_per_step_{name}": value for name, value in quartiles(run.steps["seconds"]).items()}
    row["tokens_per_second_median"] = run.number("tokens_per_second_median")
    for kind in ("compress", "communicate", "decompress", "entropy"):
        row[f"seconds_{kind}_per_step"] = run.number(f"seconds_{kind}_per_step")
    # Here and not in table.csv: some of them are told by the clock.
    return row | {"signatures": "|".join(run.summary.get("signatures", ()))}
