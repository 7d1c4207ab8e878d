"""Fixed ranks: error and perplexity per rank, how time grows with rank, and r_max and r_min as the paper finds them.

r_max is the largest rank that is not slower than no compression, r_min its quarter: on the network of this machine
from the measured T(r) alone; over networks of several bandwidths from the measured work and the bytes of each rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from experiments.analyse.runs import Run
from experiments.analyse.statistics import quartiles
from experiments.analyse.tables import identity, result, uncompressed_losses

RESULTS = ("table.csv", "timings.csv", "fit.csv", "limits.csv")
DETAILS = ("curves.csv",)
KINDS = ("compress", "communicate", "decompress")
MEGABITS = (10.0, 100.0, 1000.0, 10000.0)
SKIPPED_STEPS = 5  # allocation and connection set-up make the first steps slow
LIMITS = ["stage", "kind", "megabits", "ranks", "seconds_uncompressed", "crossing", "extrapolated", "r_max", "r_min"]
MULTIPLE = 4  # ranks are multiples of it, as the controller's
SHARE = 4  # r_min = r_max / SHARE (paper)
LINE = ("seconds_per_rank", "seconds_fixed", "residual_rms", "residual_largest_share", "r_squared")


def tables(runs: list[Run]) -> dict[str, Any]:
    """``table`` (per run), ``timings`` (seconds per rank and stage), ``fit`` (T(r) = a r + c) and ``limits``."""
    baseline = uncompressed_losses(runs)
    timings = pd.DataFrame([row for run in runs for row in timing(run)])
    return {
        "table": [identity(run) | {"rank": run.rank} | result(run, baseline) | errors(run) for run in runs],
        "timings": timings,
        "fit": list(fits(timings)),
        "limits": pd.DataFrame(limits(runs), columns=LIMITS),
    }


def errors(run: Run) -> dict[str, float]:
    """Relative errors and error-feedback size in the second half of training: medians over steps (of the mean's error
    over windows) and stages."""
    late = run.stages[run.stages["iteration"] > run.stages["iteration"].max() / 2]
    keys = ("worker_error", "mean_error", "error_feedback_ratio")
    return {f"{key}_{name}": value for key in keys for name, value in quartiles(late[key]).items()}


def timing(run: Run) -> Iterator[dict[str, Any]]:
    """Median and quartiles over steps of each part of the reduction, per stage, and their sum (``total``)."""
    stages = run.stages[run.stages["iteration"] > SKIPPED_STEPS]
    for stage, group in stages.groupby("stage"):
        seconds = {kind: group[f"seconds_{kind}"] for kind in KINDS}
        seconds["total"] = pd.concat(list(seconds.values()), axis=1).sum(axis=1, min_count=1)
        for kind, values in seconds.items():
            row = {"rank": run.rank, "stage": int(stage), "kind": kind, "steps": int(values.count())}
            yield identity(run) | row | {f"seconds_{name}": value for name, value in quartiles(values).items()}


def linear(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """Least-squares line through (rank, seconds) with its residuals; nan with fewer than two ranks."""
    a, b = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if np.unique(a).size < 2:
        return dict.fromkeys(LINE, math.nan)
    gradient, offset = np.polyfit(a, b, 1)
    residual = b - (gradient * a + offset)
    spread = float(((b - b.mean()) ** 2).sum())
    share = float(np.abs(residual / b).max()) if (b > 0).all() else math.nan
    r_squared = 1 - float((residual**2).sum()) / spread if spread > 0 else math.nan
    values = (float(gradient), float(offset), math.sqrt(float((residual**2).mean())), share, r_squared)
    return dict(zip(LINE, values, strict=True))


def least(times: pd.DataFrame, seconds: pd.Series) -> pd.DataFrame:
    """Rows of the seed that took least, for each stage and rank: other work on the machine only adds time.

    Args:
        times: a row per stage and run, with columns ``stage`` and ``rank`` (nan: uncompressed).
        seconds: what each row took.
    """
    return times.loc[seconds.groupby([times["stage"], times["rank"]], dropna=False).idxmin().sort_values()]


def quickest(timings: pd.DataFrame) -> pd.DataFrame:
    """The rows of the seed whose median total was the least, for each stage and rank (:func:`least`)."""
    total = timings[timings["kind"] == "total"]
    keys = ["stage", "variant", "seed"]
    return timings.merge(least(total, total["seconds_median"])[keys], on=keys)


def fits(timings: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """T(r) per stage and part, of each rank's quickest seed, and the rank from which compressing is slower than not.

    ``rank_where_slower`` solves a r + c = time of the uncompressed reduction of the stage (nan without an
    uncompressed run, inf when no rank is slower, 0 when every rank is). With three distinct ranks or more the
    residual says whether T is linear.
    """
    if timings.empty:
        return
    fine = quickest(timings[(timings["status"] == "ok") & timings["seconds_median"].notna()])
    for (stage, kind), group in fine.groupby(["stage", "kind"], sort=True):
        compressed, dense = group[group["rank"].notna()], group[group["rank"].isna()]
        line = linear(list(compressed["rank"]), list(compressed["seconds_median"]))
        uncompressed, slower = float(dense["seconds_median"].median()), math.nan
        if kind == "total" and math.isfinite(uncompressed + line["seconds_per_rank"]):
            slower = meeting(line["seconds_per_rank"], line["seconds_fixed"], uncompressed)
        row = {"stage": stage, "kind": kind, "ranks": int(compressed["rank"].nunique()), "points": len(compressed)}
        yield row | line | {"seconds_uncompressed": uncompressed, "rank_where_slower": slower}


def limits(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """A row per stage and network with at least two ranks: times are of one reduction of the stage.

    ``crossing`` is where a line through T(r) meets the uncompressed time, ``extrapolated`` whether that is outside the
    ranks that were run; ``r_max`` is 0 where no rank is quicker, empty where every rank is. Of several seeds of a rank
    the quickest counts (:func:`least`).
    """
    medians = [_medians(run) for run in runs if run.ok]
    if not medians:
        return
    together = pd.concat(medians, ignore_index=True)
    for stage, group in least(together, together["work"] + together["seconds_communicate"]).groupby("stage"):
        compressed, dense = group[group["rank"].notna()], group[group["rank"].isna()]
        if compressed["rank"].nunique() < 2 or dense.empty:
            continue
        networks = {value: group["bytes"] * 8 / (value * 1e6) for value in MEGABITS}
        for megabits, communicate in ({math.nan: group["seconds_communicate"]} | networks).items():
            times = group["work"] + communicate
            uncompressed = float(times[dense.index].median())
            slope, offset = np.polyfit(compressed["rank"], times[compressed.index], 1)
            crossing = meeting(float(slope), float(offset), uncompressed)
            r_max = math.floor(crossing / MULTIPLE) * MULTIPLE if math.isfinite(crossing) else None
            yield {
                "stage": stage,
                "kind": "measured" if math.isnan(megabits) else "modelled network",
                "megabits": megabits,
                "ranks": compressed["rank"].nunique(),
                "seconds_uncompressed": uncompressed,
                "crossing": crossing,
                "extrapolated": not compressed["rank"].min() <= crossing <= compressed["rank"].max(),
                "r_max": r_max,
                "r_min": None if r_max is None else r_max // SHARE // MULTIPLE * MULTIPLE,
            }


def _medians(run: Run) -> pd.DataFrame:
    """Medians over the steps of one run, per stage: seconds of compression work and of communication, bytes."""
    stages = run.stages.astype({"stage": int})
    stages["work"] = stages["seconds_compress"].fillna(0) + stages["seconds_decompress"].fillna(0)
    return (
        stages.groupby("stage")[["work", "seconds_communicate", "bytes"]].median().reset_index().assign(rank=run.rank)
    )


def meeting(slope: float, offset: float, level: float) -> float:
    """The rank at which ``slope`` r + ``offset`` reaches ``level``; 0 if it starts above, inf if it never does."""
    if offset >= level:
        return 0.0
    return (level - offset) / slope if slope > 0 else math.inf
