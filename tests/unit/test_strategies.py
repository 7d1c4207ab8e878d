"""Laws that every strategy keeps, on the examples that its settings name."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from edgc.errors import UserError
from edgc.rehearsal import Rehearsal
from edgc.strategies import StrategyConfig
from tests.strategy_cases import (
    COLUMNS,
    EXAMPLES,
    ROWS,
    SHAPES,
    Odd,
    adamw,
    batch,
    distance,
    made,
    network,
    optimizer_of,
    rehearsal,
    train,
    weights,
)
from tests.workers import refused, said, same

each = pytest.mark.parametrize("name", EXAMPLES)


def replicas(trained: Rehearsal) -> Iterator[dict[str, torch.Tensor]]:
    return (weights(trained, rank) for rank in range(len(trained.models)))


@each
def test_replicas_hold_the_same_bits_when_the_strategy_says_so(name: str) -> None:
    trained, settings = made(name, world=3)
    first = weights(trained)
    train(trained, 2 * settings.period)
    gaps = [distance(other, weights(trained)) for other in replicas(trained)]
    assert distance(weights(trained), first) > 1e-3  # it has learned
    assert max(gaps) > 0 if settings.equal == "never" else max(gaps) == 0


@each
def test_parameters_of_any_shape_and_layout(name: str) -> None:
    trained, settings = made(name, world=3, make=optimizer_of(name), model=Odd())
    first = weights(trained)
    train(trained, 2 * settings.period)
    shared = [strategy.shared_state() for strategy in trained.strategies]
    assert all(same(each, shared[0]) for each in shared)
    assert settings.equal == "never" or all(same(each, weights(trained)) for each in replicas(trained))
    assert not any(same(p, first[key]) for key, p in weights(trained).items() if p.numel())


@each
@pytest.mark.parametrize("world", [2, 4, 8])
def test_bytes_are_those_of_the_formula(name: str, world: int) -> None:
    trained, settings = made(name, world)
    steps = 2 * settings.period
    train(trained, steps)
    sent = {sum(counts.values()) for counts in trained.room.sent}
    assert len(sent) == 1
    assert sent.pop() == pytest.approx(steps * EXAMPLES[name][1].sent(SHAPES, world), rel=1e-9)


@each
def test_a_run_that_resumes_equals_one_that_never_stopped(name: str) -> None:
    trained, settings = made(name)
    train(trained, settings.period + max(1, settings.period // 2))
    state = copy.deepcopy(trained.state_dict())
    train(trained, 2 * settings.period)
    resumed, _ = made(name)
    resumed.load_state_dict(state)
    train(resumed, 2 * settings.period)
    for one, other in zip(replicas(trained), replicas(resumed), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


@each
def test_a_run_goes_on_with_another_number_of_replicas(name: str) -> None:
    trained, settings = made(name)
    train(trained, settings.period)
    wider, _ = made(name, world=4)
    wider.load_state_dict(trained.state_dict())
    if settings.equal != "never":
        assert all(distance(each, weights(trained)) == 0 for each in replicas(wider))
    train(wider, settings.period)
    gaps = [distance(other, weights(wider)) for other in replicas(wider)]
    assert settings.equal == "never" or max(gaps) == 0


def test_more_replicas_than_were_saved_have_moments_of_their_own() -> None:
    local = {"name": "diloco", "every": 3}
    wider = rehearsal(local, world=4, make=adamw)
    wider.load_state_dict(train(rehearsal(local, make=adamw), 4).state_dict())
    train(wider, 1)
    moments = [state for optimizer in wider.optimizers for state in optimizer.state.values()]
    assert {float(state["step"]) for state in moments} == {5}
    assert len({state["exp_avg"].data_ptr() for state in moments}) == len(moments)


@each
@pytest.mark.parametrize("other", [[nn.Linear(ROWS, 3), nn.Linear(3, 3)], [*network(), nn.Linear(COLUMNS, COLUMNS)]])
def test_a_state_of_another_model_is_refused_in_a_line(name: str, other: list[nn.Module]) -> None:
    trained, _ = made(name)
    shared, own = (getattr(trained.strategies[0], f"{whose}_state")() for whose in ("shared", "own"))
    loading, _ = made(name, model=nn.Sequential(*copy.deepcopy(other)))
    holds = len(shared) + len(own) > 1  # more than the number of steps
    message = said(lambda: loading.strategies[0].load_state(shared, own))
    assert ("the saved state" in message) == holds, message
    refused(lambda: trained.load_state_dict({}), "no state.taken")


def test_a_policy_that_waits_for_losses_is_refused_where_none_are_told() -> None:
    refused(
        lambda: rehearsal({"name": "diloco", "every": 2}, {"method": "edgc", "policy": "loss", "r_max": 8}),
        "policy loss",
    )


def test_averaged_gradients_owe_the_same_among_another_number_of_replicas() -> None:
    compression = {"method": "powersgd", "rank": 2}
    trained, wider = (rehearsal({"name": "every_step"}, compression, world=world) for world in (2, 3))
    wider.load_state_dict(train(trained, 3).state_dict())
    owed = [engine.compressor.kept["0.weight"] for engine in (*trained.engines, *wider.engines)]
    assert wider.engines[0].iteration == 4
    torch.testing.assert_close(torch.stack(owed[:2]).mean(0), torch.stack(owed[2:]).mean(0))


def states(trained: Rehearsal) -> list[Any]:
    """State of every replica's strategy, but for the number of steps, and of engines what compresses."""
    found = [state for each in trained.strategies for state in (each.shared_state(), each.own_state())]
    kept = [{k: v["compressor"] if k == "engine" else v for k, v in s.items() if k != "step"} for s in found]
    return copy.deepcopy(kept)


@each
def test_a_gradient_that_is_not_finite_makes_step_or_round_void_on_all(name: str) -> None:
    trained, settings = made(name, make=optimizer_of(name))
    train(trained, settings.period)
    before, state = weights(trained), states(trained)
    for step in range(settings.period):
        inputs = [batch(trained.taken, rank) for rank in range(2)]
        if step == settings.period // 2:
            inputs[1][0, 0] = math.nan
        trained.step(inputs)
    assert settings.equal == "never" or same(states(trained), state)
    if settings.equal == "never":
        train(trained, settings.period)  # what is under way may be of before
    for after in replicas(trained):
        assert all(p.isfinite().all() for p in after.values())
        assert settings.equal == "never" or all(torch.equal(after[key], before[key]) for key in before)
    train(trained, 2 * settings.period)
    assert all(p.isfinite().all() for after in replicas(trained) for p in after.values())
    assert distance(weights(trained), before) > 0


@each
def test_what_makes_the_direction_itself_says_so_and_refuses_another(name: str) -> None:
    refused = (
        pytest.raises(UserError, match="makes the direction itself") if EXAMPLES[name][0].directs else nullcontext()
    )
    with refused:
        made(name, make=adamw)


WHOLE = {"every": 1, "lr": 1.0, "momentum": 0.0}


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (4, {"name": "diloco", **WHOLE}),
        (4, {"name": "muloco", **WHOLE}),
        (4, {"name": "streaming_diloco", "fragments": 1, "delay": 0, "alpha": 0.0, **WHOLE}),
        (2, {"name": "noloco", **WHOLE}),  # of one pair
    ],
)
def test_local_updates_of_one_step_are_data_parallel_sgd(world: int, strategy: dict[str, Any]) -> None:
    local = train(rehearsal(strategy, world=world, dtype=torch.float64), 20, dtype=torch.float64)
    parallel = train(rehearsal({"name": "every_step"}, world=world, dtype=torch.float64), 20, dtype=torch.float64)
    assert distance(local.mean_weights(), weights(parallel)) < 1e-12
    assert all(distance(each, weights(parallel)) < 1e-12 for each in replicas(local))


def test_unknown_names_and_keys_are_refused() -> None:
    with pytest.raises(UserError, match="name = 'dilocо'"):
        StrategyConfig.from_dict("dilocо")
    with pytest.raises(UserError, match="unknown key evry"):
        StrategyConfig.from_dict({"name": "diloco", "evry": 3})
