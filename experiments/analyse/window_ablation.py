"""Window length w and step limit s: agreement of sampled and full entropy (CC), ranks, delay, perplexity (paper, window
study), and when warm-up ends."""

from __future__ import annotations

from typing import Any

import pandas as pd

from experiments.analyse import correlation
from experiments.analyse.runs import Run
from experiments.analyse.tables import identity, result, summarise, together, with_identity
from experiments.analyse.windows import decision_columns, fidelity, trajectory, warm_up_ends

RESULTS = ("table.csv", "summary.csv", "warm_up.csv", "correlation.csv", "correlation_summary.csv")
DETAILS = ("trajectories.csv", "curves.csv")
TOLERANCES = (0.02, 0.05, 0.1, 0.2, 0.5)  # nats, of the rule that ends warm-up
SUMMARISED = ("cc", "cc_all_stages", "cc_after_warmup", "bias_nats", "rmse_nats", "decisions", "rank_changes",
              "share_limited", "lag_ranks",
              "validation_perplexity", "validation_loss", "bytes_ratio", "bytes_ratio_bf16")  # fmt: skip


def tables(runs: list[Run]) -> dict[str, Any]:
    """``table`` (per run), ``summary`` (per variant), ``trajectories`` (per window), ``warm_up`` (when it would end
    under other tolerances), and of one run per seed ``correlation`` (CC by the number of samples,
    :mod:`experiments.analyse.correlation`) with ``correlation_summary`` (over seeds)."""
    windows = [(run, run.edgc.window) for run in runs]
    table = pd.DataFrame(
        identity(run)
        | {"window": window, "step_limit": int(run.setting("step_limit", 8))}
        | fidelity(run, window)
        | decision_columns(run)
        | result(run)
        for run, window in windows
    )
    correlations = correlation.table(runs)
    return {
        "table": table,
        "summary": summarise(table, SUMMARISED, ["variant", "label", "window", "step_limit"]),
        "warm_up": [
            identity(run) | {"window": window} | row for run, window in windows for row in warm_up_ends(run, TOLERANCES)
        ],
        "trajectories": together(
            [with_identity(run, trajectory(run, window), length=window) for run, window in windows]
        ),
        "correlation": correlations,
        "correlation_summary": correlation.summary(correlations),
    }
