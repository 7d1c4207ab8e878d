"""The direction and the size of paired differences: t and sign test, two one-sided t tests, the seeds they need.

Seeds are the unit here, documents in :mod:`experiments.evaluation.statistics`; the test is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from experiments.analyse.statistics import interval
from experiments.common.equivalence import (
    BETTER,
    BETTER_WITHIN,
    CANNOT_TELL,
    LEAST_SEEDS,
    NOT_DECIDED,
    ON_PAR,
    WORSE,
    WORSE_WITHIN,
    equivalence_p,
)

ALPHA = 0.05
POWER = 0.8
MOST = 100  # seeds; more are not looked for
WITHIN = {"": ON_PAR, BETTER: BETTER_WITHIN, WORSE: WORSE_WITHIN}  # by direction


def two_one_sided(differences: Sequence[float], margin: float) -> float:
    """p of the two one-sided tests that the mean lies within ``margin`` of 0; nan with fewer than two values."""
    found = interval(differences)
    if not found["n"] > 1:
        return math.nan
    return equivalence_p(found["mean"], found["sd"] / math.sqrt(found["n"]), margin, found["n"] - 1)


def direction(differences: Sequence[float]) -> str:
    """``worse`` (above 0) or ``better`` where the 95 % t interval excludes 0 or the sign test does at 5 %, else empty.

    The sign test sees what the interval misses when one seed lies far out: ten of ten on one side.
    """
    found = interval(differences)
    worse, better = (sum(sign * value > 0 for value in differences) for sign in (1, -1))
    if found["low"] > 0 or found["high"] < 0:
        return WORSE if found["low"] > 0 else BETTER
    if worse + better and stats.binomtest(worse, worse + better).pvalue < ALPHA:
        return WORSE if worse > better else BETTER
    return ""


def compare(differences: Sequence[float], margin: float) -> dict[str, Any]:
    """Mean paired difference, its 95 % t interval, its direction, p of equality within ``margin``, and the verdict.

    More is worse. The verdict is the direction; ``, within the margin`` is added where both one-sided tests succeed.
    Without a direction it is ``on par`` where they succeed, else ``not decided``. No verdict of equality rests on
    fewer than three seeds.
    """
    found, p, towards = interval(differences), two_one_sided(differences, margin), direction(differences)
    verdict = towards or NOT_DECIDED
    if p < ALPHA:
        verdict = WITHIN[towards] if found["n"] >= LEAST_SEEDS else NOT_DECIDED
    means = {"difference_nats": found["mean"], "difference_low": found["low"], "difference_high": found["high"]}
    count = {"seeds_worse": sum(value > 0 for value in differences)}
    return {"n": found["n"], **means, "direction": towards, **count, "p_equal": p, "verdict": verdict}


def worth(compared: Mapping[str, Any], gap: float, margin: float) -> str:
    """The verdict on a run against a compressed one of the same bytes, whose gap to no compression is ``gap`` nats.

    ``cannot tell`` where that gap is less than twice the margin, for then there was nothing to win, unless the whole
    interval of the difference lies beyond the margin.
    """
    beyond = compared["difference_low"] > margin or compared["difference_high"] < -margin
    return str(compared["verdict"]) if beyond or not gap < 2 * margin else CANNOT_TELL


def power_of_equality(sd: float, margin: float, seeds: int) -> float:
    """Probability that two one-sided tests with so many seeds succeed where the true difference is 0.

    Exact: over the distribution of the sample's deviation, the chance that the mean lies where both tests succeed.
    """
    if sd == 0:
        return 1.0
    freedom, error = seeds - 1, sd / math.sqrt(seeds)
    shares = (np.arange(4000) + 0.5) / 4000
    spread = np.sqrt(stats.chi2.ppf(shares, freedom) / freedom)
    room = margin / error - stats.t.ppf(1 - ALPHA, freedom) * spread
    return float(np.mean(np.maximum(0.0, 2 * stats.norm.cdf(room) - 1)))


def power_of_difference(sd: float, effect: float, seeds: int) -> float:
    """Probability that a two-sided paired t test with so many seeds sees a true difference of ``effect``."""
    if sd == 0:
        return 1.0
    freedom, shift = seeds - 1, effect / sd * math.sqrt(seeds)
    limit = stats.t.ppf(1 - ALPHA / 2, freedom)
    return float(stats.nct.sf(limit, freedom, shift) + stats.nct.cdf(-limit, freedom, shift))


def seeds_needed(power: Callable[[float, float, int], float], sd: float, effect: float) -> float:
    """The fewest seeds, of at least three, with which ``power`` reaches ``POWER``; infinite above ``MOST``."""
    return next((float(n) for n in range(LEAST_SEEDS, MOST + 1) if power(sd, effect, n) >= POWER), math.inf)
