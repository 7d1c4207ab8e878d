"""1-bit Adam beside its algorithm, written down once more in float64, and entries without a variance."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from tests.strategy_cases import follows, gradients, rehearsal, sgd, start, train, weights

LR, WARMUP, B1, B2, EPS = 3e-3, 5, 0.9, 0.999, 1e-8


def signs(vector: torch.Tensor) -> torch.Tensor:
    """Signs of 64 entries times their mean magnitude, which is sent in bfloat16."""
    blocks = vector.view(-1, 64)
    scale = blocks.abs().mean(1, keepdim=True).bfloat16().double()
    return torch.where(blocks >= 0, scale, -scale).flatten()


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.nn.functional.pad(t.flatten(), (0, -t.numel() % 64)) for t in tensors.values()])


def reference(world: int, steps: int) -> dict[str, torch.Tensor]:
    theta = start()
    ones = flat({name: torch.ones_like(p) for name, p in theta.items()})
    length = math.ceil(len(ones) / (512 * world)) * 512 * world
    real = torch.nn.functional.pad(ones, (0, length - len(ones)))
    m, v, server = (torch.zeros(length, dtype=torch.float64) for _ in range(3))
    errors = [torch.zeros_like(m) for _ in range(world)]
    for step in range(steps):
        found = [flat(gradients(theta, step, rank)) for rank in range(world)]
        found = [torch.nn.functional.pad(each, (0, length - len(each))) for each in found]
        if step < WARMUP:
            mean = torch.stack(found).mean(0)
            m, v = B1 * m + (1 - B1) * mean, B2 * v + (1 - B2) * mean**2
        else:
            total = server
            for rank in range(world):
                x = (B1 * m + (1 - B1) * found[rank] + errors[rank]) * real
                errors[rank] = x - signs(x)
                total = total + signs(x) / world
            m, server = signs(total), total - signs(total)
        moved, begin = m / (v.sqrt() + EPS), 0
        for weight in theta.values():
            weight.sub_(LR * moved[begin : begin + weight.numel()].view(weight.shape))
            begin += math.ceil(weight.numel() / 64) * 64
        m = m * real
    return theta


@pytest.mark.parametrize("world", [2, 4])
def test_onebit_adam_is_its_algorithm(world: int) -> None:
    settings = {"name": "onebit_adam", "warmup_steps": WARMUP}
    # What travels is fp32, and the reference is not; a sign that differed would show as 1e-2.
    follows(settings, reference(world, 20), world=world, make=partial(sgd, lr=LR), within=1e-5)


def test_an_entry_without_a_variance_stays_as_it_is() -> None:
    trained = rehearsal({"name": "onebit_adam", "warmup_steps": 2}, make=partial(sgd, lr=LR))
    first = next(iter(trained.models[0].parameters()))
    before = first[3].detach().clone()
    hook = first.register_hook(lambda gradient: gradient * (torch.arange(len(gradient)) != 3)[:, None])
    train(trained, 5)
    hook.remove()  # a row that had no gradient while the variance was made has one now
    train(trained, 20)
    assert torch.equal(first[3], before)
    assert all(p.isfinite().all() and p.abs().max() < 10 for p in weights(trained).values())
