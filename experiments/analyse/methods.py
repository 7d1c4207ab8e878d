"""The methods comparison: validation perplexity against bytes sent, and ranks over time (paper, main comparison)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from experiments.analyse.acting import decision_columns
from experiments.analyse.runs import Run
from experiments.analyse.statistics import quartiles
from experiments.analyse.tables import identity, method_columns, result, summarise, uncompressed_losses

RESULTS = ("table.csv", "summary.csv", "timings.csv")
DETAILS = ("curves.csv",)
SUMMARISED = ("validation_perplexity", "validation_loss", "gap_nats", "bytes_ratio", "bytes_ratio_bf16", "mean_rank")
SETTINGS = ("factor_dtype", "one_sided", "bits", "rounding", "density")  # empty where a method has none


def tables(runs: list[Run]) -> dict[str, Any]:
    """``table`` (a row per run), ``summary`` (per variant) and ``timings``, which all comparisons of runs have."""
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


def loss_at(run: Run, iteration: float) -> float:
    """Validation loss at an iteration, linear between evaluations."""
    points = run.evaluations.dropna()
    return float(np.interp(iteration, points["iteration"], points["loss"]))


def reached(run: Run, target: float) -> float:
    """Iteration at which the validation loss first was at most ``target``, linear between evaluations; nan if never."""
    points = run.evaluations.dropna().sort_values("iteration")[["iteration", "loss"]].to_numpy()
    places = np.flatnonzero(points[:, 1] <= target)
    if not places.size:
        return math.nan
    if places[0] == 0:
        return float(points[0, 0])
    (x0, y0), (x1, y1) = points[places[0] - 1], points[places[0]]
    return float(x0 + (y0 - target) / (y0 - y1) * (x1 - x0))
