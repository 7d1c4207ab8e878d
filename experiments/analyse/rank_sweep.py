"""Fixed ranks: error and perplexity per rank, and how time grows with rank (paper, choice of r_max and r_min)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.analyse import methods, rank_limits
from experiments.analyse.runs import Run
from experiments.analyse.statistics import quartiles
from experiments.analyse.tables import identity, result, uncompressed_losses, write_tables
from experiments.common.quickest import quickest

RESULTS = ("table.csv", "timings.csv", "fit.csv", "limits.csv")
DETAILS = ("curves.csv",)
KINDS = ("compress", "communicate", "decompress")
SKIPPED_STEPS = 5  # allocation and connection set-up make the first steps slow


def analyse(runs: list[Run], out: Path) -> list[Path]:
    """Write ``table.csv`` (per run), ``timings.csv`` (seconds per rank and stage), ``fit.csv`` (T(r) = a r + c),
    ``limits.csv`` (r_max and r_min, :mod:`experiments.analyse.rank_limits`) and ``curves.csv``."""
    baseline = uncompressed_losses(runs)
    timings = pd.DataFrame([row for run in runs for row in timing(run)])
    rows = [identity(run) | {"rank": rank_limits.rank_of(run)} | result(run, baseline) | errors(run) for run in runs]
    tables = {"timings": timings, "fit": list(fits(timings)), "limits": rank_limits.table(runs), "table": rows}
    return write_tables(out, tables | {"curves": methods.curves(runs)})


def errors(run: Run) -> dict[str, float]:
    """Relative errors and error-feedback size in the second half of training: medians over steps (of the mean's error
    over windows) and stages."""
    stages = run.stages
    late = stages[stages["iteration"] > stages["iteration"].max() / 2]
    found: dict[str, float] = {}
    for key in ("worker_error", "mean_error", "error_feedback_ratio"):
        found |= {f"{key}_{name}": value for name, value in quartiles(late[key]).items()}
    return found


def timing(run: Run) -> Iterator[dict[str, Any]]:
    """Median and quartiles over steps of each part of the reduction, per stage, and their sum (``total``)."""
    stages = run.stages[run.stages["iteration"] > SKIPPED_STEPS]
    about = identity(run) | {"rank": rank_limits.rank_of(run)}
    for stage, group in stages.groupby("stage"):
        seconds = {kind: group[f"seconds_{kind}"] for kind in KINDS}
        seconds["total"] = pd.concat(list(seconds.values()), axis=1).sum(axis=1, min_count=1)
        for kind, values in seconds.items():
            row = about | {"stage": int(stage), "kind": kind, "steps": int(values.count())}
            yield row | {f"seconds_{name}": value for name, value in quartiles(values).items()}


def linear(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """Least-squares line through (rank, seconds) with its residuals; nan with fewer than two ranks."""
    a, b = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    names = ("seconds_per_rank", "seconds_fixed", "residual_rms", "residual_largest_share", "r_squared")
    if np.unique(a).size < 2:
        return dict.fromkeys(names, math.nan)
    gradient, offset = np.polyfit(a, b, 1)
    residual = b - (gradient * a + offset)
    spread = float(((b - b.mean()) ** 2).sum())
    rms = math.sqrt(float((residual**2).mean()))
    share = float(np.abs(residual / b).max()) if (b > 0).all() else math.nan
    r_squared = 1 - float((residual**2).sum()) / spread if spread > 0 else math.nan
    return dict(zip(names, (float(gradient), float(offset), rms, share, r_squared), strict=True))


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
        uncompressed = float(dense["seconds_median"].median()) if len(dense) else math.nan
        slower = math.nan
        if kind == "total" and math.isfinite(uncompressed) and math.isfinite(line["seconds_per_rank"]):
            slower = rank_limits.meeting(line["seconds_per_rank"], line["seconds_fixed"], uncompressed)
        row = {"stage": stage, "kind": kind, "ranks": int(compressed["rank"].nunique()), "points": len(compressed)}
        yield row | line | {"seconds_uncompressed": uncompressed, "rank_where_slower": slower}
