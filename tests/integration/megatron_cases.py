"""One training run under Megatron-Core, for the tests of its adapter."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from edgc.megatron import cpu_shims
from edgc.runtime.groups import gather_objects
from experiments.spec.settings import ParallelConfig, RunConfig
from tests.workers import same

with cpu_shims.without_compiler():
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from experiments.training import build as build_module
    from experiments.training.build import Session, build

VOCABULARY = 256
BASE: dict[str, Any] = {
    "scale": "test",
    "study": "test",
    "label": "test",
    "seed": 1,
    "model": {"layers": 2, "hidden": 48, "heads": 4, "sequence_length": 16},
    "parallel": {"pipeline": 2, "data": 2},
    "train": {
        "iterations": 20,
        "micro_batch": 2,
        "global_batch": 8,
        "lr": 3e-3,
        "lr_warmup_fraction": 0.1,
        "eval_interval": 20,
        "eval_batches": 1,
    },
}


def configuration(name: str, compression: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    values = {**BASE, "variant": name, "compression": compression}
    for key, section in sections.items():
        values[key] = {**values[key], **section}
    return RunConfig(**values)


def train(
    run: RunConfig,
    *,
    iterations: int = 20,
    full_rank: bool = False,
    attached: bool = True,
    poison: frozenset[int] = frozenset(),
    omit: frozenset[int] = frozenset(),
    prepare: Callable[[Session], Callable[[], dict[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Train on a fixed random stream; returns losses, a fingerprint of this rank's weights, and the decisions.

    Args:
        poison: iterations in which one entry of one gradient of the last rank is not a number.
        omit: iterations that are left out.
        prepare: may change the session before the first iteration; what it returns is called after the last one and
            adds to the result.
    """
    session = session_of(run)
    finish = prepare(session) if prepare is not None else dict
    if not attached:
        session.attachment.remove()
    engine = session.attachment.engine
    if full_rank:
        engine.compressor.always_factor = True  # type: ignore[attr-defined]
    losses, decisions, entropies = [], [], []
    poisons = Poison(session)
    kept = []
    for iteration in sorted(set(range(iterations)) - omit):
        poisons.active = iteration in poison
        before = engine.compressor.state_dict() if poisons.active else None
        losses += steps(session, run, iteration, iteration + 1)
        if before is not None:
            kept.append(same(before, engine.compressor.state_dict()))
        if attached and engine.decision is not None:
            decisions.append(asdict(engine.decision))
        if attached and engine.last is not None:
            entropies.append(engine.last.entropy)
    result = {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "replica": parallel_state.get_data_parallel_rank(),
        "losses": losses,
        "weights": weights(session),
        "decisions": decisions,
        "entropies": entropies,
        "bytes": engine.last.statistics.bytes if engine.last else 0,
        "skipped": session.attachment.skipped,
        "exposed": engine.last.exposed.seconds if engine.last and engine.last.exposed else 0.0,
        "skipped_in_a_row": session.attachment.skipped_in_a_row,
        "kept": kept,
        "scale": float(session.optimizer.get_loss_scale()),
        "copies": copies(session),
        **finish(),
    }
    session.attachment.remove()
    return result


Ranks = list[dict[str, Any]]


def everywhere(run: RunConfig, **options: Any) -> Ranks:
    """Results of :func:`train` of all ranks, on every rank, whose copies of a parameter are equal bit for bit."""
    ranks = gather_objects(train(run, **options))
    one([rank["copies"] for rank in ranks])
    return ranks


def one(ranks: list[dict[tuple[Any, ...], torch.Tensor]]) -> None:
    """Assert that all ranks' :func:`copies` of a parameter are equal bit for bit."""
    seen: dict[Any, torch.Tensor] = {}
    pairs = 0
    for rank in ranks:
        for key, weight in rank.items():
            pairs += key in seen
            assert torch.equal(seen.setdefault(key, weight), weight), key
    assert pairs, "no parameter has a copy"


def losses(ranks: Ranks) -> torch.Tensor:
    """Mean loss per iteration over the replicas of the last stage."""
    last = max(rank["stage"] for rank in ranks)
    return torch.tensor([r["losses"] for r in ranks if r["stage"] == last], dtype=torch.float64).mean(0)


def learns(ranks: Ranks, ends: int = 4, drop: float = 0.05) -> None:
    """Assert that the mean loss of the last iterations is lower than that of the first ones by more than ``drop``."""
    curve = losses(ranks)
    assert curve.isfinite().all() and curve[-ends:].mean() < curve[:ends].mean() - drop, curve


class _Groups:
    """Megatron's process groups, which one run after another uses where they have the same layout.

    To make and to end them takes longer than many of the runs: of gloo's, each has threads and connections of its own.
    """

    def __init__(self) -> None:
        self.of: ParallelConfig | None = None
        self.made: set[Any] = set()

    def session(self, run: RunConfig) -> Session:
        if dist.is_initialized():
            dist.barrier()  # no rank ends a group that another still uses
        again = self.of == run.parallel and parallel_state.model_parallel_is_initialized()
        if not again and parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        self.made = self.made if again else set()
        make = parallel_state.initialize_model_parallel

        def initialise(*sizes: Any, **options: Any) -> None:
            if not again:
                make(*sizes, **options)
                self.of, self.made = run.parallel, set(dist.distributed_c10d._world.pg_map)

        with (
            mock.patch.object(parallel_state, "initialize_model_parallel", initialise),
            mock.patch.object(build_module, "_end_earlier_sessions", self._end_others),
        ):
            return build(run, VOCABULARY)

    def _end_others(self) -> None:
        for group in [*dist.distributed_c10d._world.pg_map]:
            if group is not dist.group.WORLD and group not in self.made:
                dist.destroy_process_group(group)
        gc.collect()


session_of = _Groups().session


class Poison:
    """Makes one entry of one gradient of the last rank not a number, while ``active``."""

    def __init__(self, session: Session) -> None:
        self.active = False
        if dist.get_rank() == dist.get_world_size() - 1:
            matrices = [p for p in session.chunks[-1].parameters() if p.dim() == 2 and p.requires_grad]
            if matrices:
                matrices[len(matrices) // 2].register_hook(self._touch)

    def _touch(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.active:
            gradient = gradient.clone()
            gradient[0, 0] = float("nan")
        return gradient


def copies(session: Session) -> dict[tuple[Any, ...], torch.Tensor]:
    """This rank's parameters, in fp64, by what makes two of them copies: equal keys, equal bits."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    tensor, expert = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    found: dict[tuple[Any, ...], torch.Tensor] = {}
    for index, chunk in enumerate(session.chunks):
        for name, parameter in chunk.module.named_parameters():
            shard = tensor if getattr(parameter, "tensor_model_parallel", False) else "same on all"
            where: tuple[Any, ...] = (stage, index, name)
            if getattr(parameter, "shared", False) or getattr(parameter, "shared_embedding", False):
                where = ("tied embedding",)
            expert_part = "same on all" if getattr(parameter, "allreduce", True) else expert
            found[(*where, shard, expert_part)] = parameter.detach().double()
    return found


def _iteration(session: Session, run: RunConfig, iteration: int, replica: int) -> float:
    length, size = run.model.sequence_length, run.train.micro_batch
    generator = torch.Generator().manual_seed(100 * (iteration % 4) + replica)
    device = next(session.chunks[0].parameters()).device
    tokens = [
        torch.randint(0, VOCABULARY, (size, length + 1), generator=generator).to(device)
        for _ in range(run.micro_batches)
    ]
    positions = torch.arange(length, device=device).repeat(size, 1)

    def forward(batches: Any, model: Any) -> Any:
        batch = next(batches)
        inputs, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()

        def loss(output: torch.Tensor) -> Any:
            value = output.float().mean()
            return value, {"loss": value.detach().clone()}

        return model(inputs, positions, None, labels=labels), loss

    chunks, virtual = session.chunks, run.parallel.virtual_pipeline
    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(tokens) for _ in chunks] if virtual else iter(tokens),
        model=list(chunks) if virtual else chunks[0],
        num_microbatches=run.micro_batches,
        seq_length=length,
        micro_batch_size=size,
        forward_only=False,
        **session.pipeline_arguments(run.micro_batches),
    )
    return float(torch.stack([item["loss"] for item in losses]).mean()) if losses else float("nan")


def steps(session: Session, run: RunConfig, first: int, last: int, replica: int | None = None) -> list[float]:
    """Losses of this rank in iterations ``first`` to ``last`` - 1, on the data of ``replica`` (by default its own); nan
    before the last stage."""
    losses = []
    replica = parallel_state.get_data_parallel_rank() if replica is None else replica
    for iteration in range(first, last):
        for chunk in session.chunks:
            chunk.zero_grad_buffer()
        session.optimizer.zero_grad()
        losses.append(_iteration(session, run, iteration, replica))
        updated, _, _ = session.optimizer.step()
        if updated:
            session.scheduler.step(increment=1)
    return losses


def weights(session: Session) -> torch.Tensor:
    """This rank's parameters, in fp64, one after another."""
    return torch.cat([p.detach().double().reshape(-1) for c in session.chunks for p in c.parameters()])


EDGC = {
    "method": "edgc",
    "policy": "cqm",
    "r_max": 16,
    "r_min": 4,
    "window": 4,
    "stability_tolerance": 10.0,
    "entropy": {"iteration_rate": 0.5, "entry_rate": 0.5},
}
