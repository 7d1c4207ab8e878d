"""DiLoCo beside its algorithm, written down once more in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.strategy_cases import Workers, adamw, distance, follows, rehearsal, start, train, weights


def reference(
    world: int, steps: int, every: int, lr: float, momentum: float, **options: Any
) -> dict[str, torch.Tensor]:
    anchor, velocity = start(), {name: torch.zeros_like(p) for name, p in start().items()}
    workers = Workers(world, **options)
    for step in range(steps):
        workers.step(step)
        if (step + 1) % every == 0:
            for name, weight in anchor.items():
                delta = weight - workers.mean(name)
                velocity[name] = momentum * velocity[name] + delta
                anchor[name] = weight - lr * (delta + momentum * velocity[name])
                workers.restart(name, anchor[name])
    return anchor


@pytest.mark.parametrize("world", [2, 4])
def test_diloco_is_its_algorithm(world: int) -> None:
    settings = {"name": "diloco", "every": 5, "lr": 0.7, "momentum": 0.9}
    follows(settings, reference(world, 20, 5, 0.7, 0.9), world=world)


def test_warm_up_is_data_parallel_and_moves_the_anchor() -> None:
    warm = rehearsal({"name": "diloco", "every": 5, "warmup_steps": 3}, make=adamw)
    parallel = rehearsal({"name": "every_step"}, make=adamw)
    for each in (warm, parallel):
        train(each, 3)
    assert distance(weights(warm), weights(parallel)) == distance(weights(warm, 1), weights(parallel)) == 0
    assert distance(warm.strategies[0].shared_state()["anchor"], weights(parallel)) == 0
    train(warm, 4)
    assert distance(weights(warm), weights(warm, 1)) > 0
    train(warm, 1)
    assert distance(weights(warm), weights(warm, 1)) == 0
