"""Window length w: agreement of sampled and full entropy (CC), ranks, perplexity (paper, window study)."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.analyse.common import Run, identity, result, summarise, write_table
from experiments.analyse.windows import decision_columns, fidelity, trajectory

SUMMARISED = ("cc", "cc_all_stages", "cc_after_warmup", "bias_nats", "rmse_nats", "decisions", "rank_changes",
              "validation_perplexity", "validation_loss", "bytes_ratio")  # fmt: skip


def analyse(runs: list[Run], out: Path) -> list[Path]:
    """Write ``table.csv`` (per run), ``summary.csv`` (per window length) and ``trajectories.csv`` (per window)."""
    rows, frames = [], []
    for run in runs:
        window = int(run.setting("window", 1000))
        rows.append(
            identity(run) | {"window": window} | fidelity(run, window) | decision_columns(run) | result(run)
        )
        frame = trajectory(run, window)
        for position, (key, value) in enumerate((identity(run) | {"length": window}).items()):
            frame.insert(position, key, value)
        frames.append(frame)
    table = pd.DataFrame(rows)
    write_table(out / "summary.csv", summarise(table, SUMMARISED, ["variant", "label", "window"]))
    write_table(out / "trajectories.csv", pd.concat(frames, ignore_index=True))
    write_table(out / "table.csv", table)
    return [out / name for name in ("table.csv", "summary.csv", "trajectories.csv")]
