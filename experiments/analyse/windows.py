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
from experiments.analyse.statistics import pearson
from experiments.analyse.tables import ranks_text
from experiments.training.outputs import window_decisions

LEAST_WINDOWS = 3


def trajectory(run: Run, window: int) -> pd.DataFrame:
    """Means per complete window and stage.

    Columns stage, window, iteration (the last one of the window), entropy, entropy_full, rank. Stage -1 is the mean
    over stages, each counting the same.
    """
    columns = ["stage", "window", "iteration", "entropy", "entropy_full", "rank"]
    frame = run.stages
    if frame.empty or window < 1:
        return pd.DataFrame(columns=columns)
    frame = frame.assign(window=(frame["iteration"].astype(int) - 1) // window)
    complete = int(frame["iteration"].max()) // window
    frame = frame[frame["window"] < complete]
    means = frame.groupby(["stage", "window"], as_index=False).agg(
        entropy=("entropy", "mean"), entropy_full=("entropy_full", "mean"), rank=("rank", "last")
    )
    every = means.groupby("window", as_index=False)[["entropy", "entropy_full", "rank"]].mean().assign(stage=-1)
    means = pd.concat([means, every], ignore_index=True)
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
    means, both = trajectory(run, window), ["entropy", "entropy_full"]
    first, overall = means[means["stage"] == 0], means[means["stage"] == -1]
    active = first[first["iteration"] - window + 1 >= first_compressed(run)]
    difference = first["entropy"] - first["entropy_full"]
    pairs = run.stages[run.stages["stage"] == 0].dropna(subset=both)
    single = pairs["entropy"] - pairs["entropy_full"]
    views = {"cc": first, "cc_all_stages": overall, "cc_after_warmup": active}
    found = {name: pearson(frame["entropy"], frame["entropy_full"]) for name, frame in views.items()}
    notes = []
    for name in ("cc", "cc_after_warmup"):
        count = len(views[name].dropna(subset=both))
        if count < LEAST_WINDOWS:
            notes.append(f"{name}: {count} usable windows, {LEAST_WINDOWS} needed")
        elif math.isnan(found[name]):
            notes.append(f"{name}: a trajectory is constant")
    return {
        "windows": len(first.dropna(subset=both)),
        "windows_after_warmup": len(active),
        **found,
        "cc_note": "; ".join(notes),
        "bias_nats": float(difference.mean()),
        "rmse_nats": root_mean_square(difference),
        "samples": len(pairs),
        "sample_cc": pearson(pairs["entropy"], pairs["entropy_full"]),
        "sample_bias_nats": float(single.mean()),
        "sample_rmse_nats": root_mean_square(single),
    }


def root_mean_square(values: pd.Series) -> float:
    x = values.dropna().to_numpy(dtype=float)
    return float(np.sqrt((x**2).mean())) if x.size else math.nan


def active_decisions(run: Run) -> list[list[float]]:
    """Ranks per stage (nan = uncompressed) of every decision of the policy in the active phase, in order."""
    return [[as_float(rank) for rank in event.get("ranks") or []] for event in _of_policy(run)]


def _of_policy(run: Run) -> list[Mapping[str, Any]]:
    """Decisions in the active phase at window ends, with the one at the end of the run; none without a policy."""
    return window_decisions(run.decisions, run.edgc.window) if run.policy is not None else []


def decision_columns(run: Run) -> dict[str, Any]:
    """How often the controller decided and moved, where it went, whether it kept its limits, and whether it acted."""
    active, ranks = _of_policy(run), active_decisions(run)
    first = [row[0] for row in ranks if row]
    outside = 0
    for event, row in zip(active, ranks, strict=True):
        low, high = as_float(event.get("r_min")), as_float(event.get("r_max"))
        outside += any(not (low <= rank <= high) for rank in row if math.isfinite(rank) and math.isfinite(low + high))
    return {
        "decisions": len(active),
        "rank_changes": sum(differ(a, b) for a, b in itertools.pairwise(ranks)),
        "decisions_outside_limits": outside,
        "r_min": as_float(active[-1].get("r_min")) if active else math.nan,
        "r_max": as_float(active[-1].get("r_max")) if active else math.nan,
        **acting(run),
        **pursuit(run, active, first),
        "ranks_stage0": ">".join(ranks_text([rank]) for rank in first),
    }


def pursuit(run: Run, active: Sequence[Mapping[str, Any]], ranks: list[float]) -> dict[str, float]:
    """How stage 0's rank keeps up with the policy.

    ``share_limited``: of the decisions that asked for a rank, those whose rank (within r_min and r_max) was more than
    the step limit away. ``lag_ranks``: the mean distance of the rank that was in use in a window from the rank that the
    policy derives from that window, which is known only at its end.
    """
    far = []
    for event, used in zip(active[1:], ranks, strict=False):
        target, low, high = (as_float(event.get(key)) for key in ("target", "r_min", "r_max"))
        if math.isfinite(target + low + high + used):
            far.append(abs(min(max(target, low), high) - used))
    if not far:
        return {"share_limited": math.nan, "lag_ranks": math.nan}
    limit = float(run.setting("step_limit", 8))
    return {"share_limited": float(np.mean(np.array(far) > limit)), "lag_ranks": float(np.mean(far))}


def warm_up_ends(run: Run, tolerances: Sequence[float]) -> list[dict[str, Any]]:
    """The iteration at which warm-up would have ended under each stability tolerance; nan: never in this run.

    Judged by the run's own window means of stage 0. After the run's own warm-up they are of compressed training.
    """
    settings = run.edgc
    assert isinstance(settings, PolicyConfig)
    means = trajectory(run, settings.window)
    first = means[means["stage"] == 0]
    rows = []
    for tolerance in tolerances:
        config, ended, previous = replace(settings, stability_tolerance=tolerance), math.nan, None
        for at, value in zip(first["iteration"], first["entropy"], strict=True):
            entropy = float(value) if math.isfinite(value) else None
            if config.warm_up_ends(run.iterations, int(at), previous, entropy, measuring=False)[0]:
                ended = float(at)
                break
            previous = entropy
        rows.append({"tolerance_nats": tolerance, "warm_up_ends": ended})
    return rows


def differ(a: list[float], b: list[float]) -> bool:
    """Whether two decisions give any stage another rank (uncompressed counts as a rank of its own)."""
    one, other = ([-1.0 if math.isnan(rank) else rank for rank in row] for row in (a, b))
    return one != other
