"""A shared mask beside its algorithm, written down once more in float64, and what it lets through."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from tests.strategy_cases import follows, gradients, rehearsal, sgd, start, train, weights

LR, DENSITY, B1, B2, EPS = 3e-3, 0.25, 0.9, 0.95, 1e-8


def reference(world: int, steps: int, every: int) -> dict[str, torch.Tensor]:
    theta = start()
    names = [name for name, p in theta.items() if p.dim() == 2]
    size = sum(theta[name].numel() for name in names)
    part = size // world  # a multiple of 8 here
    chosen = math.ceil(DENSITY * part)
    mask = torch.zeros(size, dtype=torch.bool)
    mask[[rank * part + place * part // chosen for rank in range(world) for place in range(chosen)]] = True
    m = torch.zeros(size, dtype=torch.float64)
    errors = [torch.zeros_like(m) for _ in range(world)]
    moments = {name: torch.zeros_like(p) for name, p in theta.items() if p.dim() == 1}
    for step in range(steps):
        found = [gradients(theta, step, rank) for rank in range(world)]
        x = [errors[rank] + torch.cat([found[rank][name].flatten() for name in names]) for rank in range(world)]
        following = torch.zeros_like(mask)
        for rank in range(world):
            statistic = (B1 * m + (1 - B1) * x[rank]).abs()[rank * part : (rank + 1) * part]
            following[rank * part + statistic.argsort(descending=True)[:chosen]] = True
        mean = torch.stack(x).mean(0)
        root = (B2 * m**2 + (1 - B2) * mean**2).sqrt() + EPS
        m = torch.where(mask, B1 * m + (1 - B1) * mean, m)
        moved = torch.where(mask, m / root, 0)
        errors = [torch.where(mask, 0, each) for each in x]
        for name, part_of in zip(names, moved.split([theta[name].numel() for name in names]), strict=True):
            theta[name].sub_(LR * part_of.view(theta[name].shape))
        for name, old in moments.items():
            mean = torch.stack([each[name] for each in found]).mean(0)
            root = (B2 * old**2 + (1 - B2) * mean**2).sqrt() + EPS
            moments[name] = B1 * old + (1 - B1) * mean
            theta[name].sub_(LR * moments[name] / root)
        if (step + 1) % every == 0:
            mask = following
    return theta


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("every", [1, 3])
def test_a_shared_mask_is_its_algorithm(world: int, every: int) -> None:
    settings = {"name": "shared_mask", "density": DENSITY, "every": every}
    follows(settings, reference(world, 20, every), world=world, make=partial(sgd, lr=LR))


def test_matrices_that_are_all_small_are_averaged_in_full() -> None:
    settings = {"name": "shared_mask"}
    few = train(rehearsal(settings, {"min_compression_elements": 10_000}), 3)
    assert few.bytes == 3 * few.dense_bytes and all(bool(each.isfinite().all()) for each in weights(few).values())


def test_no_entry_waits_for_ever() -> None:
    trained = rehearsal({"name": "shared_mask"}, make=partial(sgd, lr=1e-2))
    before = weights(trained)
    after = weights(train(trained, 200))
    assert torch.cat([(after[name] != before[name]).flatten() for name in before]).float().mean() > 0.9
