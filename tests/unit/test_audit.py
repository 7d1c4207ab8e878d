"""docs/audit.md: what follows from the formulas of the two public EDGC codes, next to what this library does.

A number that the page quotes of this library is asserted here; those of the public codes alone were, until commit
f38278a. The formulas are in ``published_formulas``.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edgc.compressors import Channel, Gradient
from edgc.compressors.powersgd.state import random_factor
from edgc.control.policies.cqm import CQMConfig
from edgc.control.policies.released import by_change
from edgc.control.rank_model import StageModel, next_rank
from edgc.entropy.estimators import combine, estimate
from edgc.timing.alignment import LinearTime, align
from edgc.timing.stage_times import RankSearch
from tests.lockstep import reduce_together
from tests.low_rank import power_sgd
from tests.unit import published_formulas as published

WARM_UP, ITERATIONS = published.WARM_UP, published.ITERATIONS


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def correlation(x: list[float], y: list[float]) -> float:
    return float(torch.corrcoef(torch.tensor([x, y], dtype=torch.float64))[0, 1])


def relative(error: Tensor, exact: Tensor) -> float:
    return float(error.norm() / exact.norm())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(-60, 60))
def test_bin_entropy_does_not_see_the_scale(seed: int, exponent: int) -> None:
    x = noise(seed, 2000)
    scaled = x * 2.0**exponent
    assert published.bin_entropy(scaled) == pytest.approx(published.bin_entropy(x), abs=1e-9)
    moved = estimate(scaled, "gaussian") - estimate(x, "gaussian")
    assert moved == pytest.approx(exponent * math.log(2), abs=1e-4)


@pytest.mark.parametrize("power", [1, 3], ids=["normal", "heavy tails"])
def test_estimator_released_is_the_same_formula(power: int) -> None:
    for seed in range(5):
        x = noise(seed, 50_000) ** power
        # Entries within rounding of a bin's edge may fall on either side of it.
        assert estimate(x, "released") == pytest.approx(published.bin_entropy(x), abs=1e-3)


def test_bin_entropy_is_differential_entropy_less_the_log_of_a_bin() -> None:
    x = noise(1, 1_000_000)
    width = float(x.max() - x.min()) / 1000
    bias = 400 / 1_000_000  # of the plug-in estimate, (K - 1) / 2n for at most 800 occupied bins
    exact = 0.5 * math.log(2 * math.pi * math.e) - math.log(width)
    assert published.bin_entropy(x) == pytest.approx(exact, abs=bias + 3e-3)
    outlier = x.clone()
    outlier[x.argmax()] *= 10
    before, after = published.bin_entropy(x), published.bin_entropy(outlier)
    range_grew = float(outlier.max() - outlier.min()) / (1000 * width)
    assert before - after == pytest.approx(math.log(range_grew), abs=0.01)
    assert before - after == pytest.approx(1.7, abs=0.1)  # quoted
    assert abs(estimate(outlier, "gaussian") - estimate(x, "gaussian")) < 0.01


def test_bin_entropy_does_not_follow_a_growing_gradient() -> None:
    log_sigma = [-8 + 2 * t / 300 for t in range(300)]
    gradients = [math.exp(s) * noise(t, 4000) for t, s in enumerate(log_sigma)]
    # 300 windows of independent entries: a correlation of zero is measured as within 0.058, one standard deviation.
    blind = correlation([published.bin_entropy(g) for g in gradients], log_sigma)
    assert abs(blind) < 0.23
    assert blind == pytest.approx(-0.03, abs=0.01)  # quoted
    assert correlation([estimate(g, "gaussian") for g in gradients], log_sigma) > 0.999
    assert correlation([estimate(g, "histogram") for g in gradients], log_sigma) > 0.99


def test_pooled_entries_measure_the_mixture() -> None:
    layers = [scale * noise(k, 40_000) for k, scale in enumerate((1.0, 0.1, 0.01, 0.001))]
    per_layer = combine([estimate(x, "gaussian") for x in layers], [x.numel() for x in layers])
    pooled = estimate(torch.cat(layers), "gaussian")
    assert pooled - per_layer == pytest.approx(2.77, abs=0.02)
    # All layers but the largest shrink a thousandfold: the pooled value does not move.
    smaller = [layers[0], *(x / 1000 for x in layers[1:])]
    assert abs(estimate(torch.cat(smaller), "gaussian") - pooled) < 0.01
    assert combine([estimate(x, "gaussian") for x in smaller], [1] * 4) - per_layer < -5


def test_entropy_after_reduction_depends_on_the_rank() -> None:
    gradient = noise(3, 256, 256)
    full = estimate(gradient, "gaussian")
    for rank, quoted in ((4, -1.73), (16, -1.06), (64, -0.41)):
        received, _ = published.reducer_step([gradient], random_factor(0, 0, "w", 256, rank))
        drop = estimate(received, "gaussian") - full
        assert drop == pytest.approx(quoted, abs=0.03)
        # The same gradient, another rank: half the logarithm of the share of its energy that got across.
        assert drop == pytest.approx(math.log(relative(received, gradient)), abs=1e-3)


def first_windows(ranks_tried: int) -> list[float]:
    """Means of the first two windows of the list of entropies, every gradient's entropy being 5 nats."""
    last = 11 + 3 * ranks_tried
    values = [
        published.recorded(5.0, published.compressed_in_search(t) and t <= last)
        for t in range(0, 2 * published.WINDOW, published.SAMPLED_EVERY)
    ]
    half = len(values) // 2
    return [sum(values[:half]) / half, sum(values[half:]) / half]


def test_first_windows_hold_zeros() -> None:
    assert first_windows(6) == [0.0, 0.0]
    with pytest.raises(ZeroDivisionError):
        published.linear_rank(16, 64, [*first_windows(6), 5.0], [])
    # Iteration 30 is the first that is both sampled and compressed; only a search of 7 ranks or more gets there.
    assert first_windows(7) == [0.05, 0.0]
    assert published.linear_rank(16, 64, [*first_windows(7), 0.0], [64]) == 60
    # After the search, one sampled iteration is compressed in the whole run.
    sampled = range(WARM_UP, ITERATIONS, published.SAMPLED_EVERY)
    assert [t for t in sampled if published.compressed_after_search(t)] == [WARM_UP]
    target = by_change("entropy", 16, 64, [0.0, 0.0], 0.0, 5.0)
    assert target.target is None  # ours leaves the rank where the published formula divides by zero


# ------------------------------------------------------------------------------------------ 4: the linear rule

HEIGHTS = st.floats(-8, 8).map(lambda h: round(h, 3))


@settings(deadline=None)
@given(st.lists(HEIGHTS, min_size=3, max_size=8), st.integers(2, 16).map(lambda k: 8 * k))
def test_policy_released_is_the_linear_rule(windows: list[float], r_max: int) -> None:
    first, second, previous, last = *windows[:2], *windows[-2:]
    ours = by_change("entropy", r_max // 4, r_max, [first, second], previous, last)
    if first == second:
        assert ours.target is None
        return
    assert ours.target is not None
    theirs = published.linear_rank(r_max // 4, r_max, windows, [r_max], step=r_max)
    assert -2.5 <= theirs - ours.target <= 0.5 + 1e-9  # rounded to whole ranks, then down to an even one


def test_linear_rule_has_no_direction_and_no_shape() -> None:
    windows = [-6.0, -7.0, -7.02]
    falling = published.linear_rank(16, 64, windows, [64], step=64)
    rising = published.linear_rank(16, 64, [*windows[:2], -6.98], [64], step=64)
    assert falling == rising == 16
    asked = {}
    for size in (1024, 4096):
        stage = StageModel([(size, size)])
        for change in (-0.02, 0.02):
            asked[size, change] = next_rank(stage, 64, -7.0, -7.0 + change)
    assert asked[1024, -0.02] == pytest.approx(53, abs=0.5)
    assert asked[1024, 0.02] == pytest.approx(75, abs=0.5)
    assert asked[4096, -0.02] == pytest.approx(21, abs=0.5)
    assert asked[4096, 0.02] == pytest.approx(107, abs=0.6)


def test_linear_rule_does_not_keep_the_error() -> None:
    # Entropy falls once and then stays: nothing changes any more, and the rule still goes down to r_min.
    windows, ranks, stage = [-6.0, -7.0], [64], StageModel([(1024, 1024)])
    while len(windows) < 20:
        windows.append(-7.0)
        ranks.append(published.linear_rank(16, 64, windows, ranks))
    assert ranks[:13] == list(range(64, 12, -4))
    assert set(ranks[12:]) == {16}
    assert stage.error(16) / stage.error(64) == pytest.approx(1.092, abs=0.002)
    assert next_rank(stage, 64, -7.0, -7.0) == pytest.approx(64)


def sent_in(steps: int, gradient: Tensor, rank: int, rebuilt: bool) -> Tensor:
    """Sum of what gets across of a constant gradient."""
    compressor, total = power_sgd(min_elements=1), torch.zeros_like(gradient)
    for _ in range(steps):
        if rebuilt:
            compressor = power_sgd(min_elements=1)
        buffer = Gradient("w", gradient.clone())
        compressor.reduce([buffer], Channel(None), rank)
        total += buffer.tensor
    return total


def test_rebuilt_reducer_never_sends_the_rest() -> None:
    gradient, steps = noise(4, 128, 128), 200
    missing = {
        rebuilt: relative(steps * gradient - sent_in(steps, gradient, 8, rebuilt), steps * gradient)
        for rebuilt in (False, True)
    }
    assert missing[False] == pytest.approx(0.04, abs=0.01)
    assert missing[True] == pytest.approx(0.94, abs=0.01)
    # Rebuilt with one seed it sends the same matrix again and again: more steps change nothing.
    once = relative(gradient - sent_in(1, gradient, 8, True), gradient)
    assert missing[True] == pytest.approx(once, rel=1e-4)


def test_rebuilt_reducer_starts_from_noise() -> None:
    best = 1 - sum(1 / k for k in range(1, 9)) / sum(1 / k for k in range(1, 129))
    assert best == pytest.approx(0.50, abs=0.005)
    for seed in range(5):
        gradient = published.with_spectrum([k**-0.5 for k in range(1, 129)], 128, generator(seed)).float()
        kept, lost = power_sgd(min_elements=1, error_feedback=False), []
        for _ in range(6):
            buffer = Gradient("w", gradient.clone())
            kept.reduce([buffer], Channel(None), 8)
            lost.append(relative(gradient - buffer.tensor, gradient) ** 2)
        assert 0.70 < lost[0] < 0.78  # a new reducer, at every step
        assert lost[-1] < best + 0.01


def test_search_over_equal_times_ends_by_chance() -> None:
    # Independent times, whatever their distribution: the search still runs after k ranks if the first of k + 1 times
    # is the largest.
    times = torch.rand(200_000, 8, generator=generator(9))
    for k in (1, 2, 6):
        runs_on = float((times[:, 1 : k + 1] <= times[:, :1]).all(1).double().mean())
        assert runs_on == pytest.approx(1 / (k + 1), abs=0.005)
    # The crossing of times that depend on the rank is found wherever it is.
    for crossing in (9.0, 30.0, 100.0):
        search = RankSearch(512, 4, 2, stop_at_crossing=True)
        while (rank := search.probe) is not None:
            search.observe([1.0 if rank == 0 else 0.2 + 0.8 * rank / crossing])
        assert search.r_max()[0] == crossing // 4 * 4


@given(st.integers(4, 512).map(lambda k: 4 * k))
def test_lower_rank_is_a_quarter(r_max: int) -> None:
    ours = CQMConfig(r_max=r_max).lower_rank(r_max)
    assert 0 <= r_max / 4 - ours < 4
    # The published floor holds up to the rounding to even ranks.
    lowest = published.linear_rank(r_max / 4, r_max, [0.0, 1.0, 1.0], [8], step=r_max)
    assert 0 <= r_max / 4 - lowest < 2


@settings(deadline=None)
@given(st.floats(1e-4, 1e-2), st.floats(0, 0.1), st.integers(1, 16).map(lambda k: 4 * k), st.floats(1e-4, 0.05))
def test_stage_rank_exceeds_its_time_budget(slope: float, fixed: float, first: int, t_b: float) -> None:
    line = LinearTime(slope, fixed)
    ours = align(first, 4, [t_b] * 4, [line] * 4, [math.inf] * 4, r_max=10**9)
    for stage in range(1, 4):
        budget = line.time(first) + stage * t_b  # the paper's, and that of both codes
        theirs, own = published.stage_rank(line.rank(budget) * (1 + 1e-12)), ours[stage]
        assert own is not None
        assert line.time(own) <= budget * (1 + 1e-6) < line.time(theirs) + 1e-6 * budget
        assert theirs == own + 4
        assert line.time(theirs) - budget <= 4 * slope * (1 + 1e-6)


def test_loss_rule_goes_to_the_lower_rank_whatever_the_gradients_do() -> None:
    losses, ranks = published.loss_windows(10.0, 3.0, 0.5, 40), [64]
    for k in range(3, len(losses) + 1):
        ranks.append(published.linear_rank(16, 64, losses[:k], ranks))
    assert ranks[:12] == list(range(64, 16, -4))
    assert ranks[12] == 18
    assert set(ranks[13:]) == {16}
    stage = StageModel([(1024, 1024)])
    rising, falling = (next_rank(stage, 64, -7.0, -7.0 + change) for change in (0.05, -0.05))
    assert rising == pytest.approx(91, abs=0.6)
    assert falling == pytest.approx(37, abs=0.6)


def test_vectors_left_out_of_the_reduction_differ() -> None:
    vectors = [noise(20 + w, 32) for w in range(2)]
    left = [v.clone() for v in vectors]  # "remain unchanged"
    assert relative(left[0] - left[1], left[0]) > 0.5
    ours = [[Gradient("bias", v.clone()), Gradient("w", noise(30 + w, 48, 48))] for w, v in enumerate(vectors)]
    reduce_together([power_sgd(), power_sgd()], ours, 4)
    assert torch.equal(ours[0][0].tensor, ours[1][0].tensor)
    assert torch.allclose(ours[0][0].tensor, torch.stack(vectors).mean(0))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_one_step_of_the_published_reducer_is_ours(workers: int) -> None:
    matrices = [noise(40 + w, 96, 64) for w in range(workers)]
    gradients = [[Gradient("w", m.clone())] for m in matrices]
    compressors = [power_sgd(min_elements=1) for _ in matrices]
    reduce_together(compressors, gradients, 8)
    received, kept = published.reducer_step(matrices, random_factor(0, 1, "w", 64, 8))
    for own in gradients:
        assert relative(own[0].tensor - received, received) < 1e-5
    # Error feedback differs worker by worker, its mean does not.
    ours = torch.stack([compressor.errors["w"] for compressor in compressors])
    assert relative(ours.mean(0) - torch.stack(kept).mean(0), ours.mean(0)) < 1e-5
    spread = relative(ours[0] - kept[0], ours[0])
    assert (spread < 1e-5) if workers == 1 else (spread > 0.1)
