"""One rank of one training run: Megatron's schedule, optimizer and data-parallel buckets, EDGC attached.

Started by ``experiments.training.launch`` on every rank, at every scale. Deterministic from the run's seed: two runs on
one machine give the same losses bit for bit.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from edgc.checks import plain
from edgc.runtime.channel import all_reduce_bytes
from edgc.runtime.groups import gather_objects
from experiments.data.batches import MicroBatch, train_batches, validation_batches
from experiments.data.folder import load_info
from experiments.spec.settings import RunConfig
from experiments.training.build import Session, build
from experiments.training.checkpoint import Checkpoints, Progress, save_model
from experiments.training.lineage import branched_log
from experiments.training.model import is_expert
from experiments.training.outputs import CHECKPOINTS, LOG, WARM_UP, read_events
from experiments.training.run_log import (
    RunLog,
    Step,
    gather_numbers,
    gather_step,
    number,
    perplexity,
    rank_step,
    summary,
)

DIVERGED_LOSS = 2.0  # times log(vocabulary), the loss of a uniform guess
DIVERGED_STEPS = 10
SKIPPED_STEPS = 20  # in a row, because of gradients that are not finite


class Trainer:
    """Runs the iterations of one session and reports them.

    Args:
        session, data_dir: this rank's part of the job, and the folder of prepared data.
        attempt: folder for the run's files, which rank 0 writes. Checkpoints lie beside it, so that they outlive an
            attempt.
    """

    def __init__(self, session: Session, data_dir: Path, vocab_size: int, attempt: Path) -> None:
        self.session, self.run, self.data_dir, self.attempt = session, session.run, data_dir, attempt
        self.vocab_size = vocab_size
        self.log = RunLog(session.run, attempt, speaks=dist.get_rank() == 0)
        self.replica = int(parallel_state.get_data_parallel_rank())
        self.replicas = int(parallel_state.get_data_parallel_world_size())
        self.forward_backward = get_forward_backward_func()
        self.checkpoints = Checkpoints(session, attempt.parent, load_info(data_dir).fingerprint)

    # ------------------------------------------------------------------ forward and backward

    def _forward_step(self, batches: Iterator[MicroBatch], model: Any) -> Any:
        device = self.session.device
        batch = next(batches)
        tokens, labels = batch["tokens"].to(device), batch["labels"].to(device)
        mask = batch["loss_mask"].to(device)
        if self.run.model.architecture == "bert":
            assert batch["attention_mask"] is not None
            output = model(tokens, batch["attention_mask"].to(device), lm_labels=labels)
            output = output[0] if isinstance(output, tuple) else output
        else:
            # Without a mask the model uses its own causal one.
            output = model(tokens, batch["position_ids"].to(device), None, labels=labels)

        def loss_function(losses: torch.Tensor) -> Any:
            loss = (losses.float() * mask).sum() / mask.sum()
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

    def _train_step(self, iteration: int, batches: Iterator[MicroBatch]) -> Step:
        session = self.session
        for chunk in session.chunks:
            chunk.zero_grad_buffer()
        session.optimizer.zero_grad()
        loss = self._schedule(batches, forward_only=False)
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
    def evaluate(self) -> float:
        """Mean validation loss in nats per token, over the same batches for every run."""
        for chunk in self.session.chunks:
            chunk.eval()
        batches = iter(validation_batches(self.run, self.data_dir, self.replica, self.replicas))
        losses = [self._schedule(batches, forward_only=True) for _ in range(self.run.train.eval_batches)]
        for chunk in self.session.chunks:
            chunk.train()
        numbers = (sum(losses) / len(losses), self.session.is_last_stage)
        means = [mean for mean, counts in gather_numbers(numbers, self.session.device) if counts]
        return sum(means) / len(means)

    # ------------------------------------------------------------------ the run

    def train(self) -> dict[str, Any] | None:
        """Run to the end or to divergence; returns the summary on rank 0, None elsewhere."""
        run, started = self.run, time.perf_counter()
        tokens = run.train.global_batch * run.model.sequence_length
        status, engine = "ok", self.session.attachment.engine
        with self.log:
            resumed = self.checkpoints.resume() or self.checkpoints.branch()
            dense = self._start(anew=resumed is None or resumed.branched_from is not None)
            iteration = first = 0
            validation, resumed_at = math.nan, list[int]()
            if resumed is not None:
                iteration = first = resumed.iteration
                resumed_at = resumed.resumed_at
                started -= resumed.seconds
                validation = self._replay(resumed)
            batches = train_batches(run, self.data_dir, self.replica, self.replicas, first)
            for iteration in range(first + 1, run.train.iterations + 1):
                start = time.perf_counter()
                plan = engine.plan
                step = self._train_step(iteration, batches)
                seconds = time.perf_counter() - start
                self.session.attachment.add_loss(step.loss)
                lr = self.session.optimizer.param_groups[0]["lr"]
                self.log.step(iteration, step, lr, seconds)
                self.log.decision(engine)
                if self._diverged():
                    status = "diverged"
                    break
                if iteration % run.train.eval_interval == 0 or iteration == run.train.iterations:
                    validation = self.evaluate()
                    self.log.evaluation(iteration, step.loss, validation)
                warm_up_ended = plan.in_warm_up and not engine.plan.in_warm_up
                if due := self._checkpoints_due(iteration, warm_up_ended=warm_up_ended):
                    elapsed = time.perf_counter() - started
                    progress = Progress(iteration, elapsed, resumed_at, self.attempt / LOG)
                    for name in due:
                        self.checkpoints.save(progress, name)
            if status == "ok" and not math.isfinite(validation):
                status = "diverged"
            seconds_total = time.perf_counter() - started
            self.log.write("end", status=status, iterations=iteration, seconds=seconds_total, error=None)
        self._write_records()
        if run.train.checkpoint and status == "ok":
            save_model(self.session.chunks, run, self.attempt / "checkpoint")
        if dist.get_rank():
            return None
        events = read_events(self.attempt / LOG)
        return {
            "status": status,
            "error": None,
            "resumed_at": resumed_at,
            "signatures": sorted({event["signature"] for event in events if event["event"] == "signature"}),
            "validation_loss": plain(validation),
            "validation_perplexity": plain(perplexity(validation)),
            **summary([event for event in events if event["event"] == "step"], tokens, dense, seconds_total),
        }

    def _checkpoints_due(self, iteration: int, *, warm_up_ended: bool) -> list[str]:
        """The folders in which to save the state after ``iteration``."""
        # In this order: a run that is killed between the two goes on from before the end of warm-up, and saves both.
        due = [WARM_UP] if warm_up_ended and self.run.train.keep_warm_up else []
        return due + ([CHECKPOINTS] if self.checkpoints.due(iteration) else [])

    def _replay(self, resumed: Progress) -> float:
        """Take over the log of the iterations before a checkpoint; returns the last validation loss."""
        events = read_events(resumed.metrics)
        if resumed.branched_from is not None:
            events = branched_log(events, resumed.branched_from, self.session.attachment.engine.controller)
        for event in events:
            self.log.write(**event)
        return next((number(event["loss"]) for event in reversed(events) if event["event"] == "eval"), math.nan)

    def _start(self, *, anew: bool) -> int:
        """Log the start of a new run; returns the bytes that one replica, all stages, sends in an uncompressed step."""
        parameters = [p for chunk in self.session.chunks for p in chunk.module.parameters()]
        copies, dense = int(parallel_state.get_expert_data_parallel_world_size()), 0  # of an expert
        for experts, replicas in ((False, self.replicas), (True, copies)):
            size = sum(p.main_grad.nbytes for p in parameters if is_expert(p) == experts)
            total = torch.tensor(size, dtype=torch.float64, device=self.session.device)
            dist.all_reduce(total)
            # A replica holds the share of the experts that its rank has.
            dense += all_reduce_bytes(int(total) // self.replicas, replicas)
        if anew:
            self.log.write(
                "start",
                study=self.run.study,
                run=self.run.name,
                iterations=self.run.train.iterations,
                world=dist.get_world_size(),
                stages=self.run.parallel.pipeline,
                bytes_dense=dense,
            )
        return dense

    def _diverged(self) -> bool:
        """Twenty skipped steps in a row, or ten far worse than guessing; the same answer on every rank."""
        last = self.log.losses[-DIVERGED_STEPS:]
        far = len(last) == DIVERGED_STEPS and min(last) > DIVERGED_LOSS * math.log(self.vocab_size)
        return far or self.session.attachment.skipped_in_a_row >= SKIPPED_STEPS

    def _write_records(self) -> None:
        """Every rank hands its rows to rank 0, which writes the tables."""
        for recorder in self.session.recorders:
            rows = [row for rows in gather_objects(recorder.rows) for row in rows]
            if dist.get_rank() == 0 and rows:
                table = pd.DataFrame(rows).sort_values(list(recorder.keys), ignore_index=True)
                table.to_parquet(self.attempt / recorder.file, index=False)


def work(run: RunConfig, data_dir: Path, vocab_size: int, attempt: Path) -> dict[str, Any] | None:
    """The whole of one rank; returns the summary on rank 0, None elsewhere."""
    summary = Trainer(build(run, vocab_size), data_dir, vocab_size, attempt).train()
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return summary
