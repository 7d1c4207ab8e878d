"""The grid of sampling rules on the gradients of one run: error, correlation, decisions and cost of each.

Every rule reads the same local gradients (:mod:`experiments.training.probes.sampling`), so nothing but the rule
differs. The share alpha of the iterations is applied here, to what was recorded at every iteration. Ranks are those
that a controller of the study's settings decides when it is fed the window means of a rule: how often they differ from
those of all entries at every iteration is the fidelity of the rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from edgc.config import EDGCConfig
from edgc.control.controller import make_controller
from edgc.entropy.estimators import combine
from edgc.entropy.sampler import Sampler
from edgc.measurement.report import Report
from edgc.sections import EntropyConfig
from experiments.analyse import correlation
from experiments.analyse.runs import Run
from experiments.analyse.statistics import pearson, quartiles
from experiments.analyse.tables import identity
from experiments.analyse.windows import root_mean_square

ALPHAS = (1.0, 0.5, 0.25, 0.1)
RULE = ["rule", "rate", "estimator"]
FULL = ("all", 1.0)


def fidelity(run: Run, settings: EDGCConfig) -> list[dict[str, Any]]:
    """Per rule and alpha: windows of stage 0 against all entries at every iteration, and the ranks that follow."""
    found = run.samplings[run.samplings["stage"] == 0]
    entropies = by_iteration(found)
    shapes = found.drop_duplicates("parameter")[["rows", "columns"]].astype(int)
    stage = [(int(m), int(n)) for m, n in shapes.itertuples(index=False)]
    iterations, rows = run.iterations, []
    for estimator in sorted({str(name) for _, _, name in entropies.columns}):
        whole = entropies.get((*FULL, estimator))
        if whole is None or estimator == "square_sum":
            continue
        true = windows(whole, settings.window, iterations)
        wanted = ranks(settings, stage, iterations, true)
        for rule, rate, _ in (column for column in entropies.columns if column[2] == estimator):
            for alpha in ALPHAS:
                means = windows(sampled(entropies[rule, rate, estimator], alpha), settings.window, iterations)
                decided = ranks(settings, stage, iterations, means)
                difference = pd.Series(means) - pd.Series(true)
                pairs = list(zip(decided, wanted, strict=True))
                far = [abs(a - b) for a, b in pairs if a is not None and b is not None]
                rows.append(
                    identity(run)
                    | {"rule": rule, "beta": rate, "estimator": estimator, "alpha": alpha}
                    | {"windows": len(true), "cc": pearson(means, true)}
                    | {"bias_nats": float(difference.mean()), "rmse_nats": root_mean_square(difference)}
                    | {"ranks_differing": sum(a != b for a, b in pairs), "ranks_compared": len(pairs)}
                    | {"largest_difference": max(far, default=math.nan)}
                )
    return rows


def correlations(run: Run, settings: EDGCConfig) -> list[dict[str, Any]]:
    """Per rule, with the run's estimator: CC of stage 0 by the number of samples in a window, at the paper's alpha.

    Rows as in :mod:`experiments.analyse.correlation`; the run is not compressed, so warm-up ends where a controller of
    these settings ends it.
    """
    found = run.samplings[run.samplings["stage"] == 0]
    estimator = settings.entropy.estimator
    entropies = by_iteration(found).dropna()
    whole = entropies.get((*FULL, estimator))
    if whole is None:
        return []
    shapes = found.drop_duplicates("parameter")[["rows", "columns"]].astype(int)
    stage = [(int(m), int(n)) for m, n in shapes.itertuples(index=False)]
    decided = ranks(settings, stage, run.iterations, windows(whole, settings.window, run.iterations))
    warm_up = settings.window * (1 + sum(rank is None for rank in decided))  # the first rank is of the window after
    active = entropies.index > warm_up
    return [
        identity(run)
        | {"rule": rule, "rate": rate, "estimator": estimator, "stage": 0, "span": correlation.SPANS[0]}
        | row
        for rule, rate, _ in (column for column in entropies.columns if column[2] == estimator)
        for row in correlation.cells(
            whole[active].to_numpy(),
            entropies[rule, rate, estimator][active].to_numpy(),
            alphas=[correlation.PAPER_ALPHA],
        )
    ]


def by_iteration(found: pd.DataFrame) -> pd.DataFrame:
    """The entropy of the stage, mean of its matrices weighted by size: a row an iteration, a column a rule."""

    def mean(part: pd.DataFrame) -> float:
        return combine(part["entropy"].tolist(), (part["rows"] * part["columns"]).tolist())

    columns = {
        key: pd.Series({iteration: mean(part) for iteration, part in group.groupby("iteration")})
        for key, group in found.groupby(RULE)
    }
    return pd.DataFrame(columns).sort_index()


def sampled(entropy: pd.Series, alpha: float) -> pd.Series:
    """What is left at the iterations that a sampler of rate ``alpha`` measures."""
    sampler = Sampler(EntropyConfig(iteration_rate=alpha))
    return entropy[[sampler.measures(int(iteration)) for iteration in entropy.index]]


def windows(entropy: pd.Series, window: int, iterations: int) -> list[float]:
    """Means over the complete windows of the run; nan where a window has no measurement."""
    number = (entropy.index.to_numpy() - 1) // window
    means = entropy.groupby(number).mean()
    return [float(means.get(k, math.nan)) for k in range(iterations // window)]


def ranks(
    settings: EDGCConfig, stage: Sequence[tuple[int, int]], iterations: int, means: Sequence[float]
) -> list[int | None]:
    """Rank of the one stage after each window, as a controller decides that is fed these means."""
    controller = make_controller(settings, [list(stage)], iterations)
    decided: list[int | None] = []
    for k, entropy in enumerate(means):
        at = (k + 1) * settings.window
        controller.observe(at, Report((entropy,)))
        decided.append(controller.plan(at + 1).ranks[0])
    return decided


def errors(run: Run) -> list[dict[str, Any]]:
    """Per rule: the error of single measurements of single matrices, beside the formula of the Gaussian estimate.

    ``measured`` is the root mean square difference to all entries over the iterations, in nats, per matrix; the formula
    sqrt((kurtosis + 2) (1 - beta) / (4 beta n)) is the standard deviation of log sigma from beta n of n entries.
    Medians and quartiles over the matrices of all stages.
    """
    place = ["stage", "parameter", "iteration", "estimator"]
    found = run.samplings
    whole = found[found["rule"] == FULL[0]].set_index(place)["entropy"].rename("true")
    single = found[found["rule"] != FULL[0]].join(whole, on=place)
    count = single["rows"] * single["columns"]
    single = single.assign(
        square=(single["entropy"] - single["true"]) ** 2,
        bias=single["entropy"] - single["true"],
        formula=(single["excess_kurtosis"] + 2) * (1 - single["rate"]) / (4 * single["rate"] * count),
    )
    rows = []
    for key, group in single.groupby(RULE):
        means = group.groupby(["stage", "parameter"])[["square", "bias", "formula"]].mean()
        measured, predicted = np.sqrt(means["square"]), np.sqrt(means["formula"])
        ratio = quartiles(measured / predicted.where(predicted > 0))
        rows.append(
            identity(run)
            | dict(zip(RULE, key, strict=True))
            | {"matrices": len(means), "measured_nats": float(measured.median())}
            | {"bias_nats": float(means["bias"].median()), "formula_nats": float(predicted.median())}
            | {f"measured_over_formula_{name}": value for name, value in ratio.items()}
        )
    return rows


def cost(run: Run) -> list[dict[str, Any]]:
    """Per rule: median over iterations of the seconds for all matrices of the slowest stage, and beside the rest.

    ``of_histogram``: as a share of the histogram of all entries; ``of_step``: of the median training step.
    """
    totals = run.samplings.groupby([*RULE, "iteration", "stage"])["seconds"].sum()
    slowest = totals.groupby([*RULE, "iteration"]).max()
    medians = slowest.groupby(RULE).median()
    whole = medians.get((*FULL, "histogram"), math.nan)
    step = float(run.steps["seconds"].median())
    return [
        identity(run)
        | dict(zip(RULE, key, strict=True))
        | {"seconds": float(value), "of_histogram": float(value / whole), "of_step": float(value / step)}
        for key, value in medians.items()
    ]
