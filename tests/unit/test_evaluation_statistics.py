"""Paired tests and equivalence, against closed forms, enumeration, the bootstrap and simulated error rates."""

from __future__ import annotations

import math
from math import comb
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from edgc.errors import UserError
from experiments.common.equivalence import NOT_DECIDED, ON_PAR, Equivalence, equivalence_p, load_equivalence
from experiments.evaluation import statistics as es

RULE = load_equivalence()


def answers(ours: np.ndarray, theirs: np.ndarray) -> es.Gap:
    """The gap in accuracy of two vectors of right (1) and wrong (0)."""

    def scored(right: np.ndarray) -> tuple[float, list[float]]:
        value = float(right.mean())
        shares = es.influence("acc", [{"acc": float(r)} for r in right], value)
        assert shares is not None
        return value, shares

    return es.gap("acc", "difference", scored(ours), scored(theirs))


def discordant(better: int, worse: int, n: int) -> es.Gap:
    ours, theirs = np.zeros(n), np.zeros(n)
    ours[:better] = 1
    theirs[better : better + worse] = 1
    return answers(ours, theirs)


@settings(deadline=None)
@given(st.integers(0, 10), st.integers(0, 10), st.integers(25, 60))
def test_accuracies_of_one_seed_are_tested_on_the_documents_that_differ(better: int, worse: int, n: int) -> None:
    found = discordant(better, worse, n)
    finding = es.judge(found, RULE)
    assert finding["test"] == es.MCNEMAR
    weights = [comb(better + worse, k) for k in range(better + worse + 1)]
    as_rare = sum(weight for weight in weights if weight <= weights[better])  # the enumerated binomial
    assert finding["p_value"] == pytest.approx(as_rare / 2 ** (better + worse))
    # Agresti and Min, equation for the adjusted interval.
    b, c, total = better + 0.5, worse + 0.5, n + 2
    error = math.sqrt(b + c - (b - c) ** 2 / total) / total
    centre, width = (b - c) / total, stats.t.ppf(0.95, n - 1) * error
    assert (finding["gap_low"], finding["gap_high"]) == pytest.approx((centre - width, centre + width))


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=20))
def test_a_model_has_no_gap_to_itself(losses: list[float]) -> None:
    value = math.exp(math.fsum(losses) / len(losses))
    shares = es.influence("perplexity", [{"perplexity": -loss} for loss in losses], value)
    assert shares is not None
    for scale in ("difference", "log_ratio"):
        found = es.gap("perplexity", scale, (value, shares), (value, shares))
        finding = es.judge(found, RULE)
        assert found.value == 0.0 and set(found.shares) == {0.0}
        assert (finding["p_value"], finding["verdict"]) == (1.0, ON_PAR)


def test_verdicts() -> None:
    assert es.judge(discordant(2, 2, 1000), RULE)["verdict"] == ON_PAR
    assert es.judge(discordant(2, 2, 40), RULE)["verdict"] == NOT_DECIDED, "as equal, but of too few documents"
    assert es.judge(discordant(20, 100, 1000), RULE)["verdict"] == es.DIFFERENT
    assert es.judge(discordant(100, 20, 1000), RULE)["verdict"] == es.DIFFERENT, "better is different too"
    significant = es.judge(discordant(0, 12, 4000), RULE)
    assert significant["p_value"] < 0.001 and significant["verdict"] == ON_PAR, "seen, and within the margin"
    unstated = Equivalence(significance=0.05, margins={})
    assert es.judge(discordant(1, 2, 100), unstated)["verdict"] is None


@settings(deadline=None)
@given(st.floats(-0.1, 0.1), st.floats(1e-4, 0.1), st.floats(0.001, 0.1), st.floats(1.01, 5), st.integers(2, 400))
def test_a_wider_margin_never_makes_equivalence_harder(
    centre: float, error: float, margin: float, factor: float, freedom: int
) -> None:
    narrow = equivalence_p(centre, error, margin, freedom)
    assert equivalence_p(centre, error, factor * margin, freedom) <= narrow
    inside = abs(centre) + stats.t.ppf(0.95, freedom) * error < margin
    assert inside == (narrow < 0.05)


def test_a_gap_as_large_as_the_margin_is_rarely_called_on_par() -> None:
    draw = np.random.default_rng(3)
    margin = RULE.margins["acc"].margin
    n, repeats, called = 400, 400, 0
    for _ in range(repeats):
        outcome = draw.choice([1, -1, 0], size=n, p=[0.02 + margin, 0.02, 0.96 - margin])
        called += es.judge(answers((outcome == 1) * 1.0, (outcome == -1) * 1.0), RULE)["verdict"] == ON_PAR
    assert called / repeats < 0.05 + 3 * math.sqrt(0.05 * 0.95 / repeats)


@pytest.mark.parametrize("metric", ["byte_perplexity", "bits_per_byte", "perplexity"])
def test_the_interval_of_a_perplexity_gap_agrees_with_the_paired_bootstrap(metric: str) -> None:
    draw = np.random.default_rng(0)
    n = 300
    weights = draw.integers(200, 2000, size=n).astype(float) if metric != "perplexity" else np.ones(n)
    base = weights * (1.5 + 0.3 * draw.standard_normal(n))
    ours = base * (1.01 + 0.02 * draw.standard_normal(n))

    def score(losses: np.ndarray, at: np.ndarray) -> np.ndarray:
        rate = losses[at].sum(-1) / weights[at].sum(-1)
        return rate / math.log(2) if metric == "bits_per_byte" else np.exp(rate)

    def scored(losses: np.ndarray) -> tuple[float, list[float]]:
        value = float(score(losses, np.arange(n)))
        rows = [{metric: -a if metric == "perplexity" else (-a, b)} for a, b in zip(losses, weights, strict=True)]
        shares = es.influence(metric, rows, value)
        assert shares is not None
        return value, shares

    scale = RULE.margins[metric].scale
    found = es.gap(metric, scale, scored(ours), scored(base))
    at = draw.integers(0, n, size=(6000, n))
    a, b = score(ours, at), score(base, at)
    gaps = np.log(a / b) if scale == "log_ratio" else a - b
    assert es.spread(found.shares) == pytest.approx(float(gaps.std()), rel=0.06)
    finding = es.judge(found, RULE)
    low, high = np.quantile(gaps, [0.05, 0.95])
    assert (finding["gap_low"], finding["gap_high"]) == pytest.approx((float(low), float(high)), rel=0.06)
    # Paired: the documents' own difficulty, much larger than the gap, is not in the interval.
    assert es.spread(found.shares) < 0.2 * es.spread(scored(base)[1])


def test_pooling_keeps_the_documents_as_units() -> None:
    one, other = discordant(3, 9, 200), discordant(5, 6, 200)
    again = es.pooled([one, one, one])
    assert again.value == pytest.approx(one.value)
    # The same answers from three seeds are no more evidence than from one.
    assert again.centre() == pytest.approx(one.centre())
    both = es.pooled([one, other])
    assert both.value == pytest.approx((one.value + other.value) / 2)
    plain = [200 * share + both.value for share in both.shares]
    # Half a document more in each of the four cells; every document twice, so that these halves are whole ones.
    more = np.array([*plain, *plain, 1, -1, 0, 0])
    t = abs(more.mean()) / (more.std() / math.sqrt(202))
    found = es.judge(both, RULE, 2)
    assert found["p_value"] == pytest.approx(2 * stats.t.sf(t, 199))
    # One standard error for both: what excludes zero at 90 % is what p < 0.1 says.
    assert (found["gap_low"] <= 0 <= found["gap_high"]) == (found["p_value"] >= 0.1)
    assert es.judge(both, RULE, 2)["test"] == es.PAIRED_T


def test_different_documents_are_not_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        es.gap("acc", "difference", (0.5, [0.1, -0.1]), (0.5, [0.0]))


def test_one_seed_has_no_interval() -> None:
    assert es.seed_interval([0.1]) == (None, None)
    values = [0.1, -0.03, 0.07]
    expected = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert es.seed_interval(values) == pytest.approx(expected)


def test_above_chance_needs_the_whole_interval() -> None:
    assert es.beats(0.3, 0.02, [0.25, None], higher=True) is True
    assert es.beats(0.3, 0.02, [0.25, 0.27], higher=True) is False
    assert es.beats(2.0, 0.1, [3.0], higher=False) is True
    assert es.beats(2.9, 0.1, [3.0], higher=False) is False
    assert es.beats(0.3, None, [0.25], higher=True) is es.beats(0.3, 0.1, [None], higher=True) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("significance: 0.05\nmargins: {acc: {margin: 0, scale: difference}}\n", "margin"),
        ("significance: 0.05\nmargins: {acc: {margin: 0.1, scale: percent}}\n", "scale"),
        ("significance: 0.7\nmargins: {}\n", "significance"),
    ],
)
def test_bad_margins_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "equivalence.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_equivalence(path)
