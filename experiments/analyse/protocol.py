"""Spread over seeds of the difference between two runs, under every estimate of the loss at the end.

An *estimate* is of the ``last`` weights, of the mean of the losses of the last evaluations (``evaluations``), or of the
mean of their ``weights``, each over the first ``tokens`` of the validation text
(:class:`experiments.spec.settings.FinalConfig`). All are of the same runs, so that they differ in nothing else.

Two runs of one seed and one learning rate are a *pair*: every one against no compression, and those of method ``edgc``,
which begin alike without compression, against each other. The difference is the first one's loss less the second
one's, in nats.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from experiments.analyse.ranges import ranges
from experiments.analyse.runs import Run, as_float
from experiments.analyse.tables import identity, method_columns, result
from experiments.common.equivalence import (
    interval,
    loss_margin,
    power_of_difference,
    power_of_equality,
    sd_interval,
    seeds_needed,
)

RESULTS = ("table.csv", "estimates.csv", "spread.csv", "ranges.csv", "timings.csv")
DETAILS = ("curves.csv",)
LAST, EVALUATIONS, WEIGHTS = ENDS = ("last", "evaluations", "weights")
EFFECT = 0.0025  # nats that a comparison is to resolve
ESTIMATES = ["variant", "label", "seed", "status", "lr", "end", "tokens", "loss"]


def tables(runs: list[Run]) -> dict[str, Any]:
    """``table`` (per run), ``estimates`` (per run and estimate), ``spread`` (per pair and estimate), ``ranges``
    (:mod:`experiments.analyse.ranges`, from the fixed ranks of each learning rate) and ``timings``."""
    found = pd.DataFrame([row for run in runs for row in estimates(run)], columns=ESTIMATES)
    return {
        "table": [
            identity(run)
            | {"lr": rate(run), "uncompressed_steps": start(run)}
            | method_columns(run)
            | result(run)
            | {"error": run.summary.get("error")}
            for run in runs
        ],
        "estimates": found,
        "spread": (spreads := [row for pair in pairs(runs) for row in spread(*pair, found)]),
        "ranges": [row for lr in sorted(set(found["lr"])) for row in would_take(runs, lr, spreads)],
        "timings": [identity(run) | {"seconds_total": run.number("seconds_total")} for run in runs],
    }


def would_take(runs: Sequence[Run], lr: float, spreads: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of :func:`experiments.analyse.ranges.ranges` at one learning rate; costs by the last weights, all text."""
    fixed = [run for run in runs if rate(run) == lr and run.policy == "fixed" and run.ok]
    plain, ranks = {run.label for run in runs if run.plain}, {run.variant: run.rank for run in fixed}
    rows = [r for r in spreads if r["end"] == LAST and r["against"] in plain and r["variant"] in ranks]
    all_text = [r for r in rows if r["tokens"] == max(row["tokens"] for row in rows)]
    costs = pd.Series({ranks[r["variant"]]: r["difference_nats"] for r in reversed(all_text)})
    return ranges(fixed, costs) if len(costs) and (costs > 0).all() else []


def rate(run: Run) -> float:
    """Highest learning rate of a run."""
    return float(run.config["train"]["lr"])


def start(run: Run) -> float:
    """Iterations before the first one that sent something compressed; nan where none did."""
    return run.first_compressed - 1


def estimates(run: Run) -> list[dict[str, Any]]:
    """The loss at the end of a run by every estimate; nan where the run did not reach its end."""
    events = run.events.get("final", [])
    columns = ["iteration", "weights", "tokens", "loss"]
    frame = pd.DataFrame([{key: event[key] for key in columns} for event in events], columns=columns)
    rows = []
    for tokens, group in frame.groupby("tokens"):
        losses = group.assign(loss=group["loss"].map(as_float)).sort_values("iteration")
        series, mean = (losses.loc[losses["weights"] == kind, "loss"] for kind in ("last", "mean"))
        # Whole or not at all: not the mean of what a run recorded before it diverged.
        complete = run.ok and len(series) == run.config["train"]["final"]["evaluations"] and len(mean) == 1
        values = (series.iloc[-1], series.mean(skipna=False), mean.iloc[0]) if complete else (math.nan,) * 3
        about = identity(run) | {"lr": rate(run)}
        rows += [about | {"end": end, "tokens": tokens, "loss": v} for end, v in zip(ENDS, values, strict=True)]
    return rows


def pairs(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Variants that are compared, by a run of each: one learning rate, and no compression or one start (``edgc``)."""
    variants = sorted({run.variant: run for run in runs}.values(), key=lambda run: not run.plain)
    return [
        (run, other)
        for other, run in itertools.combinations(variants, 2)
        if rate(run) == rate(other) and (other.plain or run.method == other.method == "edgc")
    ]


def spread(run: Run, other: Run, found: pd.DataFrame) -> list[dict[str, Any]]:
    """Differences of a pair of variants over seeds, by every estimate.

    ``sd_of_today`` is the deviation as a share of that by the last weights and the fewest tokens, of the same seeds.
    """
    rows, today = list[dict[str, Any]](), math.nan
    for tokens, end in itertools.product(sorted(set(found["tokens"])), ENDS):
        losses = found[(found["tokens"] == tokens) & (found["end"] == end)].pivot(
            index="seed", columns="variant", values="loss"
        )
        one, two = (losses.reindex(columns=[item.variant])[item.variant] for item in (run, other))
        differences = (one - two).dropna().tolist()
        measured, sds = interval(differences), sd_interval(differences)
        sd = measured["sd"]
        today = sd if not rows else today
        rows.append(
            {"variant": run.variant, "label": run.label, "against": other.label, "lr": rate(run)}
            | {"end": end, "tokens": tokens, "n": measured["n"], "difference_nats": measured["mean"]}
            | {"difference_low": measured["low"], "difference_high": measured["high"]}
            | {"sd_nats": sd, "sd_low": sds[0], "sd_high": sds[1], "sd_of_today": sd / today if today else math.nan}
            | {"seeds_to_see_difference": sd if math.isnan(sd) else seeds_needed(power_of_difference, sd, EFFECT)}
            | {"seeds_to_show_equality": sd if math.isnan(sd) else seeds_needed(power_of_equality, sd, loss_margin())}
        )
    return rows
