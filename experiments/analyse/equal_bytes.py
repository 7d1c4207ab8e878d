"""Compressors at equal bytes: paired comparisons at each level of bytes, and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from edgc.compressors.powersgd import QUANTISED_BITS
from experiments.analyse import methods
from experiments.analyse.runs import Run
from experiments.analyse.statistics import interval
from experiments.analyse.tables import bf16_ratio, write_tables
from experiments.common.acting import NOT_TESTED, acted
from experiments.common.equivalence import NOT_DECIDED

RESULTS = ("table.csv", "summary.csv", "time_to_target.csv", "timings.csv", "pareto.csv", "levels.csv")
DETAILS = ("curves.csv",)
LEVELS = (3.0, 6.0, 12.0)  # percent of the bytes of an uncompressed fp32 run
WIDTH = 1.6  # a variant belongs to a level up to this factor away: half-way (in logarithm) is 1.41


def analyse(runs: list[Run], out: Path) -> list[Path]:
    """Write the tables of :mod:`experiments.analyse.methods`, ``levels.csv`` and ``pareto.csv``.

    ``levels.csv`` compares each variant with the quantised-factor engine's best of the same level: the difference
    of their gaps, paired by seed, with a 95 % t interval and whether it excludes zero. The best is chosen on the
    mean of the same seeds, which favours it; the number of candidates stands beside it.
    """
    written = methods.analyse(runs, out)
    table = pd.read_csv(out / "table.csv")
    points = pareto(table)
    levels = [row for level in LEVELS for row in compare(table, points, level)]
    return written + write_tables(out, {"pareto": points, "levels": levels})


def pareto(table: pd.DataFrame) -> pd.DataFrame:
    """Per variant the mean bytes (percent of an fp32 and of a bf16 all-reduce) and gap (nats), and whether no other
    variant has less of both.

    The front is that of the means: neighbours whose gaps differ by less than their spread could change places.
    """
    fine = table[table["status"] == "ok"]
    points = fine.groupby(["variant", "label", "method"], sort=False, as_index=False).agg(
        n=("seed", "size"), percent=("bytes_ratio", "mean"), gap_nats=("gap_nats", "mean"), sd=("gap_nats", "std")
    )
    points["percent"] *= 100
    points["percent_bf16"] = bf16_ratio(points["percent"])
    points["on_front"] = [
        not any(
            (other.percent <= one.percent and other.gap_nats < one.gap_nats)
            or (other.percent < one.percent and other.gap_nats <= one.gap_nats)
            for other in points.itertuples()
        )
        for one in points.itertuples()
    ]
    points["level"] = [level_of(percent) for percent in points["percent"]]
    return points.sort_values("percent", ignore_index=True)


def level_of(percent: float) -> float:
    """The nearest level in logarithm, or nan when none is within a factor of ``WIDTH``."""
    nearest = min(LEVELS, key=lambda level: abs(math.log(percent / level)))
    return nearest if abs(math.log(percent / nearest)) <= math.log(WIDTH) else math.nan


def compare(table: pd.DataFrame, points: pd.DataFrame, level: float) -> list[dict[str, Any]]:
    """Rows of ``levels.csv`` for one level; empty when no variant with quantised factors is at the level.

    A policy that did not act (:mod:`experiments.analyse.acting`) is ``not tested``.
    """
    here = points[points["level"] == level]
    quantised = table[table["factor_dtype"].isin(QUANTISED_BITS) & (table["method"] == "powersgd")]["variant"]
    candidates = here[here["variant"].isin(set(quantised))]
    if candidates.empty:
        return []
    best = candidates.loc[candidates["gap_nats"].idxmin(), "variant"]
    idle = {name for name, runs in table.groupby("variant") if acted(runs) is False}
    gaps = table[table["status"] == "ok"].pivot(index="seed", columns="variant", values="gap_nats")
    return [
        {"level_percent": level, "reference": best, "candidates": len(candidates)}
        | {"variant": row.variant, "label": row.label, "percent": row.percent, "percent_bf16": row.percent_bf16}
        | {"gap_nats": row.gap_nats}
        | paired((gaps[row.variant] - gaps[best]).dropna().tolist())
        | ({"verdict": NOT_TESTED} if row.variant in idle else {})
        for row in here.itertuples()
    ]


def paired(differences: Sequence[float]) -> dict[str, Any]:
    """Mean difference with its t interval and the two-sided p of no difference (nan with one seed or none left)."""
    found = interval(differences)
    spread = len(differences) > 1 and found["sd"] > 0
    p = float(stats.ttest_1samp(differences, 0.0).pvalue) if spread else math.nan
    limits = {"difference_low": found["low"], "difference_high": found["high"], "p": p}
    said = verdict(found) if any(differences) else "reference"
    return {"n": found["n"], "difference_nats": found["mean"]} | limits | {"verdict": said}


def verdict(found: dict[str, float]) -> str:
    """What the interval of a difference (:func:`experiments.analyse.statistics.interval`) says: more is worse."""
    if found["low"] > 0:
        return "worse"
    return "better" if found["high"] < 0 else NOT_DECIDED
