"""Window length w and step limit s: agreement of sampled and full entropy (CC), ranks, delay, perplexity (paper, window
study), and when warm-up ends.

CC is taken as the Pearson correlation, over windows of w iterations, between the mean of the sampled entropies and the
mean of the entropies of all entries at every iteration. The first iterations carry a steep drop that any estimator
follows, so CC is given twice: over the whole run, and over the windows after warm-up only.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pandas as pd

from edgc.control.settings import PolicyConfig
from experiments.analyse import correlation
from experiments.analyse.acting import decision_columns
from experiments.analyse.runs import Run
from experiments.analyse.statistics import pearson, root_mean_square
from experiments.analyse.tables import identity, result, summarise, together, with_identity

RESULTS = ("table.csv", "summary.csv", "warm_up.csv", "correlation.csv", "correlation_summary.csv")
DETAILS = ("trajectories.csv", "curves.csv")
TOLERANCES = (0.02, 0.05, 0.1, 0.2, 0.5)  # nats, of the rule that ends warm-up
SUMMARISED = ("cc", "cc_all_stages", "cc_after_warmup", "bias_nats", "rmse_nats", "decisions", "rank_changes",
              "share_limited", "lag_ranks",
              "validation_perplexity", "validation_loss", "bytes_ratio", "bytes_ratio_bf16")  # fmt: skip
LEAST_WINDOWS = 3
ENTROPIES = ["entropy", "entropy_full"]


def tables(runs: list[Run]) -> dict[str, Any]:
    """``table`` (per run), ``summary`` (per variant), ``trajectories`` (per window), ``warm_up`` (when it would end
    under other tolerances), and of one run per seed ``correlation`` (CC by the number of samples,
    :mod:`experiments.analyse.correlation`) with ``correlation_summary`` (over seeds)."""
    table = pd.DataFrame(
        identity(run)
        | {"window": run.edgc.window, "step_limit": int(run.setting("step_limit", 8))}
        | fidelity(run)
        | decision_columns(run)
        | result(run)
        for run in runs
    )
    correlations = correlation.table(runs)
    return {
        "table": table,
        "summary": summarise(table, SUMMARISED, ["variant", "label", "window", "step_limit"]),
        "warm_up": [identity(run) | {"window": run.edgc.window} | row for run in runs for row in warm_up_ends(run)],
        "trajectories": together([with_identity(run, trajectory(run), length=run.edgc.window) for run in runs]),
        "correlation": correlations,
        "correlation_summary": correlation.summary(correlations),
    }


def trajectory(run: Run) -> pd.DataFrame:
    """Means per complete window and stage.

    Columns stage, window, iteration (the last one of the window), entropy, entropy_full, rank. Stage -1 is the mean
    over stages, each counting the same.
    """
    columns = ["stage", "window", "iteration", *ENTROPIES, "rank"]
    frame, window = run.stages, run.edgc.window
    if frame.empty:
        return pd.DataFrame(columns=columns)
    frame = frame.assign(window=(frame["iteration"].astype(int) - 1) // window)
    frame = frame[frame["window"] < int(frame["iteration"].max()) // window]
    by_stage = frame.groupby(["stage", "window"], as_index=False)
    means = by_stage.agg({"entropy": "mean", "entropy_full": "mean", "rank": "last"})
    overall = means.groupby("window", as_index=False)[[*ENTROPIES, "rank"]].mean().assign(stage=-1)
    means = pd.concat([means, overall], ignore_index=True)
    means["iteration"] = (means["window"] + 1) * window
    return means.astype({"stage": int})[columns].sort_values(["stage", "window"], ignore_index=True)


def fidelity(run: Run) -> dict[str, Any]:
    """CC of stage 0 and of the mean over stages, whole run and after warm-up, with bias and RMSE in nats.

    ``cc_note`` says why a CC is missing. ``sample_*`` compare single measurements at the iterations that were
    sampled, so they show the error from reading a share of the entries alone; window columns add the error
    from the iterations left out.
    """
    means = trajectory(run)
    first = means[means["stage"] == 0]
    active = first[first["iteration"] - run.edgc.window + 1 >= run.first_compressed]
    views = {"cc": first, "cc_all_stages": means[means["stage"] == -1], "cc_after_warmup": active}
    correlations = {name: pearson(frame["entropy"], frame["entropy_full"]) for name, frame in views.items()}
    notes = []
    for name in ("cc", "cc_after_warmup"):
        count = len(views[name].dropna(subset=ENTROPIES))
        if count < LEAST_WINDOWS:
            notes.append(f"{name}: {count} usable windows, {LEAST_WINDOWS} needed")
        elif math.isnan(correlations[name]):
            notes.append(f"{name}: a trajectory is constant")
    samples = run.stages[run.stages["stage"] == 0].dropna(subset=ENTROPIES)
    by_window, single = (frame["entropy"] - frame["entropy_full"] for frame in (first, samples))
    return {
        "windows": len(first.dropna(subset=ENTROPIES)),
        "windows_after_warmup": len(active),
        **correlations,
        "cc_note": "; ".join(notes),
        "bias_nats": float(by_window.mean()),
        "rmse_nats": root_mean_square(by_window),
        "samples": len(samples),
        "sample_cc": pearson(samples["entropy"], samples["entropy_full"]),
        "sample_bias_nats": float(single.mean()),
        "sample_rmse_nats": root_mean_square(single),
    }


def warm_up_ends(run: Run) -> list[dict[str, Any]]:
    """The iteration at which warm-up would have ended under each of ``TOLERANCES``; nan: never in this run.

    Judged by the run's own window means of stage 0. After the run's own warm-up they are of compressed training.
    """
    settings = run.edgc
    assert isinstance(settings, PolicyConfig)
    first = trajectory(run).query("stage == 0")
    entropies = [float(value) if math.isfinite(value) else None for value in first["entropy"]]
    windows = list(zip(map(int, first["iteration"]), [None, *entropies], entropies, strict=False))
    rows = []
    for tolerance in TOLERANCES:
        config = replace(settings, stability_tolerance=tolerance)
        ends = (
            float(iteration)
            for iteration, previous, entropy in windows
            if config.warm_up_ends(run.iterations, iteration, previous, entropy, measuring=False)[0]
        )
        rows.append({"tolerance_nats": tolerance, "warm_up_ends": next(ends, math.nan)})
    return rows
