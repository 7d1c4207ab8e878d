"""Streaming DiLoCo beside its algorithm, written down once more in float64; and fragments of models."""

from __future__ import annotations

import copy

import pytest
import torch

from edgc.errors import UserError
from edgc.strategies import StrategyConfig
from edgc.strategies.fragments import fragments_of
from tests.strategy_cases import Workers, distance, follows, rehearsal, start, train, weights

FRAGMENTS = [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
EVERY, LR, MOMENTUM = 6, 0.4, 0.9


def reference(world: int, steps: int, delay: int, alpha: float) -> list[dict[str, torch.Tensor]]:
    anchor, velocity = start(), {name: torch.zeros_like(p) for name, p in start().items()}
    workers, waiting = Workers(world), {}
    for step in range(1, steps + 1):
        workers.step(step - 1)
        if step % 3 == 0:
            waiting[step + delay] = {
                name: anchor[name] - workers.mean(name) for name in FRAGMENTS[0 if step % 2 else 1]
            }
        for name, delta in waiting.pop(step, {}).items():
            velocity[name] = MOMENTUM * velocity[name] + delta
            anchor[name] = anchor[name] - LR * (delta + MOMENTUM * velocity[name])
            for each in workers.weights:
                each[name].data.copy_((1 - alpha) * anchor[name] + alpha * each[name])
    return workers.weights


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("delay", "alpha"), [(0, 0.0), (2, 0.5)])
def test_streaming_is_its_algorithm(world: int, delay: int, alpha: float) -> None:
    settings = {"name": "streaming_diloco", "every": EVERY, "lr": LR, "fragments": 2, "delay": delay, "alpha": alpha}
    follows(settings, reference(world, 20, delay, alpha), world=world)


def test_what_is_on_its_way_is_exchanged_anew_by_a_run_that_resumes() -> None:
    """Also between the two collectives of a method."""
    settings = {"name": "streaming_diloco", "every": 6, "fragments": 2, "delay": 2}
    trained = train(rehearsal(settings, {"method": "powersgd", "rank": 2}), 10)
    state = copy.deepcopy(trained.state_dict())
    resumed = rehearsal(settings, {"method": "powersgd", "rank": 2})
    resumed.load_state_dict(state)
    for each in (trained, resumed):
        train(each, 9)
    assert all(distance(weights(trained, rank), weights(resumed, rank)) == 0 for rank in range(2))


def test_what_is_on_its_way_is_dropped_among_another_number_of_replicas() -> None:
    settings = {"name": "streaming_diloco", "every": 6, "fragments": 2, "delay": 2}
    trained = train(rehearsal(settings), 10)
    assert trained.strategies[0].measured  # type: ignore[attr-defined]
    wider = rehearsal(settings, world=4)
    wider.load_state_dict(trained.state_dict())
    assert not any(each.measured for each in wider.strategies)  # type: ignore[attr-defined]
    anchors = [each.shared_state()["anchor"] for each in train(wider, 6).strategies]
    assert all(distance(each, anchors[0]) == 0 for each in anchors)
    assert distance(anchors[0], trained.strategies[0].shared_state()["anchor"]) > 0


def test_layers_go_round_the_fragments() -> None:
    names = ["wte.weight", *(f"h.{layer}.mlp.{part}.weight" for layer in range(5) for part in range(2)), "ln.bias"]
    outside, even, odd = fragments_of(names, 3)
    assert outside == ["wte.weight", "ln.bias"]
    assert {name.split(".")[1] for name in even} == {"0", "2", "4"} and {name[2] for name in odd} == {"1", "3"}
    assert fragments_of(names, 1) == [names] and sorted(outside + even + odd) == sorted(names)
    with pytest.raises(UserError, match="fragments = 7"):
        fragments_of(names, 7)


@pytest.mark.parametrize("wrong", [{"every": 7, "fragments": 2}, {"every": 6, "fragments": 2, "delay": 3}])
def test_turns_that_overlap_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UserError):
        StrategyConfig.from_dict({"name": "streaming_diloco", **wrong})
