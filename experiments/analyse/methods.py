"""The methods comparison: validation perplexity against bytes sent, and ranks over time (paper, main comparison).

Time to a fixed validation loss is given over networks of several bandwidths: measured work, modelled network. Of every
step the compute time (the uncompressed runs' step without their communication), compression and decompression were
measured; the time on the network is ``bytes / bandwidth`` of the slowest stage, with no latency and nothing hidden
behind backward. The target is what the uncompressed run of the same seed reaches after ``SHARE`` of its iterations. A
run that never reaches it has no time, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from experiments.analyse.acting import decision_columns
from experiments.analyse.runs import Run
from experiments.analyse.statistics import quartiles
from experiments.analyse.tables import IDENTITY, identity, method_columns, result, summarise, uncompressed_losses

RESULTS = ("table.csv", "summary.csv", "time_to_target.csv", "timings.csv")
DETAILS = ("curves.csv",)
SUMMARISED = ("validation_perplexity", "validation_loss", "gap_nats", "bytes_ratio", "bytes_ratio_bf16", "mean_rank")
SETTINGS = ("factor_dtype", "one_sided", "bits", "rounding", "density")  # empty where a method has none
SHARE = 0.9
MEGABITS = (10.0, 100.0, 1000.0, 10000.0)
KIND = "modelled network"
TIMES = [*IDENTITY, "kind", "megabits", "target_loss", "iterations", "seconds", "of_uncompressed"]


def tables(runs: list[Run]) -> dict[str, Any]:
    """``table`` (a row per run), ``summary`` (per variant), ``timings`` and ``time_to_target``: what all studies that
    compare runs have in common."""
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
        "time_to_target": times_to_target(runs),
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


def times_to_target(runs: Sequence[Run]) -> pd.DataFrame:
    """A row per finished run and bandwidth: ``seconds`` and ``of_uncompressed``, the ratio to the same seed's."""
    bases = {run.seed: run for run in runs if run.plain and run.ok}
    rows = (row for run in runs if run.seed in bases and run.ok for row in _times(run, bases[run.seed]))
    return pd.DataFrame(rows, columns=TIMES)


def _times(run: Run, base: Run) -> Iterator[dict[str, Any]]:
    if run.stages.empty:
        return
    compute = compute_seconds(base)
    target = loss_at(base, SHARE * float(base.evaluations["iteration"].max()))
    iterations = reached(run, target)
    for megabits in MEGABITS:
        duration = seconds(run, compute, iterations, megabits)
        dense = seconds(base, compute, reached(base, target), megabits)
        row = {"kind": KIND, "megabits": megabits, "target_loss": target, "iterations": iterations}
        yield identity(run) | row | {"seconds": duration, "of_uncompressed": duration / dense}


def compute_seconds(run: Run) -> float:
    """Median seconds of an uncompressed step without the reduction of its slowest stage."""
    slowest = run.stages.groupby("iteration")["seconds_communicate"].max()
    return float((run.steps.set_index("iteration")["seconds"] - slowest).median())


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


def seconds(run: Run, compute: float, iterations: float, megabits: float) -> float:
    """Seconds of the first ``iterations`` steps; the last one in part."""
    if not math.isfinite(iterations):
        return math.nan
    stages = run.stages
    stage = work_seconds(stages) + stages["bytes"] * 8 / (megabits * 1e6)
    steps = compute + stage.groupby(stages["iteration"]).max()
    whole = int(iterations)
    return float(steps[steps.index <= whole].sum() + (iterations - whole) * float(steps.get(whole + 1, 0.0)))


def work_seconds(stages: pd.DataFrame) -> pd.Series:
    """Seconds of compression and decompression, by step and stage; none where nothing was compressed."""
    return stages["seconds_compress"].fillna(0) + stages["seconds_decompress"].fillna(0)
