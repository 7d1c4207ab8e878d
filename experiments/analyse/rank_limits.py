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

MULTIPLE = 4  # ranks are multiples of it, as the controller's
SHARE = 4  # r_min = r_max / SHARE (paper)


def table(runs: Sequence[Run]) -> pd.DataFrame:
    """A row per stage and network with at least two ranks: times are of one reduction of the stage.

    ``crossing`` is where a line through T(r) meets the uncompressed time, ``extrapolated`` whether that is outside the
    ranks that were run; ``r_max`` is 0 where no rank is quicker, empty where every rank is.
    """
    columns = ["stage", "kind", "megabits", "ranks", "seconds_uncompressed", "crossing", "extrapolated"]
    return pd.DataFrame(rows(runs), columns=[*columns, "r_max", "r_min"])


def rows(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    medians = pd.DataFrame([row for run in runs if run.ok for row in of_run(run)])
    if medians.empty:
        return
    for stage, group in medians.groupby("stage"):
        compressed, dense = group[group["rank"].notna()], group[group["rank"].isna()]
        if compressed["rank"].nunique() < 2 or dense.empty:
            continue
        for kind, megabits in (("measured", math.nan), *((KIND, value) for value in MEGABITS)):
            times = group["work"] + (
                group["communicate"] if math.isnan(megabits) else group["bytes"] * 8 / (megabits * 1e6)
            )
            uncompressed = float(times[dense.index].median())
            slope, offset = np.polyfit(compressed["rank"], times[compressed.index], 1)
            crossing = meeting(float(slope), float(offset), uncompressed)
            r_max = math.floor(crossing / MULTIPLE) * MULTIPLE if math.isfinite(crossing) else None
            yield {
                "stage": stage,
                "kind": kind,
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
    rank = run.setting("rank") if run.method != "none" else None
    return [
        {"stage": int(stage), "rank": math.nan if rank is None else float(rank)}
        | {"work": row["work"], "communicate": row["seconds_communicate"], "bytes": row["bytes"]}
        for stage, row in found.iterrows()
    ]


def meeting(slope: float, offset: float, level: float) -> float:
    """The rank at which ``slope`` r + ``offset`` reaches ``level``; 0 if it starts above, inf if it never does."""
    if offset >= level:
        return 0.0
    return (level - offset) / slope if slope > 0 else math.inf
