"""Strategies under Megatron-Core: DP x TP and DP x PP on four gloo ranks, one launch for all cases."""

from __future__ import annotations

import copy
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from edgc import EDGCConfig
from edgc.megatron import attach, cpu_shims
from edgc.runtime.groups import gather_objects
from edgc.strategies import StrategyConfig
from tests.integration.megatron_cases import Poison, configuration, copies, one, session_of, steps
from tests.strategy_cases import EXAMPLES, batch, loss, made, network, settings_of, sgd, weights
from tests.workers import Cases, refused, same

with cpu_shims.without_compiler():
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from edgc.megatron import checkpoint
    from edgc.megatron.attachment import Attachment
    from edgc.megatron.strategy import StrategyHandle

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


def rehearsed(name: str, settings: StrategyConfig) -> list[dict[str, Any]]:
    """What every replica of a rehearsal has after two rounds and a step."""
    plain = lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0)  # noqa: E731
    trained, _ = made(name, make=sgd if settings.equal == "step" else plain)
    losses = [trained.step([batch(step, rank) for rank in range(2)]) for step in range(2 * settings.period + 1)]
    facts = {"losses": losses, "mean": trained.mean_weights(), "shared": trained.strategies[0].shared_state()}
    return [
        {
            **facts,
            "weights": weights(trained, rank),
            "bytes": sum(trained.room.sent[rank].values()),
            "own": copy.deepcopy(trained.strategies[rank].own_state()),
        }
        for rank in range(2)
    ]


@case
def as_rehearsed() -> None:
    """Every strategy with two replicas of a small network is its rehearsal, bit for bit."""
    megatron = session_of(configuration("small", NONE, parallel=TP2)).chunks[0].config
    replica = parallel_state.get_data_parallel_rank()
    there: dict[str, list[dict[str, Any]]] = {}
    here: dict[str, dict[str, Any]] = {}
    for name in (each for each in EXAMPLES if each != "every_step"):
        model, settings = network(), settings_of(name)
        there[name] = gather_objects(rehearsed(name, settings) if dist.get_rank() == 0 else [])[0]
        config = EDGCConfig.from_dict({"min_compression_elements": 1, **EXAMPLES[name][1].compression})
        overlap = DistributedDataParallelConfig(overlap_grad_reduce=settings.period > 1)
        chunk = DistributedDataParallel(megatron, overlap, model)
        optimizer = (
            optimizer_of("sgd", [chunk], 0.1) if settings.equal == "step" else optimizer_of("adam", [chunk], 3e-3)
        )
        handle = attach(chunk, config, iterations=40, strategy=settings, optimizer=optimizer)
        assert isinstance(handle, StrategyHandle)
        losses = []
        for step in range(2 * settings.period + 1):
            chunk.zero_grad_buffer()
            optimizer.zero_grad()
            value = loss(chunk, batch(step, replica))
            value.backward()
            chunk.finish_grad_sync()
            optimizer.step()
            losses.append(value.item())
        here[name] = {
            **{key: value for key, value in handle.state_dict().items() if key in ("shared", "own")},
            "losses": [sum(each) / 4 for each in zip(*gather_objects(losses), strict=True)],
            "weights": {key: p.detach() for key, p in model.named_parameters()},
            "mean": handle.mean_weights(),
            "bytes": handle.bytes,
        }
        handle.remove()
    for name, facts in here.items():
        for key, value in facts.items():
            assert same(value, there[name][replica][key]), (name, key)


# ------------------------------------------------------------------ a GPT over four ranks

STRATEGIES: dict[str, dict[str, Any]] = {
    "diloco": {"every": 2},
    "sparseloco": {"every": 2},
    "dion": {},
    "onebit_adam": {"warmup_steps": 2},
}
TP2_JOB: dict[str, Any] = {"parallel": {**TP2, "sequence": True}, "train": {"global_batch": 4}}
PP2_JOB: dict[str, Any] = {"parallel": PP2}  # with tied embeddings
DP4_JOB: dict[str, Any] = {"parallel": DP4, "train": OVERLAP}
VPP2_JOB = {"parallel": {**PP2, "virtual_pipeline": 2}, "model": {"layers": 4}, "train": {"overlap_grad_reduce": True}}
CELLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((name, PP2_JOB, NONE) for name in STRATEGIES),
    *((name, DP4_JOB, NONE) for name in ("diloco", "sparseloco", "onebit_adam")),
    *((name, TP2_JOB, NONE) for name in ("diloco", "sparseloco", "dion")),
    ("diloco", VPP2_JOB, NONE),
    ("diloco", {**PP2_JOB, "train": {"precision": "bf16"}}, NONE),
    # Of what each rank would, by itself, make another thing than the rank that has a copy of it.
    ("diloco", PP2_JOB, {"method": "powersgd", "rank": 4}),
    ("shared_mask", TP2_JOB, {**NONE, "min_compression_elements": 1}),
]


class Job:
    """A GPT's session with a strategy, at a constant rate, whose state can be taken and set."""

    def __init__(self, name: str, layout: dict[str, Any], compression: dict[str, Any] = NONE) -> None:
        self.run = configuration(name, NONE, **layout)
        self.session = session_of(self.run)
        self.session.attachment.remove()
        self.session.scheduler = SimpleNamespace(step=lambda increment: None)  # type: ignore[assignment]
        self.compression = EDGCConfig.from_dict(compression)
        self.settings = StrategyConfig.from_dict({"name": name, **STRATEGIES.get(name, {})})
        self.local = self.settings.equal == "round"
        options: dict[str, Any] = {"clip_grad": 1.0}
        if self.run.train.precision == "bf16":
            options |= {"bf16": True, "params_dtype": torch.bfloat16}
        kind, rate = ("adam", 3e-3) if self.local else ("sgd", 0.02)
        self.session.optimizer = optimizer_of(kind, self.session.chunks, rate, **options)
        self.parameters = [p for chunk in self.session.chunks for p in chunk.parameters()]
        self.poison = Poison(self.session)

    def attach(self, **options: Any) -> StrategyHandle:
        options = {"strategy": self.settings, "optimizer": self.session.optimizer, **options}
        handle = attach(self.session.chunks, self.compression, iterations=20, **options)
        assert isinstance(handle, StrategyHandle)
        return handle

    def steps(self, first: int, last: int, replica: int | None = None) -> list[float]:
        return steps(self.session, self.run, first, last, replica)

    def state(self) -> tuple[list[Tensor], Any]:
        """Weights and the optimizer's state."""
        return copy.deepcopy(([p.detach() for p in self.parameters], self.session.optimizer.state_dict()))

    @torch.no_grad()
    def load(self, state: tuple[list[Tensor], Any]) -> None:
        for p, saved in zip(self.parameters, state[0], strict=True):
            p.copy_(saved)
        self.session.optimizer.load_state_dict(copy.deepcopy(state[1]))


def kept_by_void(handle: StrategyHandle) -> dict[str, Any]:
    """What a void step or round leaves of the strategy's state as it was."""
    return {key: value for key, value in handle.state_dict()["shared"].items() if key != "step"}


def check(cell: tuple[str, dict[str, Any], dict[str, Any]], folder: Path) -> None:
    """Replicas are equal when they should be, a run goes on bit for bit, and what is not finite on one rank makes a
    step or round void on all ranks of all stages."""
    job = Job(*cell)
    handle = job.attach()
    assert all(p.dtype == torch.float32 for p in handle.parameters.values())
    job.steps(0, 2)
    equal, after_round = [gather_objects(copies(job.session))], job.state()[0]
    job.steps(2, 3)
    between, state = gather_objects(copies(job.session)), job.state()
    checkpoint.save(folder, handle, iteration=3)
    job.steps(3, 4)
    equal.append(gather_objects(copies(job.session)))
    end, sent = job.state()[0], handle.bytes
    handle.remove()
    job.load(state)
    handle = job.attach()
    assert checkpoint.load(folder, handle) == 3
    before = copy.deepcopy(handle.state_dict())
    job.steps(3, 4)
    resumed = same(job.state()[0], end)
    job.load(state)
    handle.load_state_dict(before)
    kept = copy.deepcopy(kept_by_void(handle))
    job.poison.active = True
    job.steps(3, 4)
    job.poison.active = False
    void = same(job.state()[0], after_round if job.local else state[0]) and same(kept_by_void(handle), kept)
    losses = job.steps(4, 5)
    handle.remove()
    for ranks in equal:
        one(ranks)
    if job.local:
        with pytest.raises(AssertionError):
            one(between)
    assert resumed and void and sent > 0, (cell, resumed, void)
    assert math.isfinite(losses[0]) or not job.session.is_last_stage, cell


@case
def layouts() -> None:
    with tempfile.TemporaryDirectory() as own:
        root = Path(gather_objects(own)[0])
        for number, cell in enumerate(CELLS):
            check(cell, root / f"{number}" / "iter_0000003")


@case
def by_hand() -> None:
    """Four steps of DiLoCo, two rounds, are what its formula makes of the steps of single replicas."""
    for layout in ({"parallel": TP2}, {"parallel": PP2}):
        job = Job("diloco", layout)
        first = job.state()
        handle = job.attach()
        job.steps(0, 4)
        ends = [p.double() for p in job.state()[0]]
        handle.remove()
        anchor = [p.double() for p in first[0]]
        velocity = [torch.zeros_like(p) for p in anchor]
        optimizers = [first[1], first[1]]
        for begin in (0, 2):
            moved: list[list[Tensor]] = []
            for replica in range(2):
                job.load(([p.float() for p in anchor], optimizers[replica]))
                job.steps(begin, begin + 2, replica)  # all replicas on the data of one: its own steps
                reached, optimizers[replica] = job.state()
                moved.append([start - p.double() for start, p in zip(anchor, reached, strict=True)])
            for index, (u, *deltas) in enumerate(zip(velocity, *moved, strict=True)):
                mean = sum(deltas) / 2
                velocity[index] = 0.9 * u + mean
                anchor[index] = anchor[index] - 0.7 * (mean + 0.9 * velocity[index])
        largest = max(float((p - start.double()).abs().max()) for p, start in zip(anchor, first[0], strict=True))
        apart = max(float((p - end).abs().max()) for p, end in zip(anchor, ends, strict=True))
        assert largest > 1e-3 and apart < 1e-3 * largest, (layout, apart, largest)


@case
def refusals() -> None:
    """What cannot work is refused in one line, on all ranks, and leaves nothing behind."""
    for layout, word in (
        ({"train": {"distributed_optimizer": True}}, "use_distributed_optimizer"),
        ({"parallel": {**DP4, "expert": 2}, "model": {"experts": 4}}, "expert parallelism"),
        ({"train": {"precision": "fp16"}}, "loss scale"),
    ):
        session = session_of(configuration("refused", NONE, **layout))
        session.attachment.remove()
        options: dict[str, Any] = {"iterations": 9, "strategy": StrategyConfig.from_dict("diloco")}
        options["optimizer"] = session.optimizer
        refused(lambda: attach(session.chunks, EDGCConfig(), **options), word)  # noqa: B023
    job = Job("diloco", PP2_JOB)
    refused(lambda: job.attach(optimizer=None), "optimizer=...")
    refused(lambda: job.attach(optimizer=torch.optim.SGD(job.parameters)), "Megatron's optimizer")
    refused(lambda: job.attach(observer=print), "observer")
    optimizer = job.session.optimizer
    told = ["rank 3 refused", "one optimizer"][dist.get_rank() == 3 :]
    refused(lambda: job.attach(optimizer=type(optimizer)([]) if dist.get_rank() == 3 else optimizer), *told)
    job.compression = EDGCConfig.from_dict({"method": "powersgd", "rank": 4})
    refused(lambda: job.attach(strategy=StrategyConfig.from_dict("sparseloco")), "compression.method")
    groups = [group for chunk in job.session.chunks for group in chunk.bucket_groups]
    assert all(type(group) is _ParamAndGradBucketGroup for group in groups)
    handle = job.attach()
    refused(job.attach, "already have an attachment")
    job.steps(0, 1)
    state = handle.state_dict()
    place = {**state["place"], "pipeline": 1 - state["place"]["pipeline"]}
    refused(lambda: handle.load_state_dict({**state, "place": place}), "pipeline parallel rank")
    refused(lambda: handle.load_state_dict({**state, "settings": {}}), "other settings: strategy.name = None, now ")
    handle.remove()
    assert all(type(group) is _ParamAndGradBucketGroup for group in groups)
    each = attach(job.session.chunks, job.compression, iterations=9, strategy=StrategyConfig.from_dict("every_step"))
    assert isinstance(each, Attachment)
    each.remove()


test_megatron = case.test()
