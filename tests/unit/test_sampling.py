"""edgc.entropy.sampler: rates, coverage, seeds, and that a sample is enough."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgc.entropy.estimators import estimate
from edgc.entropy.sampler import MAX_COPIES, Sampler
from edgc.sections import EntropyConfig


def sampler(sampling: str = "diagonal", alpha: float = 0.1, beta: float = 0.25, seed: int = 0) -> Sampler:
    return Sampler(EntropyConfig(sampling=sampling, iteration_rate=alpha, entry_rate=beta, seed=seed))


@pytest.mark.parametrize("k", [1, 3, 10, 49, 1000])
def test_every_kth_iteration_and_every_entry_in_turn_at_rates_of_one_in_k(k: int) -> None:
    gds, x = sampler("strided", alpha=1 / k), torch.arange(64.0)
    iterations = [*range(1, 3 * k + 2), *range(230_000 - k, 230_001)]
    assert [i for i in iterations if gds.measures(i)] == [i for i in iterations if i % k == 0]
    first = int(gds.take(x, 0, "w")[0])
    for i in iterations:
        assert int(gds.take(x, i, "w")[0]) == (first + i // k) % 4


@settings(max_examples=200, deadline=None)
@given(alpha=st.floats(1e-3, 1.0), start=st.integers(0, 10**7), window=st.integers(1, 3000))
def test_any_rate_is_kept_in_any_stretch_of_iterations(alpha: float, start: int, window: int) -> None:
    gds = sampler(alpha=alpha)
    count = sum(gds.measures(i) for i in range(start + 1, start + window + 1))
    assert abs(count - alpha * window) < 1 + 1e-6
    assert count > 0 or alpha * window < 1


def test_random_iterations_follow_rate_and_seed() -> None:
    chosen = [i for i in range(1, 20_001) if sampler("random").measures(i)]
    assert 0.09 < len(chosen) / 20_000 < 0.11
    assert len({b - a for a, b in pairwise(chosen)}) > 10
    assert chosen == [i for i in range(1, 20_001) if sampler("random").measures(i)]
    assert chosen != [i for i in range(1, 20_001) if sampler("random", seed=1).measures(i)]
    assert all(sampler("random", alpha=1.0).measures(i) for i in range(1, 100))


@pytest.mark.parametrize("sampling", ["diagonal", "strided"])
@pytest.mark.parametrize(("alpha", "shape"), [(0.1, (1003,)), (0.25, (17, 59)), (0.67, (3, 5, 7)), (1.0, (2, 50))])
def test_entries_take_turns(alpha: float, sampling: str, shape: tuple[int, ...]) -> None:
    x = torch.arange(float(math.prod(shape))).reshape(shape)
    gds = sampler(sampling, alpha=alpha, beta=0.25)
    measured = [i for i in range(1, 200) if gds.measures(i)][:4]
    seen = torch.cat([gds.take(x, i, "w") for i in measured])
    assert torch.equal(seen.sort().values, x.flatten())
    if sampling == "strided":
        assert gds.take(x, measured[0], "w").data_ptr() in {x.view(-1)[k:].data_ptr() for k in range(4)}


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 60),
    columns=st.integers(1, 60),
    stride=st.integers(1, MAX_COPIES),
    iteration=st.integers(1, 500),
)
def test_a_diagonal_sample_has_the_same_share_of_every_row_and_column(
    rows: int, columns: int, stride: int, iteration: int
) -> None:
    x = torch.arange(float(rows * columns)).reshape(rows, columns)
    taken = sampler(beta=1 / stride).take(x, iteration, "w")
    if stride > x.numel():
        return
    hits = torch.zeros(rows * columns)
    hits[taken.long()] += 1
    hits = hits.reshape(rows, columns)
    for counts, length in ((hits.sum(1), columns), (hits.sum(0), rows)):
        assert length // stride <= counts.min() <= counts.max() <= -(-length // stride)


def test_columns_that_differ_do_not_mislead_a_diagonal_sample() -> None:
    """A stride that divides the width reads a quarter of the columns; the columns of gradients differ in size."""
    size = torch.linspace(-2, 2, 128).roll(1).exp()[torch.randperm(128, generator=torch.Generator().manual_seed(2))]
    error = {}
    for rule in ("diagonal", "strided", "random"):
        differences = []
        for draw in range(20):
            x = torch.randn(64, 128, generator=torch.Generator().manual_seed(draw)) * size
            taken = sampler(rule, alpha=1.0, beta=0.25, seed=draw).take(x, 1, "w")
            differences.append(estimate(taken, "gaussian") - estimate(x, "gaussian"))
        error[rule] = torch.tensor(differences).square().mean().sqrt()
    assert error["diagonal"] < 1.2 * error["random"] < error["strided"] / 3


@settings(max_examples=150, deadline=None)
@given(
    numel=st.integers(1, 3000),
    beta=st.floats(0.001, 1.0),
    iteration=st.integers(1, 10**6),
    seed=st.integers(0, 2**40),
    sampling=st.sampled_from(["diagonal", "strided", "random"]),
)
def test_samples_have_the_asked_size_and_no_repeats(
    numel: int, beta: float, iteration: int, seed: int, sampling: str
) -> None:
    x = torch.arange(float(numel), dtype=torch.float64)
    taken = sampler(sampling, beta=beta, seed=seed).take(x, iteration, "layer.weight")
    assert taken.dim() == 1
    assert taken.unique().numel() == taken.numel() >= 1
    assert abs(taken.numel() - beta * numel) <= 1
    assert torch.equal(taken, sampler(sampling, beta=beta, seed=seed).take(x, iteration, "layer.weight"))


def test_random_entries_depend_on_seed_key_and_iteration_only() -> None:
    x = torch.arange(10_000.0)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first = sampler("random").take(x, 10, "a")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(4)
    assert torch.equal(sampler("random").take(x, 10, "a"), first)
    for other in (
        sampler("random").take(x, 11, "a"),
        sampler("random").take(x, 10, "b"),
        sampler("random", seed=1).take(x, 10, "a"),
    ):
        assert not torch.equal(other, first)


@pytest.mark.parametrize("sampling", ["diagonal", "strided", "random"])
def test_every_entry_is_equally_likely(sampling: str) -> None:
    x, gds = torch.arange(30.0), sampler(sampling, alpha=1.0, beta=0.3)
    hits = torch.zeros(30)
    for iteration in range(1, 3001):
        hits[gds.take(x, iteration, "w").long()] += 1
    assert hits.sum() == 9 * 3000
    assert 0.85 * 900 < float(hits.min()) <= float(hits.max()) < 1.15 * 900


@pytest.mark.parametrize("sampling", ["diagonal", "strided", "random"])
def test_a_quarter_of_the_entries_is_enough(sampling: str) -> None:
    uniform = torch.rand(400_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = torch.distributions.Laplace(0.0, 1.0).icdf(uniform.clamp(1e-12))
    taken = sampler(sampling).take(x.reshape(400, 1000), 10, "w")
    assert taken.numel() == 100_000
    for estimator in ("histogram", "gaussian", "vasicek"):
        assert abs(estimate(taken, estimator) - estimate(x, estimator)) < 0.02, estimator
