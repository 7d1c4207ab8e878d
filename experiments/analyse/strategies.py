"""Strategies in rehearsal: losses against what each of W replicas sends a step. Times are none: one process was all."""

from __future__ import annotations

from typing import Any

import pandas as pd

from experiments.analyse.acting import decision_columns
from experiments.analyse.runs import Run
from experiments.analyse.tables import identity, method_columns, result, uncompressed_losses
from experiments.common import acting

RESULTS = ("table.csv",)
DETAILS = ("curves.csv",)
DECISIONS = ("decisions", "decisions_outside_limits", *acting.COLUMNS)
UNNAMED = ("rank", "final_ranks")  # columns of methods that say nothing here


def tables(runs: list[Run]) -> dict[str, Any]:
    """``table``, a row per run."""
    baseline = uncompressed_losses(runs)
    return {"table": pd.DataFrame(row(run, baseline) for run in runs)}


def row(run: Run, baseline: dict[tuple[str, int], float]) -> dict[str, Any]:
    """What a run exchanges, its losses, and its bytes."""
    decisions, found = decision_columns(run), result(run, baseline)
    steps = found["iterations"]
    columns = (
        identity(run)
        | {"strategy": run.strategy.name, "period": run.strategy.period, "replicas": run.config["parallel"]["data"]}
        | method_columns(run)
        | {name: decisions[name] for name in DECISIONS}
        | found
        | {f"{name}_per_step": found[f"{name}_total"] / steps if steps else None for name in ("bytes", "bytes_dense")}
        | {"error": run.summary.get("error")}
    )
    return {name: value for name, value in columns.items() if name not in UNNAMED}
