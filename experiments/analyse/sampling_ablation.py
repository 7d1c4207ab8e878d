"""Sampling rates alpha (iterations) and beta (entries): fidelity, decisions and cost of the estimate (paper, GDS)."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from edgc.config import EDGCConfig
from experiments.analyse import correlation, sampling_grid
from experiments.analyse.runs import Run
from experiments.analyse.tables import identity, result, summarise
from experiments.analyse.windows import decision_columns, differ, fidelity, policy_decisions, ranks

RESULTS = ("table.csv", "summary.csv", "timings.csv", "timings_summary.csv", "grid.csv", "sampling_error.csv",
           "correlation_summary.csv")  # fmt: skip
DETAILS = ("grid_timings.csv", "curves.csv")
SUMMARISED = ("cc", "cc_after_warmup", "bias_nats", "rmse_nats", "sample_bias_nats", "sample_rmse_nats",
              "decisions_differing", "validation_loss")  # fmt: skip
TIMED = ("seconds_entropy_mean", "seconds_step_mean", "share_of_step", "change_percent")
KEYS = ["variant", "label", "alpha", "beta", "sampling", "estimator"]
SKIPPED_STEPS = 5  # first calls allocate


def tables(runs: list[Run]) -> dict[str, Any]:
    """``table`` and ``timings`` (cost of the estimate) per run, ``summary`` and ``timings_summary`` per setting; of
    runs that recorded every rule ``grid``, ``sampling_error`` and ``grid_timings``
    (:mod:`experiments.analyse.sampling_grid`), and ``correlation_summary`` (per rule, over seeds)."""
    runs, gridded = [run for run in runs if run.method == "edgc"], [run for run in runs if len(run.samplings)]
    full = {(run.seed, run.edgc.entropy.estimator): run for run in runs if is_full(run) and run.ok}
    rows, timings = [], []
    for run in runs:
        reference = full.get((run.seed, run.edgc.entropy.estimator))
        about = identity(run) | settings(run)
        decisions = decision_columns(run) | compare(run, reference)
        rows.append(about | fidelity(run, run.edgc.window) | decisions | result(run))
        seconds, base = cost(run), cost(reference)["seconds_entropy_mean"] if reference else math.nan
        change = 100 * (seconds["seconds_entropy_mean"] / base - 1) if base > 0 else math.nan
        timings.append(about | seconds | {"change_percent": change})
    table, rules = pd.DataFrame(rows), controller_of(runs)
    correlations = [row for run in gridded for row in sampling_grid.correlations(run, rules)] if rules else []
    return {
        "table": table,
        "summary": summarise(table, SUMMARISED, KEYS),
        "timings": timings,
        "timings_summary": summarise(pd.DataFrame(timings), TIMED, KEYS),
        "grid": [row for run in gridded for row in sampling_grid.fidelity(run, rules)] if rules else [],
        "sampling_error": [row for run in gridded for row in sampling_grid.errors(run)],
        "correlation_summary": (
            correlation.summary(pd.DataFrame(correlations), sampling_grid.RULE) if correlations else []
        ),
        "grid_timings": [row for run in gridded for row in sampling_grid.cost(run)],
    }


def controller_of(runs: list[Run]) -> EDGCConfig | None:
    """Settings of the controller that decides the ranks in the study: those of the first run that reads everything,
    with the r_max that it found; None if there is no such run."""
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
    return bool(run.edgc.entropy.iteration_rate == run.edgc.entropy.entry_rate == 1)


def compare(run: Run, reference: Run | None) -> dict[str, Any]:
    """Decisions whose ranks differ from those of the run of the same seed that reads everything (alpha = beta = 1).

    A decision that only one of the two runs took counts as differing. Empty without such a run.
    """
    if reference is None:
        return dict.fromkeys(("decisions_differing", "decisions_compared", "largest_rank_difference"), math.nan)
    decided, expected = ([ranks(event) for event in policy_decisions(r)] for r in (run, reference))
    pairs = list(zip(decided, expected, strict=False))
    distances = [abs(a - b) for row, other in pairs for a, b in zip(row, other, strict=False) if math.isfinite(a - b)]
    return {
        "decisions_differing": sum(differ(*pair) for pair in pairs) + abs(len(decided) - len(expected)),
        "decisions_compared": max(len(decided), len(expected)),
        "largest_rank_difference": max(distances, default=math.nan),
    }


def cost(run: Run) -> dict[str, float]:
    """Mean seconds of the estimate per step and its share of the step.

    Stages measure at the same time, so the slowest counts; iterations that the sampler skips count as zero.
    """
    stages, steps = (frame[frame["iteration"] > SKIPPED_STEPS] for frame in (run.stages, run.steps))
    per_step = stages.fillna({"seconds_entropy": 0.0}).groupby("iteration")["seconds_entropy"].max()
    mean, step = float(per_step.mean()), float(steps["seconds"].mean())
    share = mean / step if step > 0 else math.nan
    return {"steps": len(steps), "seconds_entropy_mean": mean, "seconds_step_mean": step, "share_of_step": share}
