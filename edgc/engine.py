"""GDS, controller and compressor of one rank, put together; knows no training framework.

An adapter (:mod:`edgc.megatron`) hands over the gradients of a bucket with :meth:`Engine.reduce`, and calls
:meth:`Engine.end_iteration` once all buckets of the iteration are done. At window ends, and during the search for
r_max, the ranks exchange their measurements with one all-gather of a few numbers; every rank then computes the same
means in the same order, so every rank's controller takes the same decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from edgc.clock import mark, seconds_between
from edgc.compressors import Channel, Gradient, PowerSGD, Statistics, build
from edgc.compressors.base import Steps
from edgc.compressors.powersgd import compressible
from edgc.config import EDGCConfig
from edgc.controller import Controller, Decision, Plan, Report
from edgc.entropy import Sampler, combine, estimate

Observer = Callable[[int, Sequence[Gradient]], None]
Shape = tuple[int, int]


@dataclass(frozen=True)
class Iteration:
    """What this rank did in one iteration: ``rank`` is None where nothing was compressed, entropies in nats."""

    iteration: int
    rank: int | None
    entropy: float
    entropy_full: float
    seconds_entropy: float
    statistics: Statistics


@dataclass
class _Mean:
    """Running mean of the finite values given to it."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self.total += value
            self.count += 1

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else math.nan


class Engine:
    """State of EDGC on one rank.

    Args:
        config: validated settings, equal on all ranks.
        stage: pipeline stage of this rank.
        shapes: shapes of the compressible matrices of every stage, stage 0 first, equal on all ranks.
        iterations: length of the run, which warm-up is a share of.
        exchange_group: group over which ranks exchange measurements; None is the world.
        observer: called with the local gradients before they are reduced, for studies.
    """

    def __init__(
        self,
        config: EDGCConfig,
        *,
        stage: int,
        shapes: Sequence[Sequence[Shape]],
        iterations: int,
        exchange_group: dist.ProcessGroup | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.config = config
        self.stage = stage
        self.stages = len(shapes)
        self.compressor = build(config)
        self.controller = Controller(config, shapes, iterations)
        self.sampler = Sampler(config.entropy)
        self.exchange_group = exchange_group
        self.observer = observer
        self.iteration = 1
        self.plan: Plan = self.controller.plan(1)
        self.last: Iteration | None = None
        self.decision: Decision | None = None
        self.decision_entropy_full: tuple[float, ...] = ()
        self._window, self._window_full, self._backward = _Mean(), _Mean(), _Mean()
        self._trial: PowerSGD | None = None
        self._start_iteration()

    def _start_iteration(self) -> None:
        self._statistics = Statistics()
        self._sampled: list[tuple[float, int]] = []
        self._full: list[tuple[float, int]] = []
        self._entropy_seconds = 0.0
        self._probe_seconds = 0.0

    @property
    def rank(self) -> int | None:
        """Rank in use on this stage in this iteration; None is uncompressed."""
        return self.plan.ranks[self.stage]

    def reduce(self, gradients: Sequence[Gradient], group: dist.ProcessGroup | None) -> None:
        """Average ``gradients`` over ``group`` in place, compressed as the controller says.

        Raises:
            ValueError: if a gradient has no elements of a floating-point type.
        """
        for _ in self.exchange(gradients, group):
            pass

    def exchange(self, gradients: Sequence[Gradient], group: dist.ProcessGroup | None) -> Steps:
        """:meth:`reduce` as a generator that yields while collectives are under way.

        Between two yields a driver may advance other reductions, in an order that is the same on every rank.
        """
        if self.observer is not None:
            self.observer(self.iteration, gradients)
        if self.config.entropy.source == "local":
            self._measure(gradients)
        channel = Channel(group)
        if self.plan.probe_rank:
            self._time_trial(gradients, channel, self.plan.probe_rank)
        # With one replica there is nothing to send, so there is nothing to gain and an error to lose.
        rank = self.rank if channel.world > 1 else None
        statistics = yield from self.compressor.exchange(gradients, channel, rank)
        if self.plan.probe_rank == 0:
            self._probe_seconds += statistics.seconds_communicate + statistics.seconds_compress
        self._statistics = self._statistics + statistics
        if self.config.entropy.source == "reduced":
            self._measure(gradients)

    def _measure(self, gradients: Sequence[Gradient]) -> None:
        """Entropy of the compressible gradients, sampled and, for studies, of all entries."""
        sampled = self.config.method == "edgc" and self.sampler.measures(self.iteration)
        if not (sampled or self.config.record_full_entropy):
            return
        for gradient in gradients:
            if not compressible(gradient.tensor.shape, self.config.min_compression_elements):
                continue
            flat, size = gradient.tensor.reshape(-1), gradient.tensor.numel()
            if self.config.record_full_entropy:
                self._full.append((estimate(flat, self.config.entropy.estimator), size))
            if sampled:
                started = mark(flat.device)
                entries = self.sampler.take(flat, self.iteration, gradient.name)
                self._sampled.append((estimate(entries, self.config.entropy.estimator), size))
                self._entropy_seconds += seconds_between(started, mark(flat.device))

    def _time_trial(self, gradients: Sequence[Gradient], channel: Channel, rank: int) -> None:
        """Time a compressed reduction on copies; the training step itself stays uncompressed."""
        copies = [replace(gradient, tensor=gradient.tensor.clone()) for gradient in gradients]
        if self._trial is None:
            self._trial = PowerSGD(min_elements=self.config.min_compression_elements, seed=self.config.seed)
        started = mark(copies[0].tensor.device)
        self._trial.reduce(copies, channel, rank)
        self._probe_seconds += seconds_between(started, mark(copies[0].tensor.device))

    def end_iteration(self, backward_seconds: Sequence[float] = ()) -> None:
        """Close the iteration: record it, exchange measurements where planned, plan the next one.

        Args:
            backward_seconds: durations of this iteration's micro-batch backward passes on this rank.
        """
        entropy, entropy_full = _combined(self._sampled), _combined(self._full)
        self._window.add(entropy)
        self._window_full.add(entropy_full)
        for seconds in backward_seconds:
            self._backward.add(seconds)
        self.last = Iteration(
            iteration=self.iteration,
            rank=self.rank if self._statistics.compressed else None,
            entropy=entropy,
            entropy_full=entropy_full,
            seconds_entropy=self._entropy_seconds,
            statistics=self._statistics,
        )
        self.decision = None
        if self.plan.exchange:
            self._exchange_and_decide()
        self.iteration += 1
        self.plan = self.controller.plan(self.iteration)
        if self.plan.phase in ("active", "disabled"):
            self._trial = None
        self._start_iteration()

    def _exchange_and_decide(self) -> None:
        probe = self._probe_seconds if self.plan.probe_rank is not None else math.nan
        mine = [float(self.stage), self._window.value, self._window_full.value, probe, self._backward.value]
        rows = self._gather(mine)
        by_stage = [[row for row in rows if int(row[0]) == stage] for stage in range(self.stages)]
        entropy = tuple(_mean(row[1] for row in stage) for stage in by_stage)
        self.decision_entropy_full = tuple(_mean(row[2] for row in stage) for stage in by_stage)
        probe_seconds = tuple(_mean(row[3] for row in stage) for stage in by_stage)
        backward = _mean(row[4] for row in rows)
        report = Report(
            entropy=entropy,
            probe_seconds=None if self.plan.probe_rank is None else probe_seconds,
            backward_seconds=backward if math.isfinite(backward) else None,
        )
        self.decision = self.controller.observe(self.iteration, report)
        if self.iteration % self.config.window == 0:
            self._window, self._window_full, self._backward = _Mean(), _Mean(), _Mean()

    def _gather(self, values: list[float]) -> list[list[float]]:
        """The values of every rank, in rank order, the same on every rank."""
        if not dist.is_initialized():
            return [values]
        on_gpu = dist.get_backend(self.exchange_group) == "nccl"
        row = torch.tensor(values, dtype=torch.float64, device="cuda" if on_gpu else "cpu")
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(self.exchange_group))]
        dist.all_gather(rows, row, group=self.exchange_group)
        return [item.tolist() for item in rows]

    def state_dict(self) -> dict[str, Any]:
        """Everything this rank needs to go on exactly after a whole iteration: tensors and plain values."""
        means = (self._window, self._window_full, self._backward)
        return {
            "iteration": self.iteration,
            "controller": self.controller.state_dict(),
            "compressor": self.compressor.state_dict(),
            "means": [[mean.total, mean.count] for mean in means],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict` of the same rank under the same configuration."""
        self.iteration = int(state["iteration"])
        self.controller.load_state_dict(state["controller"])
        self.compressor.load_state_dict(state["compressor"])
        self._window, self._window_full, self._backward = (_Mean(t, int(c)) for t, c in state["means"])
        self.plan = self.controller.plan(self.iteration)
        self._start_iteration()


def _combined(entropies: Sequence[tuple[float, int]]) -> float:
    if not entropies:
        return math.nan
    return combine([value for value, _ in entropies], [size for _, size in entropies])


def _mean(values: Any) -> float:
    mean = _Mean()
    for value in values:
        mean.add(value)
    return mean.value
