"""The grid of sampling rules on the gradients of one run: error, correlation, decisions and cost of each.

Every rule reads the same local gradients (:mod:`experiments.training.probes`), so nothing but the rule
differs. The share alpha of the iterations is applied here, to what was recorded at every iteration. Ranks are those
that a controller of the study's settings decides when it is fed the window means of a rule: how often they differ from
those of all entries at every iteration is the fidelity of the rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
from experiments.analyse.statistics import pearson, quartiles, root_mean_square
from experiments.analyse.tables import identity

ALPHAS = (1.0, 0.5, 0.25, 0.1)
RULE = ["rule", "rate", "estimator"]
FULL = ("all", 1.0)

Shapes = list[tuple[int, int]]


def fidelity(run: Run, settings: EDGCConfig) -> Iterator[dict[str, Any]]:
    """Per rule and alpha: windows of stage 0 against all entries at every iteration, and the ranks that follow."""
    entropies, shapes = first_stage(run)
    for estimator in sorted({str(name) for _, _, name in entropies.columns}):
        full = entropies.get((*FULL, estimator))
        if full is None or estimator == "square_sum":
            continue
        true = windows(full, settings.window, run.iterations)
        expected = ranks(settings, shapes, run.iterations, true)
        for rule, rate, _ in (column for column in entropies.columns if column[2] == estimator):
            for alpha in ALPHAS:
                samples = sampled(entropies[rule, rate, estimator], alpha)
                means = windows(samples, settings.window, run.iterations)
                difference = pd.Series(means) - pd.Series(true)
                pairs = list(zip(ranks(settings, shapes, run.iterations, means), expected, strict=True))
                distances = [abs(a - b) for a, b in pairs if a is not None and b is not None]
                yield (
                    identity(run)
                    | {"rule": rule, "beta": rate, "estimator": estimator, "alpha": alpha}
                    | {"windows": len(true), "cc": pearson(means, true)}
                    | {"bias_nats": float(difference.mean()), "rmse_nats": root_mean_square(difference)}
                    | {"ranks_differing": sum(a != b for a, b in pairs), "ranks_compared": len(pairs)}
                    | {"largest_difference": max(distances, default=math.nan)}
                )


def correlations(run: Run, settings: EDGCConfig) -> Iterator[dict[str, Any]]:
    """Per rule, with the run's estimator: CC of stage 0 by the number of samples in a window, at the paper's alpha.

    Rows as in :mod:`experiments.analyse.correlation`; the run is not compressed, so warm-up ends where a controller of
    these settings ends it.
    """
    estimator = settings.entropy.estimator
    entropies, shapes = first_stage(run)
    entropies = entropies.dropna()
    full = entropies.get((*FULL, estimator))
    if full is None:
        return
    decided = ranks(settings, shapes, run.iterations, windows(full, settings.window, run.iterations))
    warm_up = settings.window * (1 + sum(rank is None for rank in decided))  # the first rank is of the window after
    active, alphas = entropies.index > warm_up, [correlation.PAPER_ALPHA]
    for rule, rate, _ in (column for column in entropies.columns if column[2] == estimator):
        about = {"rule": rule, "rate": rate, "estimator": estimator, "stage": 0, "span": correlation.SPANS[0]}
        samples = entropies[rule, rate, estimator]
        for row in correlation.cells(full[active].to_numpy(), samples[active].to_numpy(), alphas):
            yield identity(run) | about | row


def first_stage(run: Run) -> tuple[pd.DataFrame, Shapes]:
    """Of stage 0 the entropy, mean of its matrices weighted by size: a row an iteration, a column a rule; and the
    shapes of its matrices."""

    def mean(part: pd.DataFrame) -> float:
        return combine(part["entropy"].tolist(), (part["rows"] * part["columns"]).tolist())

    samplings = run.samplings[run.samplings["stage"] == 0]
    columns = {
        key: pd.Series({iteration: mean(part) for iteration, part in group.groupby("iteration")})
        for key, group in samplings.groupby(RULE)
    }
    matrices = samplings.drop_duplicates("parameter")[["rows", "columns"]].astype(int)
    return pd.DataFrame(columns).sort_index(), [(int(m), int(n)) for m, n in matrices.itertuples(index=False)]


def sampled(entropy: pd.Series, alpha: float) -> pd.Series:
    """Entropies at the iterations that a sampler of rate ``alpha`` measures."""
    sampler = Sampler(EntropyConfig(iteration_rate=alpha))
    return entropy[[sampler.measures(int(iteration)) for iteration in entropy.index]]


def windows(entropy: pd.Series, window: int, iterations: int) -> list[float]:
    """Means over the complete windows of the run; nan where a window has no measurement."""
    means = entropy.groupby((entropy.index.to_numpy() - 1) // window).mean()
    return [float(means.get(k, math.nan)) for k in range(iterations // window)]


def ranks(settings: EDGCConfig, shapes: Shapes, iterations: int, means: Sequence[float]) -> list[int | None]:
    """Rank of the one stage after each window, as a controller decides that is fed these means."""
    controller = make_controller(settings, [shapes], iterations)
    decided: list[int | None] = []
    for k, entropy in enumerate(means, start=1):
        controller.observe(k * settings.window, Report((entropy,)))
        decided.append(controller.plan(k * settings.window + 1).ranks[0])
    return decided


def errors(run: Run) -> Iterator[dict[str, Any]]:
    """Per rule: the error of single measurements of single matrices, beside the formula of the Gaussian estimate.

    ``measured`` is the root mean square difference to all entries over the iterations, in nats, per matrix; the formula
    sqrt((kurtosis + 2) (1 - beta) / (4 beta n)) is the standard deviation of log sigma from beta n of n entries.
    Medians and quartiles over the matrices of all stages.
    """
    place = ["stage", "parameter", "iteration", "estimator"]
    full = run.samplings["rule"] == FULL[0]
    true = run.samplings[full].set_index(place)["entropy"].rename("true")
    single = run.samplings[~full].join(true, on=place)
    entries, rate = single["rows"] * single["columns"], single["rate"]
    single = single.assign(
        square=(single["entropy"] - single["true"]) ** 2,
        bias=single["entropy"] - single["true"],
        formula=(single["excess_kurtosis"] + 2) * (1 - rate) / (4 * rate * entries),
    )
    for key, group in single.groupby(RULE):
        means = group.groupby(["stage", "parameter"])[["square", "bias", "formula"]].mean()
        measured, predicted = np.sqrt(means["square"]), np.sqrt(means["formula"])
        ratio = quartiles(measured / predicted.where(predicted > 0))
        yield (
            identity(run)
            | dict(zip(RULE, key, strict=True))
            | {"matrices": len(means), "measured_nats": float(measured.median())}
            | {"bias_nats": float(means["bias"].median()), "formula_nats": float(predicted.median())}
            | {f"measured_over_formula_{name}": value for name, value in ratio.items()}
        )


def cost(run: Run) -> Iterator[dict[str, Any]]:
    """Per rule: median over iterations of the seconds for all matrices of the slowest stage, and beside the rest.

    ``of_histogram``: as a share of the histogram of all entries; ``of_step``: of the median training step.
    """
    totals = run.samplings.groupby([*RULE, "iteration", "stage"])["seconds"].sum()
    medians = totals.groupby([*RULE, "iteration"]).max().groupby(RULE).median()
    histogram, step = medians.get((*FULL, "histogram"), math.nan), float(run.steps["seconds"].median())
    for key, seconds in medians.items():
        row = {"seconds": float(seconds), "of_histogram": float(seconds / histogram), "of_step": float(seconds / step)}
        yield identity(run) | dict(zip(RULE, key, strict=True)) | row
