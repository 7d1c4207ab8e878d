"""What policies follow through an engine: losses that it is told, window by window, and through a checkpoint."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import pytest
import torch

from edgc.compressors import Gradient
from edgc.config import EDGCConfig
from edgc.control.policies.released import by_change
from edgc.engine import Engine
from edgc.errors import UserError
from edgc.sections import EntropyConfig

WINDOW, WINDOWS = 4, 12
CONFIG = EDGCConfig(
    method="edgc",
    policy="loss",
    r_max=16,
    r_min=4,
    window=WINDOW,
    step_limit=100,
    warmup_fraction=0.0,
    warmup_limit_fraction=0.0,
    min_compression_elements=64,
    entropy=EntropyConfig(iteration_rate=1.0),
)


def loss_of(iteration: int) -> float:
    """Falling, with a plateau and a missing value."""
    if iteration == 3:
        return math.nan
    return 8.0 - 0.2 * min(iteration, 24) + (0.3 if iteration > 36 else 0.0)


def one_iteration(engine: Engine, iteration: int) -> None:
    generator = torch.Generator().manual_seed(iteration)
    engine.reduce([Gradient("w", torch.randn(64, 96, generator=generator))], None)
    engine.end_iteration()


def run(engine: Engine, first: int, last: int) -> list[str]:
    """Iterations ``first..last``; the reasons of the decisions."""
    reasons = []
    for iteration in range(first, last + 1):
        one_iteration(engine, iteration)
        if engine.decision is not None:
            reasons.append(engine.decision.reason)
        engine.add_loss(loss_of(iteration))
    return reasons


def new() -> Engine:
    return Engine(CONFIG, stage=0, stages=[[(64, 96)]], iterations=WINDOW * WINDOWS)


def test_ranks_follow_the_losses_told_before_each_window_end() -> None:
    engine = new()
    reasons = run(engine, 1, WINDOW * WINDOWS)
    assert len(reasons) == WINDOWS
    means = []
    for k in range(WINDOWS):
        # The loss of the iteration that ends a window is told after its decision.
        told = [loss_of(i) for i in range(k * WINDOW, (k + 1) * WINDOW) if i > 0]
        finite = [value for value in told if math.isfinite(value)]
        means.append(sum(finite) / len(finite))
    for k in range(2, WINDOWS):
        target = by_change("loss", 4, 16, means[:2], means[k - 1], means[k])
        assert target.reason in reasons[k]
    assert "rank 4.0" in reasons[8], "a plateau asks for the lowest rank"


@pytest.mark.parametrize("cut", [5, 8, 30])
def test_resumed_run_follows_the_same_losses(cut: int) -> None:
    expected = run(new(), 1, WINDOW * WINDOWS)
    before = new()
    reasons = run(before, 1, cut)
    state = before.state_dict()
    resumed = new()
    resumed.load_state_dict({**state, "controller": json.loads(json.dumps(state["controller"]))})
    reasons += run(resumed, cut + 1, WINDOW * WINDOWS)
    assert reasons == expected


def test_a_tensor_is_told_as_its_number_without_the_graph_behind_it() -> None:
    engine = new()
    engine.add_loss(torch.tensor(2.0, requires_grad=True))
    assert "2.0" in json.dumps(engine.monitor.window.state_dict())
    for wrong in (torch.ones(3), "low", None):
        with pytest.raises(UserError, match="no number; give the mean"):
            engine.add_loss(wrong)  # type: ignore[arg-type]


def test_a_state_stays_as_it_was_while_a_run_goes_on_from_it() -> None:
    before, resumed = new(), new()
    run(before, 1, WINDOW + 1)
    state = before.state_dict()
    kept = copy.deepcopy(state["controller"])
    resumed.load_state_dict(state)
    run(resumed, WINDOW + 2, 3 * WINDOW)
    assert state["controller"] == kept


@pytest.mark.parametrize("cut", [WINDOW - 1, 2 * WINDOW - 1, 2 * WINDOW])
def test_settings_changed_in_a_window_find_the_ranks_that_they_would_have_had(cut: int) -> None:
    schedule = EDGCConfig(
        method="edgc", policy="schedule", schedule=[[0.0, 16], [0.5, 8]], window=WINDOW, warmup_fraction=0.0,
        warmup_limit_fraction=0.0, min_compression_elements=64, entropy=CONFIG.entropy,
    )  # fmt: skip
    whole, before, resumed = (
        Engine(config, stage=0, stages=[[(64, 96)]], iterations=4 * WINDOW)
        for config in (schedule, dataclasses.replace(schedule, seed=1), schedule)
    )
    for iteration in range(1, cut + 1):
        one_iteration(whole, iteration)
        one_iteration(before, iteration)
    resumed.load_state_dict(before.state_dict(), changed_settings=True)
    for iteration in range(cut + 1, 4 * WINDOW + 1):
        assert resumed.controller.plan(iteration).ranks == whole.controller.plan(iteration).ranks, iteration
        one_iteration(whole, iteration)
        one_iteration(resumed, iteration)
