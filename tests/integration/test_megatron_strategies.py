"""Strategies under Megatron-Core: DP x TP and DP x PP on four gloo ranks, one launch for all cases."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from edgc import EDGCConfig
from edgc.megatron import attach, cpu_shims
from edgc.rehearsal import Rehearsal
from edgc.runtime.groups import gather_objects
from edgc.strategies import StrategyConfig
from experiments.spec.settings import RunConfig
from tests.integration.megatron_cases import Poison, configuration, copies, one, session_of, steps
from tests.strategy_cases import EXAMPLES, batch, distance, loss, network, settings_of
from tests.workers import Cases, refused, same

with cpu_shims.without_compiler():
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from edgc.megatron import checkpoint
    from edgc.megatron.attachment import Attachment
    from edgc.megatron.strategy import StrategyHandle
    from experiments.training.build import Session

pytestmark = pytest.mark.slow
case = Cases(4, __name__)

NONE: dict[str, Any] = {"method": "none"}
DP4 = {"pipeline": 1, "data": 4}
TP2 = {"tensor": 2, "pipeline": 1, "data": 2}
PP2 = {"pipeline": 2, "data": 2}
OVERLAP = {"overlap_grad_reduce": True, "bucket_elements": 15000}


def optimizer_of(kind: str, chunks: list[DistributedDataParallel], lr: float, **options: Any) -> Any:
    plain = {"weight_decay": 0.0, "sgd_momentum": 0.0, "params_dtype": torch.float32, "adam_beta2": 0.999}
    return get_megatron_optimizer(
        OptimizerConfig(optimizer=kind, lr=lr, **{**plain, "clip_grad": 0.0, **options}), chunks
    )


@case
def as_rehearsed() -> None:
    """Every strategy with two replicas of a small network is its rehearsal, bit for bit; both ranks of a replica hold
    the same weights."""
    config = session_of(configuration("small", NONE, parallel=TP2)).chunks[0].config
    rank = parallel_state.get_data_parallel_rank()
    found: dict[str, Any] = {}
    for index, (name, (kind, example)) in enumerate(EXAMPLES.items()):
        settings = settings_of(name)
        if name == "every_step":
            continue
        sgd, compression = (
            kind.equal == "step",
            EDGCConfig.from_dict({"min_compression_elements": 1, **example.compression}),
        )
        model = network()
        chunk = DistributedDataParallel(
            config, DistributedDataParallelConfig(overlap_grad_reduce=index % 2 == 1), model
        )
        optimizer = optimizer_of("sgd" if sgd else "adam", [chunk], 0.1 if sgd else 3e-3)
        handle = attach(chunk, compression, iterations=40, strategy=settings, optimizer=optimizer)
        assert isinstance(handle, StrategyHandle)
        losses = []
        other = network()
        made = (
            torch.optim.SGD(other.parameters(), lr=0.1)
            if sgd
            else torch.optim.AdamW(other.parameters(), lr=3e-3, weight_decay=0)
        )
        rehearsed = Rehearsal(
            other, optimizer=made, config=compression, strategy=settings, replicas=2, iterations=40, loss=loss
        )
        wanted = []
        for step in range(2 * settings.period + 1):
            chunk.zero_grad_buffer()
            optimizer.zero_grad()
            value = loss(chunk, batch(step, rank))
            value.backward()
            chunk.finish_grad_sync()
            optimizer.step()
            losses.append(value.item())
            wanted.append(rehearsed.step([batch(step, replica) for replica in range(2)]))
        own, strategy = {key: p.detach() for key, p in model.named_parameters()}, rehearsed.strategies[rank]
        there = dict(rehearsed.models[rank % len(rehearsed.models)].named_parameters())
        state = handle.state_dict()
        found[name] = {
            "losses": (gather_objects(losses), wanted),
            "weights": same(own, {key: p.detach() for key, p in there.items()}),
            "bytes": handle.bytes == sum(rehearsed.room.sent[rank].values()),
            "state": same(state["shared"], strategy.shared_state()) and same(state["own"], strategy.own_state()),
            "mean": same(handle.mean_weights(), rehearsed.mean_weights()),
        }
        handle.close()
    for name, facts in found.items():
        losses, wanted = facts.pop("losses")
        assert [sum(each) / 4 for each in zip(*losses, strict=True)] == wanted, name
        assert all(facts.values()), (name, facts)


test_megatron = case.test()
