"""Window length w and step limit s: agreement of sampled and full entropy (CC), ranks, delay, perplexity (paper, window
study), and when warm-up ends."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.analyse import correlation, methods
from experiments.analyse.runs import Run
from experiments.analyse.tables import identity, result, summarise, together, with_identity, write_tables
from experiments.analyse.windows import decision_columns, fidelity, trajectory, warm_up_ends

RESULTS = ("table.csv", "summary.csv", "warm_up.csv", "correlation.csv", "correlation_summary.csv")
DETAILS = ("trajectories.csv", "curves.csv")
TOLERANCES = (0.02, 0.05, 0.1, 0.2, 0.5)  # nats, of the rule that ends warm-up
SUMMARISED = ("cc", "cc_all_stages", "cc_after_warmup", "bias_nats", "rmse_nats", "decisions", "rank_changes",
              "share_limited", "lag_ranks",
              "validation_perplexity", "validation_loss", "bytes_ratio", "bytes_ratio_bf16")  # fmt: skip


def analyse(runs: list[Run], out: Path) -> list[Path]:
    """Write ``table.csv`` (per run), ``summary.csv`` (per variant), ``trajectories.csv`` (per window),
    ``warm_up.csv`` (when warm-up would end under other tolerances), and of one run per seed ``correlation.csv`` (CC by
    the number of samples, :mod:`experiments.analyse.correlation`) with ``correlation_summary.csv`` (over seeds)."""
    rows, frames, ends = [], [], []
    for run in runs:
        window = run.edgc.window
        rows.append(
            identity(run)
            | {"window": window, "step_limit": int(run.setting("step_limit", 8))}
            | fidelity(run, window)
            | decision_columns(run)
            | result(run)
        )
        ends += [identity(run) | {"window": window} | row for row in warm_up_ends(run, TOLERANCES)]
        frames.append(with_identity(run, trajectory(run, window), length=window))
    table = pd.DataFrame(rows)
    summary = summarise(table, SUMMARISED, ["variant", "label", "window", "step_limit"])
    found = correlation.table(runs)
    tables = {
        "table": table,
        "summary": summary,
        "warm_up": ends,
        "trajectories": together(frames),
        "correlation": found,
        "correlation_summary": correlation.summary(found),
        "curves": methods.curves(runs),
    }
    return write_tables(out, tables)
