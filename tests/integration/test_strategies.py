"""Every strategy under DDP over gloo, one launch of two ranks and one of four, beside its rehearsal in one process."""

from __future__ import annotations

import faulthandler
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
from edgc.strategies import StrategyConfig
from tests.strategy_cases import (
    EXAMPLES,
    Wrapper,
    batch,
    distance,
    loss,
    made,
    network,
    optimizer_of,
    settings_of,
    train,
    weights,
)
from tests.workers import refused, run_workers, same

pytestmark = pytest.mark.slow
each = pytest.mark.parametrize("name", EXAMPLES)


def steps_of(name: str) -> int:
    """Two rounds and a step, so that something is under way at the end."""
    return 2 * settings_of(name).period + 1


def trained(name: str) -> dict[str, Any]:
    """What a rank has after the steps of an example."""
    rank, model = dist.get_rank(), network()
    optimizer = optimizer_of(name)(model)
    wrapped = DistributedDataParallel(model)
    config = EDGCConfig.from_dict({"min_compression_elements": 1, **EXAMPLES[name][1].compression})
    handle = edgc.register(wrapped, config, iterations=40, strategy=settings_of(name), optimizer=optimizer)
    losses = []
    for step in range(steps_of(name)):

        def backward(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(wrapped, batch(step, rank))
            value.backward()
            return value.detach()

        if step % 2:
            losses.append(optimizer.step(backward).item())  # type: ignore[arg-type, union-attr]
        else:
            losses.append(backward().item())
            optimizer.step()
    found: dict[str, Any] = {"weights": {key: p.detach() for key, p in model.named_parameters()}, "losses": losses}
    if isinstance(handle, StrategyHandle):  # that of every_step is another
        found |= {"bytes": handle.bytes, "mean": handle.mean_weights(), "state": handle.state_dict()}
    handle.remove()
    return found


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


def trained_each() -> dict[str, dict[str, Any]]:
    faulthandler.dump_traceback_later(300, exit=True)
    refusals()
    out_of_memory()
    left_alone()
    found = {name: trained(name) for name in EXAMPLES}
    faulthandler.cancel_dump_traceback_later()
    return found


@cache
def ranks(world: int) -> list[dict[str, dict[str, Any]]]:
    return run_workers(world, trained_each)


@each
def test_two_ranks_are_their_rehearsal_bit_for_bit(name: str) -> None:
    found = [rank[name] for rank in ranks(2)]
    rehearsed, _ = made(name, 2, make=optimizer_of(name))
    for step in range(steps_of(name)):
        rehearsed_loss = rehearsed.step([batch(step, rank) for rank in range(2)])
        assert rehearsed_loss == sum(rank["losses"][step] for rank in found) / 2, step
    for rank, own in enumerate(found):
        assert same(own["weights"], weights(rehearsed, rank))
        if "bytes" in own:
            assert own["bytes"] == sum(rehearsed.room.sent[rank].values())
            assert same(own["mean"], rehearsed.mean_weights())
            strategy = rehearsed.strategies[rank]
            assert same(own["state"]["shared"], strategy.shared_state())
            assert same(own["state"]["own"], strategy.own_state())


@each
@pytest.mark.parametrize("world", [4, pytest.param(8, marks=pytest.mark.costly)])
def test_more_ranks_are_their_rehearsal_within_rounding(name: str, world: int) -> None:
    found = [rank[name] for rank in ranks(world)]
    rehearsed, _ = made(name, world, make=optimizer_of(name))
    train(rehearsed, steps_of(name))
    for rank, own in enumerate(found):
        assert distance(own["weights"], weights(rehearsed, rank)) < 1e-4
        assert own.get("bytes", 0) in (0, sum(rehearsed.room.sent[rank].values()))
