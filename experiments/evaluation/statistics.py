"""Is a model on par with its uncompressed twin? Paired tests over documents, and a test of equivalence.

Both models answer the same documents, so only the documents on which they differ count. Two questions are
asked: whether the models differ at all (a p value), and whether they differ by less than a margin stated in
``experiments/common/equivalence.yaml`` (two one-sided tests). A difference that no test sees is not yet "on par".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from experiments.common.equivalence import NOT_DECIDED, ON_PAR, Equivalence, Scale, equivalence_p

ACCURACIES = frozenset({"acc", "acc_norm", "acc_mutual_info", "acc_bytes", "exact_match"})  # 0 or 1 a document
DIFFERENT = "different"
CONFIDENCE = 0.95  # of intervals over seeds, and of what counts as above chance
MCNEMAR, PAIRED_T = "McNemar, exact", "paired t"


@dataclass(frozen=True)
class Gap:
    """Difference of two models on the same documents, as the margin of its metric measures it.

    ``shares`` are the documents' contributions to the gap's deviation from its expectation; their sum is 0.
    """

    value: float
    shares: tuple[float, ...]
    metric: str


@dataclass(frozen=True)
class Finding:
    """``low`` and ``high`` bound the interval of the equivalence test: 90 % at significance 0.05."""

    low: float
    high: float
    test: str
    p_value: float
    p_equivalence: float | None
    verdict: str | None


def gap(metric: str, scale: Scale, ours: tuple[float, Sequence[float]], theirs: tuple[float, Sequence[float]]) -> Gap:
    """The gap of (value, shares) of two models on the same documents; ``ValueError`` for unequal numbers of them."""
    (a, shares_a), (b, shares_b) = ours, theirs
    if scale == "log_ratio":
        shares_a, shares_b = [s / a for s in shares_a], [s / b for s in shares_b]
    value = math.log(a / b) if scale == "log_ratio" else a - b
    return Gap(value, tuple(x - y for x, y in zip(shares_a, shares_b, strict=True)), metric)


def pooled(gaps: Sequence[Gap]) -> Gap:
    """Mean over seeds, document by document: the same documents are asked of every seed, and stay the unit."""
    columns = zip(*(one.shares for one in gaps), strict=True)
    shares = tuple(math.fsum(column) / len(gaps) for column in columns)
    return Gap(math.fsum(one.value for one in gaps) / len(gaps), shares, gaps[0].metric)


def spread(shares: Sequence[float]) -> float:
    """Standard error from the documents' shares: sqrt(n / (n - 1) * sum of squares)."""
    n = len(shares)
    return math.sqrt(n / (n - 1) * math.fsum(share * share for share in shares))


def mcnemar(better: int, worse: int) -> float:
    """Exact two-sided p value: of the documents on which two models differ, is either more often right?"""
    if better + worse == 0:
        return 1.0
    return float(stats.binomtest(better, better + worse, 0.5).pvalue)


def interval_base(found: Gap) -> tuple[float, float]:
    """(centre, standard error) of the equivalence test, and of the paired t test.

    Accuracies get half a document more in each cell of the table right/wrong x right/wrong (Agresti and Min,
    Statistics in Medicine 24, 2005): with no document answered differently the plain interval would have no
    width, however few the documents. Averaged over seeds the same is added to the means.
    """
    if found.metric not in ACCURACIES:
        return found.value, spread(found.shares)
    n = len(found.shares)
    differences = [n * share + found.value for share in found.shares]
    total, squares = math.fsum(differences), math.fsum(d * d for d in differences)
    return total / (n + 2), math.sqrt(squares + 1 - total**2 / (n + 2)) / (n + 2)


def paired_p(found: Gap, seeds: int) -> tuple[str, float]:
    """(test, p value) of no difference: McNemar's for the accuracies of one pair of models, else paired t, with the
    centre and the standard error of the equivalence test."""
    n = len(found.shares)
    if found.metric in ACCURACIES and seeds == 1:
        differences = [round(n * share + found.value) for share in found.shares]
        return MCNEMAR, mcnemar(differences.count(1), differences.count(-1))
    centre, error = interval_base(found)
    if error == 0:
        return PAIRED_T, 1.0 if centre == 0 else 0.0
    return PAIRED_T, float(2 * stats.t.sf(abs(centre) / error, n - 1))


def judge(found: Gap, rule: Equivalence, seeds: int = 1) -> Finding:
    """Test a gap against no difference and against the margin of its metric, if it has one.

    On par: the interval lies inside the margin, whether or not it holds zero. Different: not on par, and the
    test of no difference rejects. Otherwise the documents do not decide it.
    """
    test, p_value = paired_p(found, seeds)
    centre, error = interval_base(found)
    freedom = len(found.shares) - 1
    reach = float(stats.t.isf(rule.significance, freedom)) * error
    stated = rule.margins.get(found.metric)
    p_equivalence = verdict = None
    if stated is not None:
        p_equivalence = equivalence_p(centre, error, stated.margin, freedom)
        if p_equivalence < rule.significance:
            verdict = ON_PAR
        else:
            verdict = DIFFERENT if p_value < rule.significance else NOT_DECIDED
    return Finding(centre - reach, centre + reach, test, p_value, p_equivalence, verdict)


def seed_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % t interval of the mean over seeds; None for fewer than two."""
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    error = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * error
    return mean - reach, mean + reach


def beats(value: float, stderr: float | None, levels: Sequence[float | None], higher: bool) -> bool | None:
    """Whether a score's 95 % interval lies beyond every given level; None without a level or an error."""
    known = [level for level in levels if level is not None]
    if stderr is None or not known:
        return None
    distance = value - max(known) if higher else min(known) - value
    return distance > float(stats.norm.ppf((1 + CONFIDENCE) / 2)) * stderr
