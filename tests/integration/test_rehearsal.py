"""Every method of compression rehearsed in one process, beside as many processes under DDP."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import edgc.ddp
from edgc.config import EDGCConfig
from edgc.rehearsal import Rehearsal
from edgc.runtime.groups import gather_objects
from tests import examples
from tests.strategy_cases import ROWS, Odd, adamw, batch, distance, loss, network
from tests.workers import run_workers

pytestmark = pytest.mark.slow
STEPS = 11
SHORT = {"window": 2, "entropy": {"iteration_rate": 1.0}}
METHODS: dict[str, dict[str, Any]] = {
    **{name: examples.settings_of(name) for name in examples.FOUND},
    "edgc": {**examples.settings_of("edgc"), **SHORT},
    "cqm": {"method": "edgc", "r_max": 8, "stability_tolerance": 9.0, **SHORT},
}
WIDE = ("wide powersgd", "wide int4")  # several buckets
CASES = (*METHODS, *WIDE, "odd")
AT_EIGHT = ("none", "powersgd", "int8", "topk", "cqm", "wide int4", "odd")  # a kind of sum each
Result = tuple[list[float], float, dict[str, Tensor]]  # losses, bytes, weights


def made(name: str) -> tuple[nn.Module, EDGCConfig]:
    if name == "odd":
        return Odd(), EDGCConfig.from_dict({"min_compression_elements": 1, "method": "powersgd", "rank": 4})
    if name not in WIDE:
        return network(), EDGCConfig.from_dict({"min_compression_elements": 1, **METHODS[name]})
    compression = {"method": "quantize", "bits": 4} if "int4" in name else {"method": "powersgd", "rank": 4}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(ROWS, 700), nn.Tanh(), nn.Linear(700, 600), nn.Tanh(), nn.Linear(600, 8))
    return model, EDGCConfig.from_dict({"min_compression_elements": 1, **compression})


def rehearsed(name: str, world: int) -> Result:
    model, config = made(name)
    trained = Rehearsal(model, optimizer=adamw(model), config=config, replicas=world, iterations=STEPS, loss=loss)
    losses = [trained.step([batch(step, rank) for rank in range(world)]) for step in range(STEPS)]
    return losses, trained.bytes, {name: p.detach() for name, p in trained.models[0].named_parameters()}


def under_ddp(cases: tuple[str, ...]) -> dict[str, Result]:
    """The cases on this rank; the losses are the means over all."""
    rank, found = torch.distributed.get_rank(), {}
    for name in cases:
        model, config = made(name)
        optimizer, wrapped = adamw(model), DistributedDataParallel(model)
        handle, losses, sent = edgc.ddp.register(wrapped, config, iterations=STEPS), [], 0
        for step in range(STEPS):
            optimizer.zero_grad()
            value = loss(wrapped, batch(step, rank))
            value.backward()
            optimizer.step()
            own = gather_objects(float(value.detach()))
            losses.append(sum(own) / len(own))
            assert handle.last is not None
            sent += handle.last.statistics.bytes
        found[name] = losses, sent, {name: p.detach().clone() for name, p in model.named_parameters()}
        handle.remove()
    return found


@cache
def processes(world: int) -> list[dict[str, Result]]:
    return run_workers(world, under_ddp, CASES if world < 8 else AT_EIGHT)


@pytest.mark.parametrize("name", CASES)
def test_two_replicas_have_the_bits_of_two_processes(name: str) -> None:
    losses, sent, weights = rehearsed(name, 2)
    there = processes(2)[0][name]
    assert losses == there[0]
    assert sent == there[1]
    assert all(torch.equal(weights[key], there[2][key]) for key in weights)


@pytest.mark.parametrize(
    ("world", "name"),
    [*((4, name) for name in CASES), *(pytest.param(8, name, marks=pytest.mark.costly) for name in AT_EIGHT)],
)
def test_more_replicas_are_as_many_processes_up_to_the_order_of_sums(world: int, name: str) -> None:
    losses, sent, weights = rehearsed(name, world)
    there = processes(world)[0][name]
    assert sent == there[1]
    assert losses == pytest.approx(there[0], rel=2e-3)
    assert distance(weights, there[2]) < 5e-2  # a sum in another order may move a code, and Adam goes by its sign
