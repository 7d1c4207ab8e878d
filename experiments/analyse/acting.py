"""Decisions of a policy, and whether it acted: of one that did not, a run says nothing.

A policy whose rank stays where it was trains exactly as a fixed rank does, and comparing the two compares nothing. So
a verdict on a policy counts only where it acted: in at least two thirds of the seeds at least three ranks were in use,
and in at least 30 % of the windows after warm-up the rank lay strictly inside its limits. Else it is ``not tested``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgc.control.settings import GivenConfig
from experiments.analyse.runs import Run, as_float
from experiments.analyse.tables import ranks_text
from experiments.common.acting import COLUMNS
from experiments.training.outputs import window_decisions

RANKS, INSIDE = 3, 0.3


def acting(run: Run) -> dict[str, Any]:
    """``ranks_used``, ``windows_inside`` and ``acted`` of one run.

    ``ranks_used``: how many ranks were in use after warm-up, of the stage with the most. ``windows_inside``: the share
    of windows, over all stages, whose rank lay strictly between r_min and r_max. All are empty for a run without a
    policy, and for one that is given its ranks: these do not follow anything.
    """
    if run.policy is None or isinstance(run.edgc, GivenConfig):
        return dict.fromkeys(COLUMNS)
    return judged(window_decisions(run.decisions, run.edgc.window, before=run.iterations))


def judged(windows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The same of decisions at the ends of windows, which have ``ranks``, ``r_min`` and ``r_max``."""
    rows = [ranks(event) for event in windows]
    used = [{rank for rank in stage if math.isfinite(rank)} for stage in zip(*rows, strict=True)]
    inside = [
        as_float(event.get("r_min")) < rank < as_float(event.get("r_max"))
        for event, row in zip(windows, rows, strict=True)
        for rank in row
    ]
    most, share = max(map(len, used), default=0), sum(inside) / len(inside) if inside else 0.0
    return {"ranks_used": most, "windows_inside": share, "acted": most >= RANKS and share >= INSIDE}


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
    """Counts of decisions and moves of the controller, where it went, and whether it kept its limits and acted."""
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
    """Columns of how stage 0's rank keeps up with the policy.

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
