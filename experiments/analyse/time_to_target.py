"""Time to a fixed validation loss over networks of several bandwidths: measured work, modelled network.

Of every step of a run the compute time (the uncompressed runs' step without their communication), compression and
decompression were measured; the time on the network is ``bytes / bandwidth`` of the slowest stage, with no latency and
nothing hidden behind backward. The target is what the uncompressed run of the same seed reaches after ``SHARE`` of its
iterations. A run that never reaches it has no time, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from experiments.analyse.runs import Run
from experiments.analyse.tables import identity

SHARE = 0.9
MEGABITS = (10.0, 100.0, 1000.0, 10000.0)
KIND = "modelled network"


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row per finished run and bandwidth: ``seconds`` and ``of_uncompressed``, the ratio to the same seed's."""
    bases = {run.seed: Base.of(run) for run in runs if run.plain and run.ok}
    found = []
    for run in runs:
        base = bases.get(run.seed)
        if base is None or not run.ok or run.stages.empty:
            continue
        iterations = reached(run, base.target)
        for megabits, dense in base.seconds.items():
            own = seconds(run, base.compute, iterations, megabits)
            found.append(
                identity(run)
                | {"kind": KIND, "megabits": megabits, "target_loss": base.target, "iterations": iterations}
                | {"seconds": own, "of_uncompressed": own / dense}
            )
    return found


@dataclass(frozen=True)
class Base:
    """An uncompressed run: its compute time of a step, its target loss, its time to that by bandwidth (Mbit/s)."""

    compute: float
    target: float
    seconds: dict[float, float]

    @classmethod
    def of(cls, run: Run) -> Base:
        compute = compute_seconds(run)
        target = loss_at(run, SHARE * float(run.evaluations["iteration"].max()))
        iterations = reached(run, target)
        return cls(compute, target, {m: seconds(run, compute, iterations, m) for m in MEGABITS})


def compute_seconds(run: Run) -> float:
    """Median seconds of an uncompressed step without the reduction of its slowest stage."""
    slowest = run.stages.groupby("iteration")["seconds_communicate"].max()
    steps = run.steps.set_index("iteration")["seconds"]
    return float((steps - slowest).median())


def loss_at(run: Run, iteration: float) -> float:
    """Validation loss at an iteration, linear between evaluations."""
    points = run.evaluations.dropna()
    return float(np.interp(iteration, points["iteration"], points["loss"]))


def reached(run: Run, target: float) -> float:
    """Iteration at which the validation loss first was at most ``target``, linear between evaluations; nan if never."""
    points = run.evaluations.dropna().sort_values("iteration")
    below = points.index[points["loss"] <= target]
    if not len(below):
        return math.nan
    place = points.index.get_loc(below[0])
    if place == 0:
        return float(points["iteration"].iloc[0])
    (x0, y0), (x1, y1) = points[["iteration", "loss"]].iloc[[place - 1, place]].to_numpy()
    return float(x0 + (y0 - target) / (y0 - y1) * (x1 - x0))


def seconds(run: Run, compute: float, iterations: float, megabits: float) -> float:
    """Seconds of the first ``iterations`` steps; the last one in part."""
    if not math.isfinite(iterations):
        return math.nan
    stages = run.stages
    stage = work_seconds(stages) + stages["bytes"] * 8 / (megabits * 1e6)
    steps = compute + stage.groupby(stages["iteration"]).max()
    whole = int(iterations)
    rest = iterations - whole
    partial = rest * float(steps.get(whole + 1, 0.0)) if rest else 0.0
    return float(steps[steps.index <= whole].sum() + partial)


def work_seconds(stages: pd.DataFrame) -> pd.Series:
    """Seconds of compression and decompression, by step and stage; none where nothing was compressed."""
    return stages["seconds_compress"].fillna(0) + stages["seconds_decompress"].fillna(0)


def table(runs: Sequence[Run]) -> pd.DataFrame:
    """:func:`rows`, with its columns where there is none."""
    columns = ["variant", "label", "seed", "status", "kind", "megabits", "target_loss", "iterations"]
    return pd.DataFrame(rows(runs), columns=[*columns, "seconds", "of_uncompressed"])
