"""Learning rates: which one is best for a method, by factors of two, and whether both of its neighbours are worse.

Runs with the same label are trials of one method. The best rate is the one with the lowest mean validation loss over
the seeds that every rate of the method has; it counts as found only if the next lower and the next higher rate were
tried, too. A rate at which a run diverged or failed is never the best.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.analyse import methods
from experiments.analyse.runs import Run
from experiments.analyse.statistics import SPREAD, interval
from experiments.analyse.tables import identity, result, write_tables

RESULTS = ("table.csv", "rates.csv", "best.csv")
DETAILS = ("curves.csv",)


def analyse(runs: list[Run], out: Path) -> list[Path]:
    """Write ``table.csv`` (a row per run), ``rates.csv`` (per method and rate), ``best.csv`` (per method) and
    ``curves.csv`` (:func:`experiments.analyse.methods.curve`)."""
    rows = [identity(run) | {"method": run.method, "lr": run.config["train"]["lr"]} | result(run) for run in runs]
    table = pd.DataFrame(rows)
    found = rates(table)
    return write_tables(out, {"table": table, "rates": found, "best": best(found), "curves": methods.curves(runs)})


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
            found, over = interval(losses[rate]), interval(losses[rate] - lowest)
            rows.append(
                {"label": label, "lr": rate, "n": len(seeds), "n_ok": n_ok[rate]}
                | {f"validation_loss_{key}": found[key] for key in SPREAD}
                | {"costs_nats": over["mean"], "costs_low": over["low"], "costs_high": over["high"]}
            )
    return pd.DataFrame(rows)


def best(found: pd.DataFrame) -> list[dict[str, Any]]:
    """Per label the best rate, what its neighbours cost in nats, and whether both were tried."""
    rows = []
    for label, trials in found.groupby("label", sort=False):
        trials = trials.sort_values("lr", ignore_index=True)
        losses = trials["validation_loss_mean"]
        if losses.isna().all():
            rows.append({"label": label, "lr": math.nan, "found": False})
            continue
        at = int(losses.idxmin())
        lower, higher = (losses.get(place, math.nan) - losses[at] for place in (at - 1, at + 1))
        found_it = 0 < at < len(trials) - 1
        rows.append(
            {"label": label, "lr": trials["lr"][at], "found": found_it, "n": trials["n"][at]}
            | {"validation_loss": losses[at], "lower_costs_nats": lower, "higher_costs_nats": higher}
        )
    return rows
