"""The course of a run, whatever computes its steps: iterations, evaluations, log, and states on the way there."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgc.checks import plain
from edgc.engine import Engine
from experiments.data.batches import MicroBatch
from experiments.spec.settings import FinalConfig, RunConfig
from experiments.training.checkpoint import Checkpoints, Progress
from experiments.training.lineage import branched_log
from experiments.training.outputs import CHECKPOINTS, LOG, WARM_UP, read_events
from experiments.training.run_log import RunLog, Step, number, perplexity, summary

DIVERGED_LOSS = 2.0  # times log(vocabulary), the loss of a uniform guess
DIVERGED_STEPS = 10
SKIPPED_STEPS = 20  # in a row, because of gradients that are not finite


def forward(model: Any, batch: MicroBatch, run: RunConfig, device: torch.device) -> tuple[Any, Tensor]:
    """Output of a model for a micro-batch, which on its last stage is the loss of every token, and their mask."""
    tokens, labels = batch["tokens"].to(device), batch["labels"].to(device)
    mask = batch["loss_mask"].to(device)
    if run.model.architecture == "bert":
        assert batch["attention_mask"] is not None
        output = model(tokens, batch["attention_mask"].to(device), lm_labels=labels)
        return output[0] if isinstance(output, tuple) else output, mask
    # Without a mask the model uses its own causal one.
    return model(tokens, batch["position_ids"].to(device), None, labels=labels), mask


def mean_loss(losses: Tensor, mask: Tensor) -> Tensor:
    """Mean loss of the tokens that count."""
    return (losses.float() * mask).sum() / mask.sum()


class Training:
    """Base of what computes the steps of a run; it runs them and reports them.

    Args:
        run, vocab_size: what is trained, and the size of the tokenizer's vocabulary.
        attempt: folder for the run's files, which the one that ``speaks`` writes. Checkpoints lie beside it, so that
            they outlive an attempt.
        checkpoints: of this run.
    """

    def __init__(
        self, run: RunConfig, vocab_size: int, attempt: Path, checkpoints: Checkpoints, *, speaks: bool
    ) -> None:
        self.run, self.vocab_size, self.attempt, self.checkpoints = run, vocab_size, attempt, checkpoints
        self.speaks, self.log = speaks, RunLog(run, attempt, speaks=speaks)
        self.sums: list[Tensor] = []  # of the weights at the final evaluations so far

    # ------------------------------------------------------------------ what computes the steps

    @property
    def engine(self) -> Engine | None:
        """The engine that averages gradients; None where none are averaged."""
        raise NotImplementedError

    @property
    def lr(self) -> float:
        """Learning rate of the next step, as it is logged."""
        raise NotImplementedError

    @property
    def skipped_in_a_row(self) -> int:
        """Number of steps that were skipped up to and with the last one."""
        raise NotImplementedError

    @property
    def weights(self) -> list[Tensor]:
        """The weights that are trained here, of all replicas that are here."""
        raise NotImplementedError

    def start_batches(self, first: int) -> None:
        """Begin with the batches that follow iteration ``first``."""
        raise NotImplementedError

    def train_step(self, iteration: int) -> Step:
        """Train one step on the next batches."""
        raise NotImplementedError

    def evaluate(self, batches: Sequence[int]) -> list[float]:
        """Mean validation losses in nats per token, over the first so many global batches, the same for every run."""
        raise NotImplementedError

    def add_loss(self, loss: float) -> None:
        """Tell the policies the training loss of a step."""
        raise NotImplementedError

    def dense_bytes(self) -> int:
        """Bytes that one replica, all stages, sends in an uncompressed step. Collective."""
        raise NotImplementedError

    def finish(self, *, weights: bool) -> None:
        """Write what was recorded beside the log, and the ``weights`` at the end."""
        raise NotImplementedError

    # ------------------------------------------------------------------ the run

    def train(self) -> dict[str, Any] | None:
        """Run to the end or to divergence; returns the summary where the log is written, None elsewhere."""
        run, started = self.run, time.perf_counter()
        tokens = run.train.global_batch * run.model.sequence_length
        status = "ok"
        with self.log:
            resumed = self.checkpoints.resume() or self.checkpoints.branch()
            dense = self._start(anew=resumed is None or resumed.branched_from is not None)
            iteration = first = 0
            validation, resumed_at = math.nan, list[int]()
            if resumed is not None:
                iteration = first = resumed.iteration
                resumed_at = resumed.resumed_at
                started -= resumed.seconds
                self.sums = resumed.sums
                validation = self._replay(resumed)
            self.start_batches(first)
            for iteration in range(first + 1, run.train.iterations + 1):
                start = time.perf_counter()
                was_warm_up = self._in_warm_up()
                step = self.train_step(iteration)
                seconds = time.perf_counter() - start
                self.add_loss(step.loss)
                self.log.step(iteration, step, self.lr, seconds)
                if self.engine is not None:
                    self.log.decision(self.engine)
                if self._diverged():
                    status = "diverged"
                    break
                if iteration % run.train.eval_interval == 0 or iteration == run.train.iterations:
                    [validation] = self.evaluate([run.train.eval_batches])
                    self.log.evaluation(iteration, step.loss, validation)
                if run.train.final and run.train.final.due(iteration, run.train.iterations):
                    self._evaluate_finally(iteration, run.train.final)
                if due := self._checkpoints_due(iteration, warm_up_ended=was_warm_up and not self._in_warm_up()):
                    elapsed = time.perf_counter() - started
                    progress = Progress(iteration, elapsed, resumed_at, self.attempt / LOG, sums=self.sums)
                    for name in due:
                        self.checkpoints.save(progress, name)
            if status == "ok" and not math.isfinite(validation):
                status = "diverged"
            seconds_total = time.perf_counter() - started
            self.log.write("end", status=status, iterations=iteration, seconds=seconds_total, error=None)
        self.finish(weights=run.train.checkpoint and status == "ok")
        if not self.speaks:
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

    def _evaluate_finally(self, iteration: int, final: FinalConfig) -> None:
        """Log the losses of the weights as they are and, at the end, of their mean over all final evaluations."""
        weights = [weight.detach().float() for weight in self.weights]
        sums = self.sums or [torch.zeros_like(weight) for weight in weights]
        self.sums = [total + weight for total, weight in zip(sums, weights, strict=True)]
        self._log_final(iteration, "last", final)
        if iteration == self.run.train.iterations:
            with self._mean_weights(final.evaluations):
                self._log_final(iteration, "mean", final)

    def _log_final(self, iteration: int, weights: str, final: FinalConfig) -> None:
        train, counts = self.run.train, (self.run.train.eval_batches, final.batches)
        for count, loss in zip(counts, self.evaluate(counts), strict=True):
            tokens = count * train.global_batch * self.run.model.sequence_length
            self.log.write("final", iteration=iteration, weights=weights, tokens=tokens, loss=loss)

    @contextmanager
    def _mean_weights(self, count: int) -> Iterator[None]:
        """In place of the weights, their sums over ``count``."""
        with torch.no_grad():
            kept = [weight.clone() for weight in self.weights]
            for weight, total in zip(self.weights, self.sums, strict=True):
                weight.copy_(total / count)
            yield
            for weight, value in zip(self.weights, kept, strict=True):
                weight.copy_(value)

    def _in_warm_up(self) -> bool:
        return self.engine is not None and self.engine.plan.in_warm_up

    def _checkpoints_due(self, iteration: int, *, warm_up_ended: bool) -> list[str]:
        """The folders in which to save the state after ``iteration``."""
        # In this order: a run that is killed between the two goes on from before the end of warm-up, and saves both.
        due = [WARM_UP] if warm_up_ended and self.run.train.keep_warm_up else []
        return due + ([CHECKPOINTS] if self.checkpoints.due(iteration) else [])

    def _replay(self, resumed: Progress) -> float:
        """Take over the log of the iterations before a checkpoint; returns the last validation loss."""
        events = read_events(resumed.metrics)
        if resumed.branched_from is not None:
            assert self.engine is not None
            events = branched_log(events, resumed.branched_from, self.engine.controller)
        for event in events:
            self.log.write(**event)
        return next((number(event["loss"]) for event in reversed(events) if event["event"] == "eval"), math.nan)

    def _start(self, *, anew: bool) -> int:
        """Log the start of a new run; returns the bytes of an uncompressed step."""
        dense = self.dense_bytes()
        if anew:
            self.log.write(
                "start",
                study=self.run.study,
                run=self.run.name,
                iterations=self.run.train.iterations,
                world=self.run.parallel.world,
                stages=self.run.parallel.pipeline,
                bytes_dense=dense,
            )
        return dense

    def _diverged(self) -> bool:
        """Twenty skipped steps in a row, or ten far worse than guessing; the same answer on every rank."""
        last = self.log.losses[-DIVERGED_STEPS:]
        far = len(last) == DIVERGED_STEPS and min(last) > DIVERGED_LOSS * math.log(self.vocab_size)
        return far or self.skipped_in_a_row >= SKIPPED_STEPS
