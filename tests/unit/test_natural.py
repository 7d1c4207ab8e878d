"""Natural compression against its paper: powers of two, unbiased, with a variance of at most an eighth."""

from __future__ import annotations

import math

import pytest
import torch

from edgc.compressors import Gradient
from edgc.compressors.natural import NaturalConfig, Powers
from tests.lockstep import reduce_together


def through(x: torch.Tensor, seed: int) -> torch.Tensor:
    powers, out = Powers(), torch.empty_like(x)
    message = torch.empty(powers.bytes(x.numel()), dtype=torch.uint8)
    powers.pack(x, message, generator=torch.Generator().manual_seed(seed))
    powers.unpack(message, out)
    return out


def test_an_entry_becomes_one_of_the_two_powers_around_it() -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 5000)
    sent = through(x, 1)
    low = torch.exp2(torch.floor(torch.log2(x.abs().double()))).float()
    assert torch.equal(sent.sign(), x.sign())
    assert bool(((sent.abs() == low) | (sent.abs() == 2 * low)).all())
    assert 0.2 < float((sent.abs() == 2 * low).float().mean()) < 0.8
    assert torch.equal(through(torch.exp2(torch.arange(-126.0, 128.0)), 2), torch.exp2(torch.arange(-126.0, 128.0)))


def test_it_is_unbiased_with_a_variance_of_at_most_an_eighth() -> None:
    """Between a and 2a, E (C(x) - x)^2 = (x - a)(2a - x), which is largest against x^2 at x = 4a/3: an eighth."""
    rounds, worst = 4000, 4 / 3
    x = torch.tensor([1.0, 1.1, 1.25, worst, 1.5, 1.9, -worst, -1.75, 3e-39, 0.0])
    sent = torch.stack([through(x, seed) for seed in range(rounds)]).double()
    off, variance = sent.mean(dim=0) - x.double(), (sent - x.double()).square().mean(dim=0)
    a = torch.exp2(torch.floor(torch.log2(x.abs().double())))
    exact = (x.abs().double() - a) * (2 * a - x.abs().double())
    for i in range(len(x) - 2):
        assert abs(float(off[i])) <= 5 * math.sqrt(float(exact[i]) / rounds) + 1e-12, float(x[i])
        assert float(variance[i]) == pytest.approx(float(exact[i]), rel=0.1, abs=1e-12)
        assert float(exact[i]) <= float(x[i]) ** 2 / 8 + 1e-12
    assert float(exact[3]) == pytest.approx(worst**2 / 8), "the bound is met"
    # Below the smallest normal number: 0 or that number.
    smallest = torch.finfo(torch.float32).tiny
    assert set(sent[:, -2].tolist()) == {0.0, smallest} and not sent[:, -1].any()
    assert float(sent[:, -2].mean()) == pytest.approx(3e-39, rel=0.1)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so_and_nothing_else_becomes_it(bad: float) -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([largest, -largest, 1.0] * 40)
    for seed in range(20):
        assert through(x, seed).abs().amax() == 2.0**127
    x[7] = bad
    sent = through(x, 0)
    assert not sent[7].isfinite() and int(sent.isfinite().sum()) == len(x) - 1
    message = torch.empty(Powers().bytes(len(x)), dtype=torch.uint8)
    Powers().pack(x, message)
    assert not Powers().finite(message)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 1000])
def test_nine_bits_an_entry_and_the_rest_is_kept(length: int) -> None:
    x, powers = torch.randn(length, generator=torch.Generator().manual_seed(3)), Powers()
    assert powers.bytes(length) == 9 * math.ceil(length / 8)
    message = torch.empty(powers.bytes(length) + 18, dtype=torch.uint8)
    kept, out, twice = torch.empty_like(x), torch.empty_like(x), torch.ones_like(x)
    powers.pack(x, message, residual=kept)
    powers.unpack(message, out)
    assert torch.equal(out + kept, x) and bool(kept.any())
    powers.unpack(message, twice, weight=0.5, add=True)
    assert torch.equal(twice, 1 + 0.5 * out)


def test_the_mean_of_two_workers_has_the_variance_of_its_two_roundings() -> None:
    gradients = [torch.randn(64, 64, generator=torch.Generator().manual_seed(w)) for w in range(2)]
    exact = sum(gradients) / 2
    workers = [NaturalConfig(min_compression_elements=16).build() for _ in range(2)]
    errors = []
    for _ in range(200):
        copies = [[Gradient("p", gradient.clone())] for gradient in gradients]
        reduce_together(workers, copies, 1)
        errors.append(copies[0][0].tensor - exact)
    every = torch.stack(errors)
    first = sum(gradient.square().sum() for gradient in gradients) / 4 / 8
    bound = float(first + (exact.square().sum() + first) / 8)
    assert 0.2 * bound < float(every.square().sum(dim=(1, 2)).mean()) < bound
    assert float(every.mean(dim=0).norm()) < 2 * float(every.norm()) / len(every)
