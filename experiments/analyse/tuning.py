"""Learning rates: which one is best for a method, by factors of two, and whether both of its neighbours are worse.

Runs with the same label are trials of one method. The best rate is the one with the lowest mean validation loss over
the seeds that every rate of the method has; it counts as found only if the next lower and the next higher rate were
tried, too. A rate at which a run diverged or failed is never the best.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from experiments.analyse.runs import Run
from experiments.analyse.tables import identity, result
from experiments.common.equivalence import SPREAD, interval

RESULTS = ("table.csv", "rates.csv", "best.csv")
DETAILS = ("curves.csv",)


def tables(runs: list[Run]) -> dict[str, Any]:
    """``table`` (a row per run), ``rates`` (per method and rate) and ``best`` (per method)."""
    table = pd.DataFrame(
        identity(run) | {"method": run.method, "lr": run.config["train"]["lr"]} | result(run) for run in runs
    )
    by_rate = rates(table)
    return {"table": table, "rates": by_rate, "best": best(by_rate)}


def rates(table: pd.DataFrame) -> pd.DataFrame:
    """Per label and rate the mean loss over the seeds that all of the label's rates have, nan where a run failed, and
    what the rate costs beyond the label's best: the mean of differences paired by seed with its 95 % interval. Rates
    without a common seed, as those of a study that has only begun, have n = 0."""
    rows: list[dict[str, Any]] = []
    for label, trials in table.groupby("label", sort=False):
        seeds = set.intersection(*(set(group["seed"]) for _, group in trials.groupby("lr")))
        losses = trials.pivot_table(index="seed", columns="lr", values="validation_loss", dropna=False)
        losses = losses.loc[sorted(seeds)]
        ended = trials[trials["seed"].isin(seeds) & (trials["status"] == "ok")].groupby("lr").size()
        n_ok = ended.reindex(losses.columns, fill_value=0)
        losses.loc[:, n_ok < len(seeds)] = math.nan
        lowest = losses[losses.mean().idxmin()] if losses.notna().any(axis=None) else math.nan
        for rate in losses:
            spread, cost = interval(losses[rate]), interval(losses[rate] - lowest)
            rows.append(
                {"label": label, "lr": rate, "n": len(seeds), "n_ok": n_ok[rate]}
                | {f"validation_loss_{key}": spread[key] for key in SPREAD}
                | {"costs_nats": cost["mean"], "costs_low": cost["low"], "costs_high": cost["high"]}
            )
    return pd.DataFrame(rows)


def best(by_rate: pd.DataFrame) -> list[dict[str, Any]]:
    """Per label the best rate, what its neighbours cost in nats, and whether both were tried."""
    rows = []
    for label, trials in by_rate.groupby("label", sort=False):
        trials = trials.sort_values("lr", ignore_index=True)
        losses = trials["validation_loss_mean"]
        if losses.isna().all():
            rows.append({"label": label, "lr": math.nan, "found": False})
            continue
        at = int(losses.idxmin())
        lower, higher = (losses.get(place, math.nan) - losses[at] for place in (at - 1, at + 1))
        rows.append(
            {"label": label, "lr": trials["lr"][at], "found": 0 < at < len(trials) - 1, "n": trials["n"][at]}
            | {"validation_loss": losses[at], "lower_costs_nats": lower, "higher_costs_nats": higher}
        )
    return rows
