"""Spread and difference, as all studies mean them: intervals, t and sign test, two one-sided t tests (that a
difference is smaller than a margin, which no test of "no difference" can show), and the seeds that they need.

Standard deviations have n - 1 in the denominator; intervals are 95 % Student t intervals of the mean over seeds, and
are given of differences paired by seed alone. The margins stand in ``equivalence.yaml`` beside this file, and nowhere
else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from experiments.common.yaml_settings import Settings, load_yaml, validate

PATH = Path(__file__).with_name("equivalence.yaml")
BETTER, WORSE, ON_PAR, NOT_DECIDED = "better", "worse", "on par", "not decided"
BETTER_WITHIN, WORSE_WITHIN = f"{BETTER} within the margin", f"{WORSE} within the margin"
EQUAL = (ON_PAR, BETTER_WITHIN, WORSE_WITHIN)  # shown to be less than the margin, the last two with a direction
CANNOT_TELL = "cannot tell"  # of two compressed runs, where the other costs too little for anything to be won
LEAST_SEEDS = 3  # of a verdict of equality
SPREAD = ("mean", "sd", "min", "max")  # of what is measured under several seeds
LIMITS = ("low", "high")  # of the interval
ALPHA = 0.05
POWER = 0.8
MOST = 100  # seeds; more are not looked for
WITHIN = {"": ON_PAR, BETTER: BETTER_WITHIN, WORSE: WORSE_WITHIN}  # by direction
Scale = Literal["difference", "log_ratio"]


class Margin(Settings):
    """Largest gap of one metric that counts as none, on the scale on which it is measured."""

    margin: float = Field(gt=0)
    scale: Scale


class Equivalence(Settings):
    """The file ``equivalence.yaml``."""

    significance: float = Field(gt=0, lt=0.5)
    margins: dict[str, Margin]


def load_equivalence(path: Path = PATH) -> Equivalence:
    """The stated margins; ``UserError`` names the key at fault."""
    margins: Equivalence = validate(Equivalence, load_yaml(path), path)
    return margins


def loss_margin() -> float:
    """Margin of the validation loss, in nats."""
    return load_equivalence().margins["validation_loss"].margin


def equivalence_p(centre: float, error: float, margin: float, freedom: float) -> float:
    """The larger p value of two one-sided t tests: of a gap at most -margin, and of one at least margin.

    Below a level a, the 1 - 2a t interval of the gap lies inside the margin (Schuirmann, 1987).
    """
    from scipy import stats

    if error == 0:
        return 0.0 if abs(centre) < margin else 1.0
    return float(stats.t.sf((margin - abs(centre)) / error, freedom))


def interval(values: Iterable[float], confidence: float = 0.95) -> dict[str, float]:
    """n, mean, sd, min, max and the t interval of the mean, over the finite values."""
    from scipy import stats

    x = np.array([v for v in values if math.isfinite(v)], dtype=float)
    if x.size == 0:
        return {"n": 0} | dict.fromkeys((*SPREAD, *LIMITS), math.nan)
    sd = float(x.std(ddof=1)) if x.size > 1 else math.nan
    half = float(stats.t.ppf((1 + confidence) / 2, x.size - 1)) * sd / math.sqrt(x.size) if x.size > 1 else math.nan
    mean, least, most = float(x.mean()), float(x.min()), float(x.max())
    values = (mean, sd, least, most, mean - half, mean + half)
    return {"n": int(x.size)} | dict(zip((*SPREAD, *LIMITS), values, strict=True))


def sd_interval(values: Iterable[float]) -> tuple[float, float]:
    """The 95 % interval of the standard deviation of normal values, over the finite ones; nan with fewer than two."""
    from scipy import stats

    found = interval(values)
    freedom = found["n"] - 1
    if freedom < 1:
        return math.nan, math.nan
    low, high = (found["sd"] * math.sqrt(freedom / stats.chi2.ppf(share, freedom)) for share in (0.975, 0.025))
    return float(low), float(high)


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
    from scipy import stats

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
    from scipy import stats

    if sd == 0:
        return 1.0
    freedom, error = seeds - 1, sd / math.sqrt(seeds)
    shares = (np.arange(4000) + 0.5) / 4000
    spread = np.sqrt(stats.chi2.ppf(shares, freedom) / freedom)
    room = margin / error - stats.t.ppf(1 - ALPHA, freedom) * spread
    return float(np.mean(np.maximum(0.0, 2 * stats.norm.cdf(room) - 1)))


def power_of_difference(sd: float, effect: float, seeds: int) -> float:
    """Probability that a two-sided paired t test with so many seeds sees a true difference of ``effect``."""
    from scipy import stats

    if sd == 0:
        return 1.0
    freedom, shift = seeds - 1, effect / sd * math.sqrt(seeds)
    limit = stats.t.ppf(1 - ALPHA / 2, freedom)
    # The chance to see it on the wrong side, which scipy gives as nan where it is too small.
    wrong = np.nan_to_num(stats.nct.cdf(-limit, freedom, shift))
    return float(stats.nct.sf(limit, freedom, shift) + wrong)


def smallest_seen(sd: float, seeds: int) -> float:
    """The least true difference that a two-sided paired t test with so many seeds sees with probability ``POWER``."""
    from scipy import optimize

    return sd * float(optimize.brentq(lambda effect: power_of_difference(1.0, effect, seeds) - POWER, 0.01, 100.0))


def seeds_needed(power: Callable[[float, float, int], float], sd: float, effect: float) -> float:
    """The fewest seeds, of at least three, with which ``power`` reaches ``POWER``; infinite above ``MOST``."""
    return next((float(n) for n in range(LEAST_SEEDS, MOST + 1) if power(sd, effect, n) >= POWER), math.inf)
