"""The methods comparison: validation perplexity against bytes sent, and ranks over time (paper, main comparison)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.analyse import time_to_target
from experiments.analyse.runs import Run
from experiments.analyse.statistics import SMOOTHING, quartiles, thin
from experiments.analyse.tables import identity, result, summarise, uncompressed_losses, with_identity, write_tables
from experiments.analyse.windows import decision_columns

RESULTS = ("table.csv", "summary.csv", "time_to_target.csv", "timings.csv")
DETAILS = ("curves.csv",)
SUMMARISED = ("validation_perplexity", "validation_loss", "gap_nats", "bytes_ratio", "bytes_ratio_bf16", "mean_rank")
SETTINGS = ("factor_dtype", "one_sided", "bits", "rounding", "density")  # empty where a method has none


def analyse(runs: list[Run], out: Path) -> list[Path]:
    """Write ``table.csv`` (a row per run), ``summary.csv`` (per variant), ``curves.csv``, ``timings.csv`` and
    ``time_to_target.csv`` (:mod:`experiments.analyse.time_to_target`)."""
    baseline = uncompressed_losses(runs)
    rows = [
        identity(run)
        | {"method": run.method, "policy": run.policy, "rank": run.setting("rank")}
        | {name: getattr(run.edgc, name, None) for name in SETTINGS}
        | decision_columns(run)
        | result(run, baseline)
        | {"error": run.summary.get("error")}
        for run in runs
    ]
    table = pd.DataFrame(rows)
    tables = {
        "summary": summarise(table, SUMMARISED, ["variant", "label", "method", "policy"]),
        "curves": curves(runs),
        "timings": [timing(run) for run in runs],
        "time_to_target": time_to_target.table(runs),
        "table": table,
    }
    return write_tables(out, tables)


def curves(runs: Sequence[Run]) -> pd.DataFrame:
    """The rows of :func:`curve` of all runs, at least one."""
    return pd.concat([curve(run) for run in runs], ignore_index=True)


def curve(run: Run) -> pd.DataFrame:
    """Training loss (trailing mean), validation perplexity, bytes so far, and per stage the rank and the mean of the
    entropies sampled in the last window's length (nats; empty without a policy), thinned."""
    steps, stages = run.steps, run.stages
    if steps.empty:
        return pd.DataFrame(columns=[*identity(run), "iteration", "train_loss", "validation_perplexity", "bytes"])
    frame = pd.DataFrame({"iteration": steps["iteration"]})
    frame["train_loss"] = steps["loss"].rolling(SMOOTHING, min_periods=1).mean()
    evaluations = run.evaluations.drop_duplicates("iteration", keep="last").set_index("iteration")
    frame["validation_perplexity"] = frame["iteration"].map(evaluations["perplexity"])
    frame["bytes"] = steps["bytes"].cumsum()
    ranks = stages.pivot_table(index="iteration", columns="stage", values="rank", aggfunc="last", dropna=False)
    for stage in ranks.columns:
        frame[f"rank_{int(stage)}"] = frame["iteration"].map(ranks[stage])
    for stage in ranks.columns:
        mine = stages[stages["stage"] == stage].set_index("iteration")["entropy"]
        means = mine.rolling(run.edgc.window, min_periods=1).mean() if run.policy else mine * math.nan
        frame[f"entropy_{int(stage)}"] = frame["iteration"].map(means)
    frame = with_identity(run, frame)
    # Rank changes and evaluations are kept exactly, or a thinned curve would move them.
    changed = frame.filter(like="rank_").fillna(-1).diff().abs().sum(axis=1) > 0
    keep = [i for i in frame.index if changed[i] or pd.notna(frame["validation_perplexity"][i])]
    return frame.iloc[thin(len(frame), keep)]


def timing(run: Run) -> dict[str, Any]:
    """Seconds per step of one run: medians and quartiles as measured on this machine."""
    row = identity(run) | {"seconds_total": run.number("seconds_total")}
    row |= {f"seconds_per_step_{name}": value for name, value in quartiles(run.steps["seconds"]).items()}
    row["tokens_per_second_median"] = run.number("tokens_per_second_median")
    for kind in ("compress", "communicate", "decompress", "entropy"):
        row[f"seconds_{kind}_per_step"] = run.number(f"seconds_{kind}_per_step")
    # Here and not in table.csv: some of them are told by the clock.
    row["signatures"] = "|".join(run.summary.get("signatures", ()))
    return row
