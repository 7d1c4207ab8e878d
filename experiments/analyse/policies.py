"""Policies against fixed ranks at equal bytes.

What a policy costs beside a fixed rank is read off the line through the fixed ranks of the same seed and type of
factors: gap to uncompressed training over the logarithm of the bytes. The ``excess`` of a run is its gap minus that
line at its own bytes, in nats; a run outside the range of the fixed ranks has none, for nothing was measured there.

The rule of the verdict, written before the runs: over the seeds with an excess, a policy is ``better`` (``worse``) than
a fixed rank where the 95 % t interval of the mean excess lies below (above) zero and the mean is at least ``LEAST``
nats away from it; else ``not distinguishable``; with fewer than ``SEEDS`` seeds ``not decided``. A policy that follows
something and did not act (:mod:`experiments.analyse.acting`) is ``not tested``, whatever its excess.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.analyse import methods
from experiments.analyse.acting import COLUMNS, NOT_TESTED, acted, seeds_acted
from experiments.analyse.equal_bytes import verdict as of_interval
from experiments.analyse.runs import Run
from experiments.analyse.statistics import interval
from experiments.analyse.tables import write_tables

RESULTS = ("table.csv", "summary.csv", "time_to_target.csv", "timings.csv", "excess.csv", "verdicts.csv")
DETAILS = ("curves.csv",)
LEAST = 0.002  # nats: a fifth of a percent of perplexity
SEEDS = 3


def analyse(runs: list[Run], out: Path) -> list[Path]:
    """Write the tables of :mod:`experiments.analyse.methods`, ``excess.csv`` (a row per run) and ``verdicts.csv``."""
    written = methods.analyse(runs, out)
    table = pd.read_csv(out / "table.csv")
    table["factor_dtype"] = table["factor_dtype"].fillna("fp32")
    table["policy"] = table["policy"].fillna("")
    compressed = {(run.variant, run.seed): compressed_ratio(run) for run in runs}
    rows = [
        excess(row, table) | {"bytes_ratio_compressed": compressed[row["variant"], row["seed"]]}
        for _, row in table[table["method"] == "edgc"].iterrows()
    ]
    return written + write_tables(out, {"excess": rows, "verdicts": verdicts(pd.DataFrame(rows))})


def compressed_ratio(run: Run) -> float:
    """Bytes of the compressed steps over what these steps send uncompressed; nan if none was compressed."""
    started = run.stages.loc[run.stages["rank"].notna(), "iteration"]
    dense = run.number("bytes_dense_total") / run.number("iterations")
    steps = run.steps[run.steps["iteration"] >= started.min()] if len(started) else run.steps[:0]
    return float(steps["bytes"].mean() / dense) if len(steps) and dense > 0 else math.nan


def excess(row: pd.Series, table: pd.DataFrame) -> dict[str, Any]:
    """One run beside the fixed ranks of its seed and type of factors."""
    fixed = table[
        (table["policy"] == "fixed")
        & (table["seed"] == row["seed"])
        & (table["factor_dtype"] == row["factor_dtype"])
        & (table["status"] == "ok")
        & (table["variant"] != row["variant"])
    ]
    at = gap_of_fixed(fixed["bytes_ratio"].tolist(), fixed["gap_nats"].tolist(), row["bytes_ratio"])
    kept = (
        "variant",
        "label",
        "seed",
        "status",
        "policy",
        "factor_dtype",
        "bytes_ratio",
        "bytes_ratio_bf16",
        "gap_nats",
    )
    return {name: row[name] for name in (*kept, *COLUMNS)} | {"fixed_gap_nats": at, "excess_nats": row["gap_nats"] - at}


def gap_of_fixed(ratios: Sequence[float], gaps: Sequence[float], ratio: float) -> float:
    """The gap of fixed ranks at ``ratio`` of the bytes, linear in its logarithm between neighbours; nan outside."""
    points = sorted((r, g) for r, g in zip(ratios, gaps, strict=True) if math.isfinite(r) and math.isfinite(g))
    if len(points) < 2 or not points[0][0] <= ratio <= points[-1][0]:
        return math.nan
    x, y = zip(*points, strict=True)
    return float(np.interp(math.log(ratio), np.log(x), y))


def verdicts(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Per variant the mean excess over its seeds, its interval and the verdict; ``acted`` counts seeds, and is empty
    where the ranks are given."""
    found, by = [], ["variant", "label", "policy", "factor_dtype"]
    for key, mine in rows.groupby(by, sort=False):
        over = interval(mine.loc[mine["status"] == "ok", "excess_nats"])
        row = dict(zip(by, key, strict=True)) | {"n": len(mine), "n_compared": over["n"], "acted": seeds_acted(mine)}
        row["percent"] = 100 * mine["bytes_ratio"].mean()
        row["percent_bf16"] = 100 * mine["bytes_ratio_bf16"].mean()
        row["percent_compressed"] = 100 * mine["bytes_ratio_compressed"].mean()
        row |= {"gap_nats": mine["gap_nats"].mean(), "excess_nats": over["mean"]}
        said = NOT_TESTED if acted(mine) is False else verdict(over)
        found.append(row | {"excess_low": over["low"], "excess_high": over["high"], "verdict": said})
    return found


def verdict(over: dict[str, float]) -> str:
    """The rule of this module's head."""
    if over["n"] < SEEDS:
        return "not decided"
    return of_interval(over) if abs(over["mean"]) >= LEAST else "not distinguishable"
