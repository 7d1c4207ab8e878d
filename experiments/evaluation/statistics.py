"""Is a model on par with its uncompressed twin? Paired tests over documents, and a test of equivalence.

Both models answer the same documents, so only the documents on which they differ count. Two questions are
asked: do the models differ at all (a p value), and do they differ by less than a margin stated in
``experiments/common/equivalence.yaml`` (two one-sided tests)? A difference that no test sees is not yet "on par".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

from experiments.common.equivalence import NOT_DECIDED, ON_PAR, Equivalence, Scale, equivalence_p

ACCURACIES = frozenset({"acc", "acc_norm", "acc_mutual_info", "acc_bytes", "exact_match"})  # 0 or 1 a document
DIFFERENT = "different"
CONFIDENCE = 0.95  # of intervals over seeds, and of what counts as above chance
MCNEMAR, PAIRED_T = "McNemar, exact", "paired t"


def influence(metric: str, samples: Sequence[dict[str, Any]], value: float) -> list[float] | None:
    """Share of each document in a metric's deviation from its expectation (delta method, ours).

    Needed because lm-eval gives no standard error for weighted perplexities, and none for the difference of
    two models on the same documents. With losses l_i and weights w_i (bytes, words, or 1), R = sum(l_i) /
    sum(w_i): the share in R is (l_i - R w_i) / sum(w_i); bits per byte are R / log 2, a perplexity is
    exp(R), an accuracy is the mean of 0 and 1. None for other metrics and for fewer than two documents.
    """
    if len(samples) < 2:
        return None
    if metric in ACCURACIES:
        return [(float(row[metric]) - value) / len(samples) for row in samples]
    if metric not in ("bits_per_byte", "byte_perplexity", "word_perplexity", "perplexity"):
        return None
    scale = 1 / math.log(2) if metric == "bits_per_byte" else value
    entries = [row[metric] if isinstance(row[metric], list | tuple) else (row[metric], 1.0) for row in samples]
    pairs = [(-float(log_likelihood), float(weight)) for log_likelihood, weight in entries]
    weight = math.fsum(w for _, w in pairs)
    rate = math.fsum(loss for loss, _ in pairs) / weight
    return [scale * (loss - rate * w) / weight for loss, w in pairs]


@dataclass(frozen=True)
class Gap:
    """Difference of two models on the same documents, as the margin of its metric measures it.

    ``shares`` are the documents' contributions to the gap's deviation from its expectation; their sum is 0.
    """

    value: float
    shares: tuple[float, ...]
    metric: str

    def centre(self) -> tuple[float, float]:
        """(Centre, standard error) of the equivalence test, and of the paired t test.

        Accuracies get half a document more in each cell of the table right/wrong x right/wrong (Agresti and Min,
        Statistics in Medicine 24, 2005): with no document answered differently the plain interval would have no
        width, however few the documents. Averaged over seeds the same is added to the means.
        """
        if self.metric not in ACCURACIES:
            return self.value, spread(self.shares)
        n = len(self.shares)
        differences = [n * share + self.value for share in self.shares]
        total, squares = math.fsum(differences), math.fsum(d * d for d in differences)
        return total / (n + 2), math.sqrt(squares + 1 - total**2 / (n + 2)) / (n + 2)

    def p_value(self, seeds: int) -> tuple[str, float]:
        """(Test, p value) of no difference: McNemar's for the accuracies of one pair of models, else paired t, with
        the centre and the standard error of the equivalence test."""
        n = len(self.shares)
        if self.metric in ACCURACIES and seeds == 1:
            differences = [round(n * share + self.value) for share in self.shares]
            better, worse = differences.count(1), differences.count(-1)
            # Of the documents on which the two differ, is either more often right?
            return MCNEMAR, float(stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0
        centre, error = self.centre()
        if error == 0:
            return PAIRED_T, 1.0 if centre == 0 else 0.0
        return PAIRED_T, float(2 * stats.t.sf(abs(centre) / error, n - 1))


def gap(metric: str, scale: Scale, ours: tuple[float, Sequence[float]], theirs: tuple[float, Sequence[float]]) -> Gap:
    """Gap of (value, shares) of two models on the same documents; ``ValueError`` for unequal numbers of them."""
    (a, shares), (b, twin_shares) = ours, theirs
    value = a - b
    if scale == "log_ratio":
        value, shares, twin_shares = math.log(a / b), [s / a for s in shares], [s / b for s in twin_shares]
    return Gap(value, tuple(x - y for x, y in zip(shares, twin_shares, strict=True)), metric)


def pooled(gaps: Sequence[Gap]) -> Gap:
    """Mean over seeds, document by document: the same documents are asked of every seed, and stay the unit."""
    columns = zip(*(seed.shares for seed in gaps), strict=True)
    shares = tuple(math.fsum(column) / len(gaps) for column in columns)
    return Gap(math.fsum(seed.value for seed in gaps) / len(gaps), shares, gaps[0].metric)


def spread(shares: Sequence[float]) -> float:
    """Standard error from the documents' shares: sqrt(n / (n - 1) * sum of squares)."""
    n = len(shares)
    return math.sqrt(n / (n - 1) * math.fsum(share * share for share in shares))


def judge(difference: Gap, rule: Equivalence, seeds: int = 1) -> dict[str, Any]:
    """Test of a gap against no difference and against the margin of its metric, if it has one, as columns of a table.

    ``gap_low`` and ``gap_high`` bound the interval of the equivalence test: 90 % at significance 0.05. On par: the
    interval lies inside the margin, whether or not it holds zero. Different: not on par, and the test of no difference
    rejects. Otherwise the documents do not decide it.
    """
    test, p_value = difference.p_value(seeds)
    centre, error = difference.centre()
    freedom = len(difference.shares) - 1
    reach = float(stats.t.isf(rule.significance, freedom)) * error
    stated = rule.margins.get(difference.metric)
    p_equivalence = verdict = None
    if stated is not None:
        p_equivalence = equivalence_p(centre, error, stated.margin, freedom)
        verdict = DIFFERENT if p_value < rule.significance else NOT_DECIDED
        if p_equivalence < rule.significance:
            verdict = ON_PAR
    return {
        "gap": difference.value,
        "gap_low": centre - reach,
        "gap_high": centre + reach,
        "gap_scale": stated.scale if stated else "difference",
        "test": test,
        "p_value": p_value,
        "margin": stated.margin if stated else None,
        "p_equivalence": p_equivalence,
        "verdict": verdict,
    }


def seed_interval(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """The 95 % t interval of the mean over seeds; Nones for fewer than two."""
    n = len(values)
    if n < 2:
        return None, None
    mean = math.fsum(values) / n
    error = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * error
    return mean - reach, mean + reach


def beats(value: float, stderr: float | None, levels: Sequence[float | None], higher: bool) -> bool | None:
    """Tell if a score's 95 % interval lies beyond every given level; None without a level or an error."""
    known = [level for level in levels if level is not None]
    if stderr is None or not known:
        return None
    distance = value - max(known) if higher else min(known) - value
    return distance > float(stats.norm.ppf((1 + CONFIDENCE) / 2)) * stderr
