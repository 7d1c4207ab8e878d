"""Sampling rates alpha (iterations) and beta (entries): fidelity, decisions and cost of the estimate (paper, GDS)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd

from edgc.config import EDGCConfig
from experiments.analyse import correlation, methods, sampling_grid
from experiments.analyse.runs import Run
from experiments.analyse.tables import identity, result, summarise, write_tables
from experiments.analyse.windows import active_decisions, decision_columns, differ, fidelity

RESULTS = ("table.csv", "summary.csv", "timings.csv", "timings_summary.csv", "grid.csv", "sampling_error.csv",
           "correlation_summary.csv")  # fmt: skip
DETAILS = ("grid_timings.csv", "curves.csv")
SUMMARISED = ("cc", "cc_after_warmup", "bias_nats", "rmse_nats", "sample_bias_nats", "sample_rmse_nats",
              "decisions_differing", "validation_loss")  # fmt: skip
TIMED = ("seconds_entropy_mean", "seconds_step_mean", "share_of_step", "change_percent")
KEYS = ["variant", "label", "alpha", "beta", "sampling", "estimator"]
SKIPPED_STEPS = 5  # first calls allocate


def analyse(runs: list[Run], out: Path) -> list[Path]:
    """Write ``table.csv`` and ``timings.csv`` (cost of the estimate) per run, ``summary.csv`` and
    ``timings_summary.csv`` per setting; of runs that recorded every rule ``grid.csv``, ``sampling_error.csv``,
    ``grid_timings.csv`` (:mod:`experiments.analyse.sampling_grid`) and ``correlation_summary.csv`` (per rule, over
    seeds)."""
    curves = methods.curves(runs)
    runs, gridded = [run for run in runs if run.method == "edgc"], [run for run in runs if len(run.samplings)]
    full = {(run.seed, settings(run)["estimator"]): run for run in runs if is_full(run) and run.ok}
    rows = [
        identity(run)
        | settings(run)
        | fidelity(run, run.edgc.window)
        | decision_columns(run)
        | compare(run, full.get((run.seed, settings(run)["estimator"])))
        | result(run)
        for run in runs
    ]
    table = pd.DataFrame(rows)
    timings = [identity(run) | settings(run) | cost(run) for run in runs]
    whole = {key: cost(run)["seconds_entropy_mean"] for key, run in full.items()}
    for row in timings:
        base = whole.get((row["seed"], row["estimator"]), math.nan)
        row["change_percent"] = 100 * (row["seconds_entropy_mean"] / base - 1) if base > 0 else math.nan
    rules = controller_of(runs)
    found = [row for run in gridded for row in sampling_grid.correlations(run, rules)] if rules else []
    tables = {
        "table": table,
        "summary": summarise(table, SUMMARISED, KEYS),
        "timings": timings,
        "timings_summary": summarise(pd.DataFrame(timings), TIMED, KEYS),
        "grid": [row for run in gridded for row in sampling_grid.fidelity(run, rules)] if rules else [],
        "sampling_error": [row for run in gridded for row in sampling_grid.errors(run)],
        "correlation_summary": correlation.summary(pd.DataFrame(found), sampling_grid.RULE) if found else [],
        "grid_timings": [row for run in gridded for row in sampling_grid.cost(run)],
        "curves": curves,
    }
    return write_tables(out, tables)


def controller_of(runs: list[Run]) -> EDGCConfig | None:
    """What decides the ranks in the study: settings of the first run that reads everything, with the r_max that it
    found; None if there is no such run."""
    for run in runs:
        r_max = decision_columns(run)["r_max"]
        if is_full(run) and math.isfinite(r_max):
            changes = {"r_max": int(r_max), "alignment": "off", "cost_gate": False, "remeasure_above": None}
            return EDGCConfig.from_record(run.edgc.to_dict() | changes)
    return None


def settings(run: Run) -> dict[str, Any]:
    """The sampler's settings of a run (paper: alpha 0.1, beta 0.25)."""
    entropy = run.edgc.entropy
    rates = {"alpha": float(entropy.iteration_rate), "beta": float(entropy.entry_rate)}
    return rates | {"sampling": entropy.sampling, "estimator": entropy.estimator}


def is_full(run: Run) -> bool:
    return settings(run)["alpha"] == settings(run)["beta"] == 1


def compare(run: Run, reference: Run | None) -> dict[str, Any]:
    """Decisions whose ranks differ from those of the run of the same seed that reads everything (alpha = beta = 1).

    A decision that only one of the two runs took counts as differing. Empty without such a run.
    """
    if reference is None:
        return {"decisions_differing": math.nan, "decisions_compared": math.nan, "largest_rank_difference": math.nan}
    mine, theirs = active_decisions(run), active_decisions(reference)
    pairs = list(zip(mine, theirs, strict=False))
    far = [abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=False) if math.isfinite(a - b)]
    return {
        "decisions_differing": sum(differ(one, other) for one, other in pairs) + abs(len(mine) - len(theirs)),
        "decisions_compared": max(len(mine), len(theirs)),
        "largest_rank_difference": max(far, default=math.nan),
    }


def cost(run: Run) -> dict[str, float]:
    """Mean seconds of the estimate per step and its share of the step.

    Stages measure at the same time, so the slowest counts; iterations that the sampler skips count as zero.
    """
    stages = run.stages[run.stages["iteration"] > SKIPPED_STEPS]
    steps = run.steps[run.steps["iteration"] > SKIPPED_STEPS]
    per_step = stages.fillna({"seconds_entropy": 0.0}).groupby("iteration")["seconds_entropy"].max()
    mean = float(per_step.mean()) if len(per_step) else math.nan
    step = float(steps["seconds"].mean()) if len(steps) else math.nan
    return {"steps": len(steps), "seconds_entropy_mean": mean, "seconds_step_mean": step,
            "share_of_step": mean / step if step > 0 else math.nan}  # fmt: skip
