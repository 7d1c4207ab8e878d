"""r_max and r_min as the paper finds them: the largest rank that is not slower than no compression, and its quarter.

On the network of this machine from the measured T(r) alone; over networks of several bandwidths from the measured work
and the bytes of each rank, ``kind`` says which.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from experiments.analyse.runs import Run
from experiments.analyse.time_to_target import KIND, MEGABITS, work_seconds
from experiments.common import quickest

MULTIPLE = 4  # ranks are multiples of it, as the controller's
SHARE = 4  # r_min = r_max / SHARE (paper)


def table(runs: Sequence[Run]) -> pd.DataFrame:
    """A row per stage and network with at least two ranks: times are of one reduction of the stage.

    ``crossing`` is where a line through T(r) meets the uncompressed time, ``extrapolated`` whether that is outside the
    ranks that were run; ``r_max`` is 0 where no rank is quicker, empty where every rank is. Of several seeds of a rank
    the quickest counts (:mod:`experiments.common.quickest`).
    """
    columns = ["stage", "kind", "megabits", "ranks", "seconds_uncompressed", "crossing", "extrapolated"]
    medians = [row for run in runs if run.ok for row in of_run(run)]
    rows = _rows(_quickest(pd.DataFrame(medians))) if medians else []
    return pd.DataFrame(rows, columns=[*columns, "r_max", "r_min"])


def _quickest(medians: pd.DataFrame) -> pd.DataFrame:
    return quickest.least(medians, medians["work"] + medians["communicate"])


def _rows(medians: pd.DataFrame) -> Iterator[dict[str, Any]]:
    for stage, group in medians.groupby("stage"):
        compressed, dense = group[group["rank"].notna()], group[group["rank"].isna()]
        if compressed["rank"].nunique() < 2 or dense.empty:
            continue
        networks = {math.nan: group["communicate"]} | {value: group["bytes"] * 8 / (value * 1e6) for value in MEGABITS}
        for megabits, communicate in networks.items():
            times = group["work"] + communicate
            uncompressed = float(times[dense.index].median())
            slope, offset = np.polyfit(compressed["rank"], times[compressed.index], 1)
            crossing = meeting(float(slope), float(offset), uncompressed)
            r_max = math.floor(crossing / MULTIPLE) * MULTIPLE if math.isfinite(crossing) else None
            yield {
                "stage": stage,
                "kind": "measured" if math.isnan(megabits) else KIND,
                "megabits": megabits,
                "ranks": compressed["rank"].nunique(),
                "seconds_uncompressed": uncompressed,
                "crossing": crossing,
                "extrapolated": not compressed["rank"].min() <= crossing <= compressed["rank"].max(),
                "r_max": r_max,
                "r_min": None if r_max is None else r_max // SHARE // MULTIPLE * MULTIPLE,
            }


def of_run(run: Run) -> list[dict[str, Any]]:
    """Medians over the steps of one run, per stage: seconds of compression work and of communication, bytes."""
    stages = run.stages.assign(work=work_seconds(run.stages))
    found = stages.groupby("stage")[["work", "seconds_communicate", "bytes"]].median()
    return [
        {"stage": int(stage), "rank": rank_of(run)}
        | {"work": row["work"], "communicate": row["seconds_communicate"], "bytes": row["bytes"]}
        for stage, row in found.iterrows()
    ]


def rank_of(run: Run) -> float:
    """The fixed rank; nan for the uncompressed run."""
    value = run.setting("rank")
    return float(value) if value is not None and run.method != "none" else math.nan


def meeting(slope: float, offset: float, level: float) -> float:
    """The rank at which ``slope`` r + ``offset`` reaches ``level``; 0 if it starts above, inf if it never does."""
    if offset >= level:
        return 0.0
    return (level - offset) / slope if slope > 0 else math.inf
