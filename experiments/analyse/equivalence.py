"""Two one-sided t tests on paired differences, and how many seeds they need.

Seeds are the unit here, documents in :mod:`experiments.evaluation.statistics`; the test is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from experiments.analyse.statistics import interval
from experiments.common.equivalence import NOT_DECIDED, ON_PAR, equivalence_p

ALPHA = 0.05
POWER = 0.8
MOST = 100  # seeds; more are not looked for
BETTER, WORSE = "better", "worse"


def two_one_sided(differences: Sequence[float], margin: float) -> float:
    """p of the two one-sided tests that the mean lies within ``margin`` of 0; nan with fewer than two values."""
    found = interval(differences)
    if not found["n"] > 1:
        return math.nan
    return equivalence_p(found["mean"], found["sd"] / math.sqrt(found["n"]), margin, found["n"] - 1)


def compare(differences: Sequence[float], margin: float) -> dict[str, Any]:
    """Mean paired difference, its 95 % t interval, p of equality within ``margin``, and what they say (more is worse).

    ``on par``: both one-sided tests succeed; else ``better`` or ``worse`` where the interval excludes 0; else ``not
    decided``. A difference can be certain and yet within the margin: then it is ``on par``, and the interval tells.
    """
    found, p = interval(differences), two_one_sided(differences, margin)
    said = NOT_DECIDED
    if p < ALPHA:
        said = ON_PAR
    elif found["low"] > 0 or found["high"] < 0:
        said = WORSE if found["low"] > 0 else BETTER
    means = {"difference_nats": found["mean"], "difference_low": found["low"], "difference_high": found["high"]}
    return {"n": found["n"], **means, "p_equal": p, "verdict": said}


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
    """The fewest seeds, of at least two, with which ``power`` reaches ``POWER``; infinite above ``MOST``."""
    return next((float(n) for n in range(2, MOST + 1) if power(sd, effect, n) >= POWER), math.inf)
