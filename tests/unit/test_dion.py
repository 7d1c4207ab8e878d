"""Dion beside its algorithm, written down once more in float64; a momentum that is zero on one replica."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from edgc.config import EDGCConfig
from edgc.runtime.local import Room
from edgc.strategies import Replica, StrategyConfig
from edgc.strategies.base import finished
from tests.strategy_cases import batch, distance, follows, gradients, rehearsal, sgd, start, weights
from tests.workers import refused

LR, MU, B1, B2, EPS = 0.02, 0.95, 0.9, 0.95, 1e-8


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """By Cholesky's factor, twice, where the strategy has Householder's."""
    for _ in range(2):
        matrix = torch.linalg.solve_triangular(torch.linalg.cholesky(matrix.mT @ matrix), matrix.mT, upper=False).mT
    return matrix


def reference(world: int, steps: int, q: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    theta = start()
    *momenta, first, second = ({name: torch.zeros_like(p) for name, p in theta.items()} for _ in range(world + 2))
    for step in range(steps):
        found = [gradients(theta, step, rank) for rank in range(world)]
        for name, weight in theta.items():
            if weight.dim() == 1:
                mean = torch.stack([each[name] for each in found]).mean(0)
                first[name] = B1 * first[name] + (1 - B1) * mean
                second[name] = B2 * second[name] + (1 - B2) * mean**2
                root = (second[name] / (1 - B2 ** (step + 1))).sqrt()
                weight.sub_(LR * first[name] / (1 - B1 ** (step + 1)) / (root + EPS))
                continue
            wide, ms = len(weight) < len(weight.T), [momenta[i][name].add_(found[i][name]) for i in range(world)]
            ms = [m.T if wide else m for m in ms]
            p = orthonormal(torch.stack([m @ q[name] for m in ms]).mean(0))
            r = torch.stack([m.T @ p for m in ms]).mean(0)
            for m in ms:
                m -= (1 - MU) * p @ r.T
            q[name] = r / r.norm(dim=0)
            update = p @ q[name].T
            weight.sub_(LR * math.sqrt(weight.shape[0] / weight.shape[1]) * (update.T if wide else update))
    return theta


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("least", [1, 200])  # with 200 the smaller matrix is averaged in full, by the same rule
def test_dion_is_its_algorithm(world: int, least: int) -> None:
    options = {"min_compression_elements": least}
    q = rehearsal({"name": "dion"}, options, dtype=torch.float64).strategies[0].shared_state()["q"]
    follows({"name": "dion"}, reference(world, 20, q), options, world=world, make=partial(sgd, lr=LR))


def directions(*given: torch.Tensor) -> list[torch.Tensor]:
    """What two replicas make of their gradients of a matrix, and then of zeros."""
    room, config = Room(2), EDGCConfig.from_dict({"min_compression_elements": 1})

    def second(rank: int) -> torch.Tensor:
        replica = Replica({"w": torch.zeros(12, 8)}, config, 10, open_channel=room.opener(rank))
        strategy = StrategyConfig.from_dict("dion").build(replica)
        for gradient in (given[rank].clone(), torch.zeros(12, 8)):
            finished(strategy.before_step({"w": gradient}))
        return gradient

    return room.run(second)


def test_a_momentum_that_is_zero_on_one_replica_gives_no_other_step_there() -> None:
    gradient = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    one, other = directions(gradient, 0 * gradient)
    assert torch.equal(one, other) and one.abs().max() > 0.01
    assert not torch.stack(directions(0 * gradient, 0 * gradient)).any()  # nobody has one: nothing moves, not even NaN


def test_settings_that_are_not_valid() -> None:
    assert StrategyConfig.from_dict({"name": "dion", "heads": "lm_head"}).heads == ("lm_head",)
    for key, value in (("heads", 3), ("beta1", 1), ("beta2", 1.0), ("eps", 10**400)):
        refused(lambda key=key, value=value: StrategyConfig.from_dict({"name": "dion", key: value}), f"{key} = ")


def test_a_void_step_is_none_of_adams() -> None:
    runs = [rehearsal({"name": "dion"}) for _ in range(2)]
    runs[1].step([batch(0, 0), batch(0, 1) * math.nan])
    for each in runs:
        each.step([batch(1, rank) for rank in range(2)])
    assert distance(*map(weights, runs)) == 0
