"""Ranks that EDGC would take in a range, from entropies that a run of one fixed rank recorded, before EDGC itself runs.

EDGC's own controller decides, with the settings of that run; it is told the run's entropy of every window. That other
ranks leave other errors behind, and so another entropy, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pandas as pd

from edgc.config import EDGCConfig
from edgc.control.adaptive import make_controller
from edgc.measurement.report import Report
from experiments.analyse.acting import judged
from experiments.analyse.runs import Run
from experiments.analyse.tables import identity
from experiments.spec.settings import layer_matrices

LOWEST, HIGHEST = 8, range(32, 56, 4)  # r_min, and r_max
ACTIVE = "active"


def course(run: Run, r_min: int, r_max: int) -> list[dict[str, Any]]:
    """Decisions at the ends of the windows of a run of one stage, as its log has them, from the end of warm-up on."""
    settings = {**run.compression, "policy": "cqm", "r_min": r_min, "r_max": r_max}
    settings.pop("rank", None)
    config, model = EDGCConfig.from_dict(settings), run.config["model"]
    layer = layer_matrices(model["hidden"], model.get("ffn_hidden"))
    controller = make_controller(config, [list(layer) * int(model["layers"])], run.iterations)
    decided = list[dict[str, Any]]()
    for event in run.decisions:
        end = int(event["iteration"])
        controller.observe(end, Report((float(event["entropy"][0]),)))
        if controller.phase == ACTIVE and end < run.iterations:
            ranks = list(controller.plan(end + 1).ranks)
            decided.append({"iteration": end, "ranks": ranks, "r_min": r_min, "r_max": r_max})
    return decided


def ranges(runs: Iterable[Run], costs: pd.Series) -> list[dict[str, Any]]:
    """A row per run of a fixed rank and range: EDGC's mean rank, what a fixed rank like it costs, whether it would act.

    Args:
        costs: nats that a fixed rank costs against no compression, by rank. Between ranks, and beyond the largest, the
            logarithm is a line.
    """
    rows, cost = [], _cost_of(costs)
    for run in runs:
        for r_max in HIGHEST:
            windows = course(run, LOWEST, r_max)
            mean = float(np.mean([event["ranks"][0] for event in windows])) if windows else math.nan
            about = {"r_min": LOWEST, "r_max": r_max, "mean_rank": mean, "cost_nats": cost(mean)}
            rows.append(identity(run) | about | judged(windows))
    return rows


def price_of_moving(costs: pd.Series) -> Callable[[str], float]:
    """Nats that ranks such as ``44>36>28``, the last of which was never in use, cost above a fixed rank at their mean.

    A window is taken to cost what its rank costs all along, so it does not matter when a rank comes. The more the price
    of fixed ranks, ``costs`` as in :func:`ranges`, bends, the dearer it is to move.
    """
    cost = _cost_of(costs)

    def price(ranks: str) -> float:
        used = [float(rank) for rank in ranks.split(">")[:-1]]
        return float(np.mean([cost(rank) for rank in used])) - cost(float(np.mean(used)))

    return price


def _cost_of(costs: pd.Series) -> Callable[[float], float]:
    costs = costs.sort_index()
    known, logs = costs.index.to_numpy(float), np.log(costs.to_numpy(float))

    def cost(rank: float) -> float:
        if rank <= known[-1] or len(known) == 1:
            return float(np.exp(np.interp(rank, known, logs)))
        slope = (logs[-1] - logs[-2]) / (known[-1] - known[-2])
        return float(np.exp(logs[-1] + slope * (rank - known[-1])))

    return cost
