"""Whether a policy did anything: of one that did not, a run says nothing.

A policy whose rank stays where it was trains exactly as a fixed rank does, and comparing the two compares nothing. So
a verdict on a policy counts only where it acted: in at least two thirds of the seeds at least three ranks were in use,
and in at least 30 % of the windows after warm-up the rank lay strictly inside its limits. Else it is ``not tested``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from edgc.control.settings import GivenConfig
from experiments.analyse.runs import Run, as_float
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
    return decisions_acting(run.decisions, run.edgc.window, run.iterations)


def decisions_acting(decisions: Iterable[Mapping[str, Any]], window: int, iterations: int) -> dict[str, Any]:
    """The same of the decisions of a run of so many iterations, those inside a window left out."""
    windows = window_decisions(decisions, window, before=iterations)
    rows = [[as_float(rank) for rank in event.get("ranks") or []] for event in windows]
    used = [{rank for rank in stage if math.isfinite(rank)} for stage in zip(*rows, strict=True)]
    inside = [
        as_float(event.get("r_min")) < rank < as_float(event.get("r_max"))
        for event, row in zip(windows, rows, strict=True)
        for rank in row
    ]
    ranks, share = max(map(len, used), default=0), sum(inside) / len(inside) if inside else 0.0
    return {"ranks_used": ranks, "windows_inside": share, "acted": ranks >= RANKS and share >= INSIDE}
