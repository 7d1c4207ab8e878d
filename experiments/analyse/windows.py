"""Windowed entropy trajectories: sampled estimate against all entries, and the correlation CC between them.

CC (paper, window study) is taken as the Pearson correlation, over windows of w iterations, between the mean
of the sampled entropies and the mean of the entropies of all entries at every iteration. The first iterations
carry a steep drop that any estimator follows, so CC is given twice: over the whole run, and over the windows
after warm-up only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from edgc.control.settings import PolicyConfig
from experiments.analyse.acting import acting
from experiments.analyse.runs import Run, as_float
from experiments.analyse.statistics import pearson, root_mean_square
from experiments.analyse.tables import ranks_text
from experiments.training.outputs import window_decisions

LEAST_WINDOWS = 3
ENTROPIES = ["entropy", "entropy_full"]


def trajectory(run: Run, window: int) -> pd.DataFrame:
    """Means per complete window and stage.

    Columns stage, window, iteration (the last one of the window), entropy, entropy_full, rank. Stage -1 is the mean
    over stages, each counting the same.
    """
    columns = ["stage", "window", "iteration", *ENTROPIES, "rank"]
    frame = run.stages
    if frame.empty or window < 1:
        return pd.DataFrame(columns=columns)
    frame = frame.assign(window=(frame["iteration"].astype(int) - 1) // window)
    frame = frame[frame["window"] < int(frame["iteration"].max()) // window]
    by_stage = frame.groupby(["stage", "window"], as_index=False)
    means = by_stage.agg({"entropy": "mean", "entropy_full": "mean", "rank": "last"})
    overall = means.groupby("window", as_index=False)[[*ENTROPIES, "rank"]].mean().assign(stage=-1)
    means = pd.concat([means, overall], ignore_index=True)
    means["iteration"] = (means["window"] + 1) * window
    return means.astype({"stage": int})[columns].sort_values(["stage", "window"], ignore_index=True)


def first_compressed(run: Run) -> float:
    """First iteration that sent any stage compressed; nan when none did."""
    return float(run.stages.loc[run.stages["rank"].notna(), "iteration"].min())


def fidelity(run: Run, window: int) -> dict[str, Any]:
    """CC of stage 0 and of the mean over stages, whole run and after warm-up, with bias and RMSE in nats.

    ``cc_note`` says why a CC is missing. ``sample_*`` compare single measurements at the iterations that were
    sampled, so they show the error from reading a share of the entries alone; window columns add the error
    from the iterations left out.
    """
    means = trajectory(run, window)
    first = means[means["stage"] == 0]
    active = first[first["iteration"] - window + 1 >= first_compressed(run)]
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


def policy_decisions(run: Run) -> list[Mapping[str, Any]]:
    """Decisions in the active phase at window ends, with the one at the end of the run; none without a policy."""
    return window_decisions(run.decisions, run.edgc.window) if run.policy is not None else []


def ranks(event: Mapping[str, Any]) -> list[float]:
    """Ranks of a decision by stage; nan: uncompressed."""
    return [as_float(rank) for rank in event.get("ranks") or []]


def differ(a: Sequence[float], b: Sequence[float]) -> bool:
    """True if two decisions give any stage another rank (uncompressed counts as a rank of its own)."""
    return list(map(str, a)) != list(map(str, b))


def decision_columns(run: Run) -> dict[str, Any]:
    """How often the controller decided and moved, where it went, whether it kept its limits, and whether it acted."""
    decisions = policy_decisions(run)
    rows = [ranks(event) for event in decisions]
    limits = [(as_float(event.get("r_min")), as_float(event.get("r_max"))) for event in decisions]
    first = [row[0] for row in rows if row]
    return {
        "decisions": len(decisions),
        "rank_changes": sum(differ(a, b) for a, b in itertools.pairwise(rows)),
        "decisions_outside_limits": sum(
            any(rank < low or rank > high for rank in row) and math.isfinite(low + high)
            for row, (low, high) in zip(rows, limits, strict=True)
        ),
        "r_min": limits[-1][0] if limits else math.nan,
        "r_max": limits[-1][1] if limits else math.nan,
        **acting(run),
        **_pursuit(run, decisions, first),
        "ranks_stage0": ">".join(ranks_text([rank]) for rank in first),
    }


def _pursuit(run: Run, decisions: Sequence[Mapping[str, Any]], used: Sequence[float]) -> dict[str, float]:
    """How stage 0's rank keeps up with the policy.

    ``share_limited``: of the decisions that asked for a rank, those whose rank (within r_min and r_max) was more than
    the step limit away. ``lag_ranks``: the mean distance of the rank that was in use in a window from the rank that the
    policy derives from that window, which is known only at its end.
    """
    distances = []
    for event, rank in zip(decisions[1:], used, strict=False):
        target, low, high = (as_float(event.get(key)) for key in ("target", "r_min", "r_max"))
        if math.isfinite(target + low + high + rank):
            distances.append(abs(min(max(target, low), high) - rank))
    if not distances:
        return {"share_limited": math.nan, "lag_ranks": math.nan}
    limited = np.array(distances) > float(run.setting("step_limit", 8))
    return {"share_limited": float(np.mean(limited)), "lag_ranks": float(np.mean(distances))}


def warm_up_ends(run: Run, tolerances: Sequence[float]) -> list[dict[str, Any]]:
    """The iteration at which warm-up would have ended under each stability tolerance; nan: never in this run.

    Judged by the run's own window means of stage 0. After the run's own warm-up they are of compressed training.
    """
    settings = run.edgc
    assert isinstance(settings, PolicyConfig)
    means = trajectory(run, settings.window)
    first = means[means["stage"] == 0]
    entropies = [float(value) if math.isfinite(value) else None for value in first["entropy"]]
    windows = list(zip(map(int, first["iteration"]), [None, *entropies], entropies, strict=False))
    rows = []
    for tolerance in tolerances:
        config = replace(settings, stability_tolerance=tolerance)
        ends = (
            float(iteration)
            for iteration, previous, entropy in windows
            if config.warm_up_ends(run.iterations, iteration, previous, entropy, measuring=False)[0]
        )
        rows.append({"tolerance_nats": tolerance, "warm_up_ends": next(ends, math.nan)})
    return rows
