"""Optimus-CC and its parts: the tables of the methods comparison, and what is sent between pipeline stages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from experiments.analyse import methods
from experiments.analyse.runs import Run
from experiments.analyse.tables import bf16_ratio, identity, write_tables

RESULTS = ("table.csv", "summary.csv", "time_to_target.csv", "timings.csv", "traffic.csv")
DETAILS = ("curves.csv",)


def analyse(runs: list[Run], out: Path) -> list[Path]:
    """Write the tables of :mod:`experiments.analyse.methods` and ``traffic.csv``."""
    sent = [identity(run) | traffic(run) for run in runs]
    return methods.analyse(runs, out) + write_tables(out, {"traffic": sent})


def traffic(run: Run) -> dict[str, Any]:
    """Bytes of one replica as shares of what uncompressed training sends: ``replicas_ratio`` in reductions (of an fp32
    all-reduce; ``replicas_ratio_bf16`` of a bf16 one), ``stages_ratio`` of the activation gradients that stages send
    backwards; and the median over steps of the latter's relative error. nan where nothing of the kind is compressed."""
    sent, dense = (float(run.stages[key].sum()) for key in ("pipeline_bytes", "pipeline_bytes_dense"))
    return {
        "replicas_ratio": run.number("bytes_ratio"),
        "replicas_ratio_bf16": bf16_ratio(run.number("bytes_ratio")),
        "stages_ratio": sent / dense if dense else math.nan,
        "stages_relative_error": float(run.stages["pipeline_relative_error"].median()),
    }
