"""Trials of every method: its best one beside the best one without compression.

Runs with the same label are trials of one method. Each method has been tried as often as the others, so none is shown
at its authors' rate beside one that was tuned here. With one seed a trial is a trial: ``best.csv`` says which settings
are worth running with more. Where the best trial is of a policy that did not act, ``verdict`` says ``not tested``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.analyse import methods
from experiments.analyse.acting import acting
from experiments.analyse.runs import Run
from experiments.analyse.tables import identity, result, write_tables
from experiments.common.acting import NOT_TESTED, acted

RESULTS = ("table.csv", "best.csv")
DETAILS = ("curves.csv",)
MEANS = ("validation_loss", "bytes_ratio", "bytes_ratio_bf16")


def analyse(runs: list[Run], out: Path) -> list[Path]:
    """Write ``table.csv`` (a trial a row), ``best.csv`` (a method a row) and ``curves.csv``."""
    rows = [
        identity(run)
        | {"method": run.method, "lr": run.config["train"]["lr"], "beta1": run.config["train"].get("adam_beta1")}
        | acting(run)
        | result(run)
        for run in runs
    ]
    table = pd.DataFrame(rows)
    means = _means(table)
    base = means.loc[means["method"] == "none", "validation_loss"].min()
    table["above_best_nats"] = table["validation_loss"] - base
    return write_tables(out, {"table": table, "best": best(means, base), "curves": methods.curves(runs)})


def _means(table: pd.DataFrame) -> pd.DataFrame:
    """Per trial the mean over seeds; nan where a seed failed or diverged."""
    by = ["label", "method", "variant", "lr"]
    rows = []
    for key, mine in table.groupby(by, sort=False):
        fine = (mine["status"] == "ok").all()
        means = {name: mine[name].mean() if fine else math.nan for name in MEANS}
        verdict = NOT_TESTED if acted(mine) is False else ""
        rows.append(dict(zip(by, key, strict=True)) | {"n": len(mine)} | means | {"verdict": verdict})
    return pd.DataFrame(rows)


def best(means: pd.DataFrame, base: float) -> list[dict[str, Any]]:
    """Per method how many trials it had, the best one, and how far that is above the best without compression.

    ``first_nats`` is the same distance of the method's first trial, which is that of settings nobody tuned.
    """
    rows = []
    for label, trials in means.groupby("label", sort=False):
        losses = trials["validation_loss"]
        row: dict[str, Any] = {"label": label, "trials": len(trials), "trials_ok": int(losses.notna().sum())}
        if losses.notna().any():
            chosen = trials.loc[losses.idxmin()]
            row |= {key: chosen[key] for key in ("variant", "lr", "n", *MEANS, "verdict")}
            row |= {"above_best_nats": losses.min() - base, "first_nats": losses.iloc[0] - base}
        rows.append(row)
    return rows
