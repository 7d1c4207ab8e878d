"""All replicas of a run in one process, without torchrun: the model, batches, optimizer, log and files of
:mod:`experiments.training.train`, through :class:`edgc.rehearsal.Rehearsal`.

Averaged gradients of two replicas give the same losses as between processes, bit for bit; those of more up to the order
of sums. Of a strategy whose replicas differ, the mean of their weights is evaluated. The seconds are those of one
process that works for all replicas, and exchanges nothing.
"""

from __future__ import annotations

import copyreg
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from edgc.checkpoints import manifest, rank_files
from edgc.compressors.base import Statistics
from edgc.engine import Engine
from edgc.megatron import checkpoint
from edgc.monitor import Iteration
from edgc.rehearsal import Rehearsal
from experiments.data.batches import MicroBatch, train_batches, validation_batches
from experiments.data.folder import load_info
from experiments.spec.settings import RunConfig
from experiments.training.build import build_optimizer, initialise, learning_rate
from experiments.training.checkpoint import Checkpoints
from experiments.training.loop import Training, forward, mean_loss
from experiments.training.model import build_model, transformer_config
from experiments.training.probes import Recorder
from experiments.training.run_log import Step, rank_step, reduce_step


@dataclass
class Session:
    """All replicas of a run, ready to train.

    Attributes:
        losses: of the micro-batches of this step, replica by replica.
        norms: of the gradients of this step before they were clipped, of each replica.
    """

    run: RunConfig
    device: torch.device
    rehearsal: Rehearsal = field(init=False)
    scheduler: OptimizerParamScheduler = field(init=False)
    recorders: list[Recorder] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def loss(self, model: Any, batch: MicroBatch) -> Tensor:
        """Mean loss of a micro-batch, which is noted."""
        loss = mean_loss(*forward(model, batch, self.run, self.device))
        self.losses.append(loss.detach())
        return loss

    def clip(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip a replica's gradients as Megatron's optimizers do, and note their norm."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        group = parallel_state.get_model_parallel_group()
        norm = get_grad_norm_fp32([p.grad for p in parameters], grad_stats_parallel_group=group)
        clip_grad_by_total_norm_fp32(parameters, self.run.train.clip_grad, norm)
        self.norms.append(norm)


def build(run: RunConfig, vocab_size: int) -> Session:
    """Build the replicas of a run, in process groups of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    session, config = Session(run, initialise(run)), transformer_config(run)
    model = build_model(run, vocab_size, config=config)
    model.ddp_config = DistributedDataParallelConfig()  # which Megatron's optimizers ask for
    optimizer, session.scheduler = build_optimizer(run, [model])
    copyreg.pickle(dist.ProcessGroup, str)  # a copy of the model has the groups that it has
    session.rehearsal = Rehearsal(
        model,
        optimizer=optimizer.chained_optimizers[0].optimizer,
        config=run.edgc,
        strategy=run.exchange,
        replicas=run.parallel.data,
        iterations=run.train.iterations,
        loss=session.loss,
        micro_batches=run.micro_batches,
        clip=session.clip if run.train.clip_grad > 0 else None,
        # As Megatron averages them: together, the last one first.
        buckets=[[name for name, _ in model.named_parameters()][::-1]],
    )
    return session


class RehearsalCheckpoints(Checkpoints):
    """States of all replicas, in one file."""

    def _write(self, folder: Path, iteration: int) -> None:
        about = {"iteration": iteration, "layout": checkpoint.layout(), "published": True}
        rank_files.write(folder / checkpoint.FOLDER, self.session.rehearsal.state_dict(), lambda: about)

    def _read(self, folder: Path, *, changed_settings: bool) -> None:
        inner = folder / checkpoint.FOLDER
        self.session.rehearsal.load_state_dict(rank_files.load(inner, manifest.read(inner), rank_files.file_of(0)))


class Rehearsed(Training):
    """A run of which all replicas are here; arguments as :class:`~experiments.training.train.Trainer`'s."""

    def __init__(self, session: Session, data_dir: Path, vocab_size: int, attempt: Path) -> None:
        checkpoints = RehearsalCheckpoints(session, attempt.parent, load_info(data_dir).fingerprint)
        super().__init__(session.run, vocab_size, attempt, checkpoints, speaks=True)
        self.session, self.rehearsal, self.data_dir = session, session.rehearsal, data_dir
        self.replicas = session.run.parallel.data
        self.batches: list[Iterator[MicroBatch]] = []
        self._skipped_in_a_row = 0

    @property
    def engine(self) -> Engine | None:
        return next(iter(self.rehearsal.engines), None)

    @property
    def lr(self) -> float:
        return learning_rate(self.rehearsal.optimizers[0])

    @property
    def skipped_in_a_row(self) -> int:
        return self._skipped_in_a_row

    @property
    def weights(self) -> list[Tensor]:
        return [weight for model in self.rehearsal.models for weight in model.parameters()]

    def start_batches(self, first: int) -> None:
        self.batches = [
            train_batches(self.run, self.data_dir, replica, self.replicas, first) for replica in range(self.replicas)
        ]

    def _next(self, batches: Iterator[MicroBatch]) -> Any:
        micro_batches = [next(batches) for _ in range(self.run.micro_batches)]
        return micro_batches if len(micro_batches) > 1 else micro_batches[0]

    def train_step(self, iteration: int) -> Step:
        session, rehearsal = self.session, self.rehearsal
        session.losses, session.norms = [], []
        sent, skipped = rehearsal.bytes, rehearsal.skipped
        rehearsal.step([self._next(batches) for batches in self.batches])
        was_skipped = rehearsal.skipped > skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if was_skipped else 0
        if not was_skipped:
            session.scheduler.step(increment=1)
        losses = torch.stack(session.losses).view(self.replicas, -1)
        bytes_sent = round(rehearsal.bytes - sent)
        return reduce_step(
            [
                rank_step(
                    0,
                    replica,
                    float(losses[replica].mean()),
                    math.nan if was_skipped or not session.norms else session.norms[replica],
                    self._done(replica, iteration, bytes_sent, skipped=was_skipped),
                )
                for replica in range(self.replicas)
            ]
        )

    def _done(self, replica: int, iteration: int, sent: int, *, skipped: bool) -> Iteration:
        """Record of a step of a replica; of the engine's where that averaged its gradients."""
        last = self.rehearsal.engines[replica].last if self.rehearsal.engines else None
        if last is None or last.iteration != iteration:
            return Iteration(iteration, None, Statistics(bytes=sent), skipped=skipped)
        return replace(last, statistics=replace(last.statistics, bytes=sent), skipped=skipped)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[int]) -> list[float]:
        rehearsal = self.rehearsal
        model: Any = rehearsal.averaged() if len(rehearsal.models) > 1 else rehearsal.models[0]
        model.eval()
        means = []
        for replica in range(self.replicas):
            text = iter(validation_batches(self.run, self.data_dir, replica, self.replicas, max(batches)))
            losses = [self._validation_loss(model, text) for _ in range(max(batches))]
            means.append([sum(losses[:count]) / count for count in batches])
        model.train()
        return [sum(column) / len(column) for column in zip(*means, strict=True)]

    def _validation_loss(self, model: Any, batches: Iterator[MicroBatch]) -> float:
        micro_batches = [next(batches) for _ in range(self.run.micro_batches)]
        outputs = [forward(model, batch, self.run, self.session.device) for batch in micro_batches]
        return float(torch.stack([mean_loss(*output) for output in outputs]).mean())

    def add_loss(self, loss: float) -> None:
        for engine in self.rehearsal.engines:
            engine.add_loss(loss)

    def dense_bytes(self) -> int:
        return self.rehearsal.dense_bytes

    def finish(self, *, weights: bool) -> None:
        """Nothing is recorded beside the log, and weights are not kept."""


def work(run: RunConfig, data_dir: Path, vocab_size: int, attempt: Path) -> dict[str, Any]:
    """The whole of a run; returns its summary."""
    summary = Rehearsed(build(run, vocab_size), data_dir, vocab_size, attempt).train()
    assert summary is not None
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return summary
