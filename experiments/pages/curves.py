"""Learning curves for the page: every run of every ``curves.csv``, thinned so that the page stays small."""

import math
from typing import Any

import numpy as np
import pandas as pd

from experiments.pages import board
from experiments.pages.kept import Kept

POINTS = 120  # of a run
DIGITS = 5  # significant ones of losses and bytes


def curves(kept: Kept) -> dict[str, Any]:
    """Per study its variants and runs.

    A run has its iterations ``x``, its training loss ``y`` (trailing mean, nats), the gradient bytes ``b`` sent so far
    (MB) and its validation losses ``v`` as (iteration, loss). Iterations are those that all finished runs of the study
    have, thinned evenly, so that two runs can be compared point by point.
    """
    tables = {name: kept.table(f"{name}/curves.csv") for name in kept.studies}
    return {
        name: _study(kept, name, table) for name, table in tables.items() if table is not None and "train_loss" in table
    }


def _study(kept: Kept, name: str, table: pd.DataFrame) -> dict[str, Any]:
    settings = kept.table(f"{name}/table.csv")
    families = {}
    if settings is not None and "method" in settings:
        for row in settings.drop_duplicates("variant").to_dict("records"):
            families[row["variant"]] = board.family_of(board.text(row["method"]), board.text(row.get("policy")))
    chosen = grid(table)
    variants, runs = [], []
    for place, (variant, rows) in enumerate(table.groupby("variant", sort=False)):
        label = board.text(rows["label"].iloc[0])
        variants.append({"variant": variant, "label": label, "family": families.get(variant, "other")})
        runs += [run(group, chosen, place) for _, group in rows.groupby("seed")]
    return {"title": kept.studies[name].title, "variants": variants, "runs": runs}


def grid(table: pd.DataFrame) -> np.ndarray:
    """At most ``POINTS`` iterations, evenly among those that all runs of full length have; first and last included."""
    groups = [set(rows.astype(int)) for _, rows in table.groupby(["variant", "seed"])["iteration"]]
    end = max(map(max, groups))
    shared = sorted(set.intersection(*(group for group in groups if max(group) == end)))
    return np.array(shared)[np.unique(np.linspace(0, len(shared) - 1, min(POINTS, len(shared))).round().astype(int))]


def run(rows: pd.DataFrame, chosen: np.ndarray, variant: int) -> dict[str, Any]:
    """One run at the iterations ``chosen``, as far as it came."""
    rows = rows.drop_duplicates("iteration")
    points = rows[rows["iteration"].isin(chosen)]
    evaluated = rows.reindex(columns=["iteration", "validation_perplexity"]).dropna().to_numpy()
    return {
        "of": variant,
        "seed": int(rows["seed"].iloc[0]),
        "status": board.text(rows["status"].iloc[0]),
        "x": points["iteration"].astype(int).tolist(),
        "y": [rounded(value) for value in points["train_loss"]],
        "b": [rounded(value / 1e6) for value in points["bytes"]],
        "v": [[int(step), rounded(math.log(value))] for step, value in evaluated if value > 0],
    }


def rounded(value: float) -> float | None:
    """Round to ``DIGITS`` significant digits; None where it is not finite."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
