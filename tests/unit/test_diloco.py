"""DiLoCo beside its algorithm, written down once more in float64."""

from __future__ import annotations

import pytest
import torch

from tests.strategy_cases import adamw, distance, gradients, rehearsal, start, train, weights


def reference(world: int, steps: int, every: int, lr: float, momentum: float) -> dict[str, torch.Tensor]:
    anchor, velocity = start(), {name: torch.zeros_like(p) for name, p in start().items()}
    local = [start() for _ in range(world)]
    inner = [torch.optim.AdamW(each.values(), lr=3e-3) for each in local]
    for step in range(steps):
        for rank, each in enumerate(local):
            for name, gradient in gradients(each, step, rank).items():
                each[name].grad = gradient
            inner[rank].step()
        if (step + 1) % every == 0:
            for name, weight in anchor.items():
                delta = sum(weight - each[name] for each in local) / world
                velocity[name] = momentum * velocity[name] + delta
                anchor[name] = weight - lr * (delta + momentum * velocity[name])
                for each in local:
                    each[name].data.copy_(anchor[name])
    return anchor


@pytest.mark.parametrize("world", [2, 4])
def test_diloco_is_its_algorithm(world: int) -> None:
    settings = {"name": "diloco", "every": 5, "lr": 0.7, "momentum": 0.9}
    trained = train(rehearsal(settings, world=world, make=adamw, dtype=torch.float64), 20, dtype=torch.float64)
    assert distance(weights(trained), reference(world, 20, 5, 0.7, 0.9)) < 1e-10
