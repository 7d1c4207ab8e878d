"""Sampling rates alpha (iterations) and beta (entries): fidelity, decisions and cost of the estimate (paper, GDS).

The grid is of runs that recorded every rule. Each reads the same local gradients (:mod:`experiments.training.probes`),
so nothing but the rule differs. The share alpha of the iterations is applied here, to what was recorded at every
iteration. Ranks are those that a controller of the study's settings decides when it is fed the window means of a rule:
how often they differ from those of all entries at every iteration is the fidelity of the rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from edgc.config import EDGCConfig
from edgc.control.adaptive import make_controller
from edgc.entropy.estimators import combine
from edgc.entropy.sampler import Sampler
from edgc.measurement.report import Report
from edgc.sections import EntropyConfig
from experiments.analyse import correlation
from experiments.analyse.acting import decision_columns, differ, policy_decisions, ranks
from experiments.analyse.runs import Run
from experiments.analyse.statistics import pearson, quartiles, root_mean_square
from experiments.analyse.tables import identity, result, summarise
from experiments.analyse.window_ablation import fidelity

RESULTS = ("table.csv", "summary.csv", "timings.csv", "timings_summary.csv", "grid.csv", "sampling_error.csv",
           "correlation_summary.csv")  # fmt: skip
DETAILS = ("grid_timings.csv", "curves.csv")
SUMMARISED = ("cc", "cc_after_warmup", "bias_nats", "rmse_nats", "sample_bias_nats", "sample_rmse_nats",
              "decisions_differing", "validation_loss")  # fmt: skip
TIMED = ("seconds_entropy_mean", "seconds_step_mean", "share_of_step", "change_percent")
KEYS = ["variant", "label", "alpha", "beta", "sampling", "estimator"]
SKIPPED_STEPS = 5  # first calls allocate
ALPHAS = (1.0, 0.5, 0.25, 0.1)
RULE = ["rule", "rate", "estimator"]
FULL = ("all", 1.0)

Shapes = list[tuple[int, int]]


def tables(runs: list[Run]) -> dict[str, Any]:
    """``table`` and ``timings`` (cost of the estimate) per run, ``summary`` and ``timings_summary`` per setting; of
    runs that recorded every rule ``grid``, ``sampling_error``, ``grid_timings`` and ``correlation_summary`` (per rule,
    over seeds)."""
    runs, gridded = [run for run in runs if run.method == "edgc"], [run for run in runs if len(run.samplings)]
    full = {(run.seed, run.edgc.entropy.estimator): run for run in runs if is_full(run) and run.ok}
    rows, timings = [], []
    for run in runs:
        reference = full.get((run.seed, run.edgc.entropy.estimator))
        about = identity(run) | settings(run)
        decisions = decision_columns(run) | compare(run, reference)
        rows.append(about | fidelity(run) | decisions | result(run))
        seconds, base = cost(run), cost(reference)["seconds_entropy_mean"] if reference else math.nan
        change = 100 * (seconds["seconds_entropy_mean"] / base - 1) if base > 0 else math.nan
        timings.append(about | seconds | {"change_percent": change})
    table, rules = pd.DataFrame(rows), controller_of(runs)
    by_rule = [row for run in gridded for row in correlations(run, rules)] if rules else []
    return {
        "table": table,
        "summary": summarise(table, SUMMARISED, KEYS),
        "timings": timings,
        "timings_summary": summarise(pd.DataFrame(timings), TIMED, KEYS),
        "grid": [row for run in gridded for row in grid(run, rules)] if rules else [],
        "sampling_error": [row for run in gridded for row in sampling_error(run)],
        "correlation_summary": correlation.summary(pd.DataFrame(by_rule), RULE) if by_rule else [],
        "grid_timings": [row for run in gridded for row in grid_timings(run)],
    }


def controller_of(runs: list[Run]) -> EDGCConfig | None:
    """Settings of the controller that decides the ranks in the study: those of the first run that reads everything,
    with the r_max that it found; None if there is no such run."""
    for run in runs:
        r_max = decision_columns(run)["r_max"]
        if is_full(run) and math.isfinite(r_max):
            changes = {"r_max": int(r_max), "alignment": "off", "cost_gate": False, "remeasure_above": None}
            return EDGCConfig.from_record(run.edgc.to_dict() | changes)
    return None


def settings(run: Run) -> dict[str, Any]:
    """The sampler's settings of a run (paper: alpha 0.1, beta 0.25)."""
    entropy = run.edgc.entropy
    rates = {"alpha": float(entropy.iteration_rate), "beta": float(entropy.entry_rate)}
    return rates | {"sampling": entropy.sampling, "estimator": entropy.estimator}


def is_full(run: Run) -> bool:
    return bool(run.edgc.entropy.iteration_rate == run.edgc.entropy.entry_rate == 1)


def compare(run: Run, reference: Run | None) -> dict[str, Any]:
    """Decisions whose ranks differ from those of the run of the same seed that reads everything (alpha = beta = 1).

    A decision that only one of the two runs took counts as differing. Empty without such a run.
    """
    if reference is None:
        return dict.fromkeys(("decisions_differing", "decisions_compared", "largest_rank_difference"), math.nan)
    decided, expected = ([ranks(event) for event in policy_decisions(r)] for r in (run, reference))
    pairs = list(zip(decided, expected, strict=False))
    distances = [abs(a - b) for row, other in pairs for a, b in zip(row, other, strict=False) if math.isfinite(a - b)]
    return {
        "decisions_differing": sum(differ(*pair) for pair in pairs) + abs(len(decided) - len(expected)),
        "decisions_compared": max(len(decided), len(expected)),
        "largest_rank_difference": max(distances, default=math.nan),
    }


def cost(run: Run) -> dict[str, float]:
    """Mean seconds of the estimate per step and its share of the step.

    Stages measure at the same time, so the slowest counts; iterations that the sampler skips count as zero.
    """
    stages, steps = (frame[frame["iteration"] > SKIPPED_STEPS] for frame in (run.stages, run.steps))
    per_step = stages.fillna({"seconds_entropy": 0.0}).groupby("iteration")["seconds_entropy"].max()
    mean, step = float(per_step.mean()), float(steps["seconds"].mean())
    share = mean / step if step > 0 else math.nan
    return {"steps": len(steps), "seconds_entropy_mean": mean, "seconds_step_mean": step, "share_of_step": share}


def grid(run: Run, settings: EDGCConfig) -> Iterator[dict[str, Any]]:
    """Per rule and alpha: windows of stage 0 against all entries at every iteration, and the ranks that follow."""
    entropies, shapes = first_stage(run)
    for estimator in sorted({str(name) for _, _, name in entropies.columns}):
        full = entropies.get((*FULL, estimator))
        if full is None or estimator == "square_sum":
            continue
        true = window_means(full, settings.window, run.iterations)
        expected = decided_ranks(settings, shapes, run.iterations, true)
        for rule, rate, _ in (column for column in entropies.columns if column[2] == estimator):
            for alpha in ALPHAS:
                samples = sampled(entropies[rule, rate, estimator], alpha)
                means = window_means(samples, settings.window, run.iterations)
                difference = pd.Series(means) - pd.Series(true)
                pairs = list(zip(decided_ranks(settings, shapes, run.iterations, means), expected, strict=True))
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
    decided = decided_ranks(settings, shapes, run.iterations, window_means(full, settings.window, run.iterations))
    warm_up = settings.window * (1 + sum(rank is None for rank in decided))  # the first rank is of the window after
    active, alphas = entropies.index > warm_up, [correlation.PAPER_ALPHA]
    for rule, rate, _ in (column for column in entropies.columns if column[2] == estimator):
        about = {"rule": rule, "rate": rate, "estimator": estimator, "stage": 0, "span": correlation.SPANS[0]}
        samples = entropies[rule, rate, estimator]
        for row in correlation.cells(full[active].to_numpy(), samples[active].to_numpy(), alphas):
            yield identity(run) | about | row


def first_stage(run: Run) -> tuple[pd.DataFrame, Shapes]:
    """Entropy of stage 0, mean of its matrices weighted by size: a row an iteration, a column a rule; and the
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


def window_means(entropy: pd.Series, window: int, iterations: int) -> list[float]:
    """Means over the complete windows of the run; nan where a window has no measurement."""
    means = entropy.groupby((entropy.index.to_numpy() - 1) // window).mean()
    return [float(means.get(k, math.nan)) for k in range(iterations // window)]


def decided_ranks(settings: EDGCConfig, shapes: Shapes, iterations: int, means: Sequence[float]) -> list[int | None]:
    """Rank of the one stage after each window, as a controller decides that is fed these means."""
    controller = make_controller(settings, [shapes], iterations)
    decided: list[int | None] = []
    for k, entropy in enumerate(means, start=1):
        controller.observe(k * settings.window, Report((entropy,)))
        decided.append(controller.plan(k * settings.window + 1).ranks[0])
    return decided


def sampling_error(run: Run) -> Iterator[dict[str, Any]]:
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


def grid_timings(run: Run) -> Iterator[dict[str, Any]]:
    """Per rule: median over iterations of the seconds for all matrices of the slowest stage, and beside the rest.

    ``of_histogram``: as a share of the histogram of all entries; ``of_step``: of the median training step.
    """
    totals = run.samplings.groupby([*RULE, "iteration", "stage"])["seconds"].sum()
    medians = totals.groupby([*RULE, "iteration"]).max().groupby(RULE).median()
    histogram, step = medians.get((*FULL, "histogram"), math.nan), float(run.steps["seconds"].median())
    for key, seconds in medians.items():
        row = {"seconds": float(seconds), "of_histogram": float(seconds / histogram), "of_step": float(seconds / step)}
        yield identity(run) | dict(zip(RULE, key, strict=True)) | row
