"""Optimus-CC and its parts: the tables of the methods comparison, and what is sent between pipeline stages."""

from __future__ import annotations

import math
from typing import Any

from experiments.analyse import methods
from experiments.analyse.runs import Run
from experiments.analyse.tables import bf16_ratio, identity

RESULTS = ("table.csv", "summary.csv", "time_to_target.csv", "timings.csv", "traffic.csv")
DETAILS = ("curves.csv",)


def tables(runs: list[Run]) -> dict[str, Any]:
    """The tables of :mod:`experiments.analyse.methods`, and ``traffic``."""
    return methods.tables(runs) | {"traffic": [identity(run) | traffic(run) for run in runs]}


def traffic(run: Run) -> dict[str, Any]:
    """Bytes of one replica as shares of what uncompressed training sends: ``replicas_ratio`` in reductions (of an fp32
    all-reduce; ``replicas_ratio_bf16`` of a bf16 one), ``stages_ratio`` of the activation gradients that stages send
    backwards; and the median over steps of the latter's relative error. nan where nothing of the kind is compressed."""
    compressed, dense = (float(run.stages[key].sum()) for key in ("pipeline_bytes", "pipeline_bytes_dense"))
    return {
        "replicas_ratio": run.number("bytes_ratio"),
        "replicas_ratio_bf16": bf16_ratio(run.number("bytes_ratio")),
        "stages_ratio": compressed / dense if dense else math.nan,
        "stages_relative_error": float(run.stages["pipeline_relative_error"].median()),
    }
