"""One rank of one training run: Megatron's schedule, optimizer and data-parallel buckets, EDGC attached.

Started by ``experiments.training.launch`` on every rank, at every scale. Deterministic from the run's seed: two runs on
one machine give the same losses bit for bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from edgc.engine import Engine
from edgc.runtime.channel import all_reduce_bytes
from edgc.runtime.groups import gather_objects
from experiments.data.batches import MicroBatch, train_batches, validation_batches
from experiments.data.folder import load_info
from experiments.spec.settings import RunConfig
from experiments.training.build import Session, build, learning_rate
from experiments.training.checkpoint import Checkpoints, save_model
from experiments.training.loop import Training, forward, mean_loss
from experiments.training.model import is_expert
from experiments.training.run_log import Step, gather_numbers, gather_step, rank_step


class Trainer(Training):
    """One rank of a run.

    Args:
        session, data_dir: this rank's part of the job, and the folder of prepared data.
        attempt: see :class:`~experiments.training.loop.Training`.
    """

    def __init__(self, session: Session, data_dir: Path, vocab_size: int, attempt: Path) -> None:
        checkpoints = Checkpoints(session, attempt.parent, load_info(data_dir).fingerprint)
        super().__init__(session.run, vocab_size, attempt, checkpoints, speaks=dist.get_rank() == 0)
        self.session, self.data_dir = session, data_dir
        self.replica = int(parallel_state.get_data_parallel_rank())
        self.replicas = int(parallel_state.get_data_parallel_world_size())
        self.forward_backward = get_forward_backward_func()
        self.batches: Iterator[MicroBatch] = iter(())

    # ------------------------------------------------------------------ forward and backward

    def _forward_step(self, batches: Iterator[MicroBatch], model: Any) -> Any:
        output, mask = forward(model, next(batches), self.run, self.session.device)

        def loss_function(losses: torch.Tensor) -> Any:
            loss = mean_loss(losses, mask)
            # The schedule divides the returned loss in place.
            return loss, {"loss": loss.detach().clone()}

        return output, loss_function

    def _schedule(self, batches: Iterator[MicroBatch], *, forward_only: bool) -> float:
        """Run the next global batch's micro-batches; the mean loss on the last stage, nan elsewhere."""
        micro_batches = list(itertools.islice(batches, self.run.micro_batches))
        chunks = self.session.chunks
        virtual = self.run.parallel.virtual_pipeline
        iterators = [iter(micro_batches) for _ in chunks]
        losses = self.forward_backward(
            forward_step_func=self._forward_step,
            data_iterator=iterators if virtual else iterators[0],
            model=list(chunks) if virtual else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=self.run.model.sequence_length,
            micro_batch_size=self.run.train.micro_batch,
            forward_only=forward_only,
            **self.session.pipeline_arguments(len(micro_batches), forward_only=forward_only),
        )
        if not losses:
            return math.nan
        return float(torch.stack([item["loss"] for item in losses]).mean())

    # ------------------------------------------------------------------ what a run asks for

    @property
    def engine(self) -> Engine:
        return self.session.attachment.engine

    @property
    def lr(self) -> float:
        return learning_rate(self.session.optimizer)

    @property
    def skipped_in_a_row(self) -> int:
        return self.session.attachment.skipped_in_a_row

    @property
    def weights(self) -> list[torch.Tensor]:
        return [weight for chunk in self.session.chunks for weight in chunk.parameters()]

    def start_batches(self, first: int) -> None:
        self.batches = train_batches(self.run, self.data_dir, self.replica, self.replicas, first)

    def train_step(self, iteration: int) -> Step:
        session = self.session
        for chunk in session.chunks:
            chunk.zero_grad_buffer()
        session.optimizer.zero_grad()
        loss = self._schedule(self.batches, forward_only=False)
        updated, gradient_norm, _ = session.optimizer.step()
        if updated:
            session.scheduler.step(increment=1)
        done = session.attachment.engine.last
        assert done is not None
        assert done.iteration == iteration
        for recorder in session.recorders:
            recorder.end_iteration(iteration, done.skipped)
        norm = math.nan if gradient_norm is None else float(gradient_norm)
        traffic = session.pipeline.traffic if session.pipeline is not None else None
        return gather_step(rank_step(session.stage, self.replica, loss, norm, done, traffic), session.device)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[int]) -> list[float]:
        for chunk in self.session.chunks:
            chunk.eval()
        text = iter(validation_batches(self.run, self.data_dir, self.replica, self.replicas, max(batches)))
        losses = [self._schedule(text, forward_only=True) for _ in range(max(batches))]
        for chunk in self.session.chunks:
            chunk.train()
        numbers = (*(sum(losses[:count]) / count for count in batches), self.session.is_last_stage)
        means = [means for *means, counts in gather_numbers(numbers, self.session.device) if counts]
        return [sum(column) / len(column) for column in zip(*means, strict=True)]

    def add_loss(self, loss: float) -> None:
        self.session.attachment.add_loss(loss)

    def dense_bytes(self) -> int:
        parameters = [p for chunk in self.session.chunks for p in chunk.module.parameters()]
        copies, dense = int(parallel_state.get_expert_data_parallel_world_size()), 0  # of an expert
        for experts, replicas in ((False, self.replicas), (True, copies)):
            size = sum(p.main_grad.nbytes for p in parameters if is_expert(p) == experts)
            total = torch.tensor(size, dtype=torch.float64, device=self.session.device)
            dist.all_reduce(total)
            # A replica holds the share of the experts that its rank has.
            dense += all_reduce_bytes(int(total) // self.replicas, replicas)
        return dense

    def finish(self, *, weights: bool) -> None:
        """Hand the rows of every rank to rank 0, which writes the tables; save the weights of all."""
        for recorder in self.session.recorders:
            rows = [row for rows in gather_objects(recorder.rows) for row in rows]
            if dist.get_rank() == 0 and rows:
                table = pd.DataFrame(rows).sort_values(list(recorder.keys), ignore_index=True)
                table.to_parquet(self.attempt / recorder.file, index=False)
        if weights:
            save_model(self.session.chunks, self.run, self.attempt / "checkpoint")


def work(run: RunConfig, data_dir: Path, vocab_size: int, attempt: Path) -> dict[str, Any] | None:
    """The whole of one rank; returns the summary on rank 0, None elsewhere."""
    summary = Trainer(build(run, vocab_size), data_dir, vocab_size, attempt).train()
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return summary
