"""NoLoCo beside its algorithm, written down once more in float64; and its pairs."""

from __future__ import annotations

import math

import pytest
import torch

from edgc.strategies.noloco import partner
from tests.strategy_cases import Workers, adamw, batch, distance, follows, rehearsal, start, train, weights


def reference(world: int, steps: int, every: int, lr: float, momentum: float) -> list[dict[str, torch.Tensor]]:
    anchors = [start() for _ in range(world)]
    velocities = [{name: torch.zeros_like(p) for name, p in start().items()} for _ in range(world)]
    workers = Workers(world)
    for step in range(1, steps + 1):
        workers.step(step - 1)
        if step % every:
            continue
        old = [{name: weight.clone() for name, weight in anchor.items()} for anchor in anchors]
        for rank in range(world):
            pair = (rank, partner(rank, world, 0, step // every))
            for name, own in anchors[rank].items():
                move = sum(workers.weights[each][name].detach() - old[each][name] for each in pair) / 2
                pull = sum(old[each][name] for each in pair) / 2 - old[rank][name]
                velocity = velocities[rank][name] = momentum * velocities[rank][name] + lr * move + lr * pull
                anchors[rank][name] = own + velocity
        for each, anchor in zip(workers.weights, anchors, strict=True):
            for name, weight in anchor.items():
                each[name].data.copy_(weight)
    return workers.weights


@pytest.mark.parametrize("world", [2, 3, 4])
def test_noloco_is_its_algorithm(world: int) -> None:
    follows({"name": "noloco", "every": 5}, reference(world, 20, 5, 0.7, 0.5), world=world)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_pairs_are_mutual_and_change(world: int) -> None:
    rounds = [[partner(rank, world, 0, turn) for rank in range(world)] for turn in range(20)]
    for pairs in rounds:
        assert [pairs[other] for other in pairs] == list(range(world))
        assert sum(pairs[rank] == rank for rank in range(world)) == world % 2
    assert world == 2 or len({tuple(pairs) for pairs in rounds}) > 2


def test_a_round_is_void_for_its_pair_alone() -> None:
    trained = train(rehearsal({"name": "noloco", "every": 5}, world=4, make=adamw), 5)
    before = [weights(trained, rank) for rank in range(4)]
    for _ in range(5):
        inputs = [batch(trained.taken, rank) for rank in range(4)]
        inputs[1][0, 0] = math.nan
        trained.step(inputs)
    void = {1, partner(1, 4, 0, 2)}
    for rank in range(4):
        assert (distance(weights(trained, rank), before[rank]) == 0) == (rank in void)
