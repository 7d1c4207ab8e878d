"""Every strategy and method under DDP over gloo, a launch of 2, 4 and 8 ranks, beside its rehearsal in one process."""

from __future__ import annotations

import copy
import faulthandler
import warnings
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import edgc
from edgc import EDGCConfig
from edgc.ddp.strategy import StrategyHandle
from edgc.rehearsal import Rehearsal
from edgc.strategies import StrategyConfig
from tests import examples
from tests.strategy_cases import (
    EXAMPLES,
    ROWS,
    Odd,
    Wrapper,
    adamw,
    batch,
    distance,
    loss,
    network,
    optimizer_of,
    settings_of,
    weights,
)
from tests.workers import refused, run_workers, same

pytestmark = pytest.mark.slow
SHORT = {"window": 2, "entropy": {"iteration_rate": 1.0}}
METHODS: dict[str, dict[str, Any]] = {
    **{name: examples.settings_of(name) for name in examples.FOUND},
    "edgc": {**examples.settings_of("edgc"), **SHORT},
    "cqm": {"method": "edgc", "r_max": 8, "stability_tolerance": 9.0, **SHORT},
    "wide powersgd": {"method": "powersgd", "rank": 4},
    "wide int4": {"method": "quantize", "bits": 4},
    "odd": {"method": "powersgd", "rank": 4},
}
CASES = (*EXAMPLES, *METHODS)
AT_EIGHT = (*EXAMPLES, "none", "powersgd", "int8", "topk", "cqm", "wide int4", "odd")  # a kind of sum each
WITHIN = {**dict.fromkeys(EXAMPLES, 1e-4), **dict.fromkeys(METHODS, 5e-2)}  # a code may move, and Adam goes by its sign


def wide() -> nn.Module:
    """A model of several buckets."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(ROWS, 700), nn.Tanh(), nn.Linear(700, 600), nn.Tanh(), nn.Linear(600, 8))


MODELS = {"odd": Odd, "wide powersgd": wide, "wide int4": wide}


def made(name: str) -> tuple[nn.Module, dict[str, Any], int]:
    """Model of a case, what it is registered or rehearsed with, and its steps."""
    if name in EXAMPLES:
        # Two rounds and a step, so that something is under way at the end.
        model, strategy, iterations, steps = network(), settings_of(name), 40, 2 * settings_of(name).period + 1
        optimizer, compression = optimizer_of(name)(model), EXAMPLES[name][1].compression
    else:
        model, strategy, iterations, steps = MODELS.get(name, network)(), None, 11, 11
        optimizer, compression = adamw(model), METHODS[name]
    config = EDGCConfig.from_dict({"min_compression_elements": 1, **compression})
    return model, {"config": config, "strategy": strategy, "optimizer": optimizer, "iterations": iterations}, steps


def trained(name: str) -> dict[str, Any]:
    """What a rank has after the steps of a case."""
    rank, (model, options, steps) = dist.get_rank(), made(name)
    wrapped, optimizer = DistributedDataParallel(model), options["optimizer"]
    handle = edgc.register(wrapped, **options)
    losses, sent = [], 0
    for step in range(steps):

        def backward(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(wrapped, batch(step, rank))
            value.backward()
            return value.detach()

        if step % 2:
            losses.append(optimizer.step(backward).item())
        else:
            losses.append(backward().item())
            optimizer.step()
        if not isinstance(handle, StrategyHandle):
            assert handle.last is not None
            sent += handle.last.statistics.bytes
    found: dict[str, Any] = {"weights": {key: p.detach() for key, p in model.named_parameters()}, "losses": losses}
    if isinstance(handle, StrategyHandle):  # that of every_step and of methods is another
        sent = handle.bytes
        found |= {"mean": handle.mean_weights(), "state": handle.state_dict()}
    handle.remove()
    return found | {"bytes": sent}


def refusals() -> None:
    """On every rank, and nothing is left behind."""
    wrapped, rank = DistributedDataParallel(network()), dist.get_rank()
    options: dict[str, Any] = {"iterations": 9, "optimizer": optimizer_of("diloco")(wrapped)}
    config, diloco = EDGCConfig(method="none"), StrategyConfig.from_dict("diloco")
    groups = len(dist.distributed_c10d._world.pg_map)
    refused(lambda: edgc.register(wrapped, config, iterations=9, strategy=diloco), "give optimizer=")
    elsewhere = options | {"optimizer": optimizer_of("diloco")(wrapped if rank else network())}
    told = ["rank 0 refused", "does not step 0.weight"][not rank :]
    refused(lambda: edgc.register(wrapped, config, strategy=diloco, **elsewhere), *told)
    around = options | {"optimizer": Wrapper(options["optimizer"])}
    refused(lambda: edgc.register(wrapped, config, strategy=diloco, **around), "Wrapper", "give", "optimizer.optimizer")
    scaled = options | {"scaler": torch.amp.GradScaler("cpu")}
    refused(lambda: edgc.register(wrapped, config, strategy=diloco, **scaled), "diloco", "GradScaler")
    other = StrategyConfig.from_dict({"name": "diloco", "every": 2 + rank})
    refused(lambda: edgc.register(wrapped, config, strategy=other, **options), "give the same on every rank")
    demo = StrategyConfig.from_dict("demo")
    refused(lambda: edgc.register(wrapped, EDGCConfig(method="bf16"), strategy=demo, **options), "compression.method")
    assert len(dist.distributed_c10d._world.pg_map) == groups
    handle = edgc.register(wrapped, config, strategy=diloco, **options)
    assert isinstance(handle, StrategyHandle)
    refused(lambda: handle.load_state_dict(handle.state_dict() | {"rank": 9}), "state is of rank 9", "per rank")
    handle.remove()
    assert len(dist.distributed_c10d._world.pg_map) == groups


def scaled() -> None:
    """A scaler that nobody has told of is met at the first step."""
    model = network()
    optimizer, wrapped = torch.optim.SGD(model.parameters(), lr=0.1), DistributedDataParallel(model)
    diloco = StrategyConfig.from_dict("diloco")
    handle = edgc.register(wrapped, EDGCConfig(), iterations=9, strategy=diloco, optimizer=optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss(wrapped, batch(0, dist.get_rank()))).backward()
    refused(lambda: scaler.step(optimizer), "diloco", "GradScaler")
    handle.remove()


def resumed_with_weights_of_rank_0() -> None:
    """DDP sends rank 0's weights to all: who loads a model before that loses its own, and is told so."""
    diloco, rank = StrategyConfig.from_dict({"name": "diloco", "every": 4}), dist.get_rank()

    def registered(weights: dict[str, torch.Tensor]) -> tuple[nn.Module, StrategyHandle]:
        model = network()
        model.load_state_dict(weights)
        wrapped, options = DistributedDataParallel(model), {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        handle = edgc.register(wrapped, EDGCConfig(), iterations=9, strategy=diloco, **options)
        assert isinstance(handle, StrategyHandle)
        loss(wrapped, batch(0, rank)).backward()
        options["optimizer"].step()
        return model, handle

    model, handle = registered(network().state_dict())
    state, own = copy.deepcopy(handle.state_dict()), copy.deepcopy(model.state_dict())
    handle.remove()
    model, handle = registered(own)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.load_state_dict(own)
        handle.load_state_dict(state)
        assert not told
        with torch.no_grad():
            for p in model.parameters():
                dist.broadcast(p, 0)
        handle.load_state_dict(state)
    assert [f"replica {rank} has other weights" in str(each.message) for each in told] == [True] * (rank > 0)
    handle.remove()


def left_alone() -> None:
    """What DDP ignores is not exchanged; what no replica uses is not even decayed."""
    model = nn.ModuleDict({"used": network(), "spare": nn.Linear(3, 3, bias=False)})
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["used.2.bias"])
    optimizer, before = optimizer_of("diloco")(model), model["spare"].weight.detach().clone()
    model.forward = lambda inputs: model["used"](inputs)  # type: ignore[method-assign]
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    options: dict[str, Any] = {"strategy": StrategyConfig.from_dict("diloco"), "optimizer": optimizer}
    handle = edgc.register(wrapped, EDGCConfig(), iterations=9, **options)
    assert list(handle.parameters) == ["used.0.weight", "used.0.bias", "used.2.weight", "spare.weight"]
    loss(wrapped, batch(0, 0)).backward()
    optimizer.step()
    assert torch.equal(model["spare"].weight, before)
    handle.remove()


def out_of_memory() -> None:
    """It keeps its type, by which programs know that a smaller batch would do."""

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    for strategy, config in (("diloco", EDGCConfig()), ("every_step", EDGCConfig(method="bf16"))):
        wrapped = DistributedDataParallel(network())
        optimizer = optimizer_of("diloco")(wrapped)
        options: dict[str, Any] = {"strategy": StrategyConfig.from_dict(strategy), "optimizer": optimizer}
        handle = edgc.register(wrapped, config, iterations=9, **options)
        broken: Any = handle.strategy if isinstance(handle, StrategyHandle) else handle.engine.compressor
        setattr(broken, "before_step" if strategy == "diloco" else "steps", fail)
        with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\."):
            loss(wrapped, batch(0, 0)).backward()
            optimizer.step()
        handle.remove()


def trained_each(cases: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    faulthandler.dump_traceback_later(300, exit=True)
    refusals()
    out_of_memory()
    left_alone()
    scaled()
    resumed_with_weights_of_rank_0()
    found = {}
    for name in cases:
        faulthandler.dump_traceback_later(300, exit=True)
        found[name] = trained(name)
    faulthandler.cancel_dump_traceback_later()
    return found


@cache
def ranks(world: int) -> list[dict[str, dict[str, Any]]]:
    return run_workers(world, trained_each, CASES if world < 8 else AT_EIGHT)


def rehearsed(name: str, world: int) -> tuple[Rehearsal, list[float]]:
    """A case in one process, and its losses."""
    model, options, steps = made(name)
    found = Rehearsal(model, **options, replicas=world, loss=loss)
    return found, [found.step([batch(step, rank) for rank in range(world)]) for step in range(steps)]


def means(found: list[dict[str, Any]]) -> list[float]:
    """Losses of the steps in the mean of all ranks."""
    return [sum(each) / len(found) for each in zip(*(own["losses"] for own in found), strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_their_rehearsal_bit_for_bit(name: str) -> None:
    found = [rank[name] for rank in ranks(2)]
    here, losses = rehearsed(name, 2)
    assert losses == means(found)
    for rank, own in enumerate(found):
        assert same(own["weights"], weights(here, rank))
        assert own["bytes"] == sum(here.room.sent[rank].values())
        if "state" in own:
            assert same(own["mean"], here.mean_weights())
            strategy = here.strategies[rank]
            assert same(own["state"]["shared"], strategy.shared_state())
            assert same(own["state"]["own"], strategy.own_state())


@pytest.mark.parametrize(
    ("world", "name"),
    [*((4, name) for name in CASES), *(pytest.param(8, name, marks=pytest.mark.costly) for name in AT_EIGHT)],
)
def test_more_ranks_are_their_rehearsal_within_rounding(world: int, name: str) -> None:
    found = [rank[name] for rank in ranks(world)]
    here, losses = rehearsed(name, world)
    assert losses == pytest.approx(means(found), rel=2e-3)
    for rank, own in enumerate(found):
        assert distance(weights(here, rank), own["weights"]) < WITHIN[name]
        assert own["bytes"] == sum(here.room.sent[rank].values())
