"""Compressor, plan and measurements of one rank, put together; knows no training framework.

An adapter (:mod:`edgc.ddp`, :mod:`edgc.megatron`) hands over the gradients of a bucket with :meth:`Engine.reduce`, and
calls :meth:`Engine.end_iteration` once all buckets of the iteration are done. What is measured and decided is the
:class:`~edgc.monitor.Monitor`'s, which is asked only in iterations in which something is due.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from edgc.checkpoints.saved_state import compare_settings
from edgc.checks import need
from edgc.compressors import Channel, Compressor, Gradient, Statistics
from edgc.compressors.base import Steps
from edgc.compressors.powersgd.algorithm import PowerSGD
from edgc.config import EDGCConfig
from edgc.control.controller import Decision, Plan
from edgc.errors import UserError
from edgc.monitor import Iteration, Matrix, Monitor, Shape
from edgc.runtime.channel import Stopwatch
from edgc.runtime.device import own_modes

Gradients = Sequence[Gradient]
Observer = Callable[[int, Gradients], None]
Group = dist.ProcessGroup | None
Shards = Sequence[torch.Tensor]
Reduction = tuple[Gradients, Channel, Compressor, int | None]
_THROUGH = 1  # to a method without ranks the number says only that it is to compress
_STATE = ("settings", "iteration", "scale", "controller", "compressor", "window", "gate")


class Scaler(Protocol):
    """The part of a ``GradScaler`` that is used here."""

    def scale(self, outputs: Any) -> Any:
        """``outputs`` times the loss scale."""


def loss_scale(scaler: Scaler, device: torch.device, *, where: str) -> float:
    """The scale that ``scaler`` multiplies losses with; on a GPU the host waits for it.

    Raises:
        UserError: if that is not finite and above 0.
    """
    scale = float(scaler.scale(torch.ones((), dtype=torch.float32, device=device)))
    if not 0 < scale < math.inf:
        raise UserError(f"the loss scale is {scale}", where=where, fix="use a finite scale above 0")
    return scale


class Engine:
    """State of EDGC on one rank.

    Args:
        config: validated settings, equal on all ranks.
        stage: pipeline stage of this rank.
        stages: compressible matrices of every stage, stage 0 first, equal on all ranks; (rows, columns) is one of fp32.
        iterations: length of the run, which warm-up is a share of.
        exchange_group: group over which ranks exchange measurements; None is the world.
        observer: called with the local gradients before they are reduced, for studies.
        overlapped: whether reductions overlap with backward or with each other, so that the time they are waited for
            is only what nothing hid. Measurements of times know how to deal with that.
        open_channel: what reductions are sent through, for studies of other networks.
        embeddings: names of this rank's parameters that are embeddings (:func:`edgc.entropy.meter.embeddings`).

    Attributes:
        monitor: what is measured and decided.
        warm_up: compressor of warm-up, until it is over; None where warm-up is uncompressed.
        plan: what to do in this iteration.
        waits: how often a reduction of this iteration waits for its collectives, measurements aside.
        last: what was done in the last iteration; None before the first.
        decision: the controller's at the end of the last iteration; None if it took none.
    """

    @own_modes()
    def __init__(
        self,
        config: EDGCConfig,
        *,
        stage: int,
        stages: Sequence[Sequence[Matrix | Shape]],
        iterations: int,
        exchange_group: dist.ProcessGroup | None = None,
        observer: Observer | None = None,
        overlapped: bool = False,
        open_channel: Callable[..., Channel] = Channel,
        embeddings: Collection[str] = (),
    ) -> None:
        self.config, self.stage = config, stage
        self.compressor = config.build()
        self.warm_up = config.build_warm_up()
        self.observer, self.open_channel = observer, open_channel
        self.monitor = Monitor(
            config,
            # Through whatever reductions are sent at the time: studies exchange it.
            lambda *options: self.open_channel(*options),
            stage=stage,
            stages=[[Matrix(*matrix) for matrix in each] for each in stages],
            iterations=iterations,
            exchange_group=exchange_group,
            overlapped=overlapped,
            embeddings=embeddings,
        )
        self.controller, self.entropy = self.monitor.controller, self.monitor.entropy
        self.iteration = 1
        self.last: Iteration | None = None
        self.decision: Decision | None = None
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Plan this iteration, and all that follow until something is due."""
        self.plan: Plan = self.controller.plan(self.iteration)
        if self.warm_up is not None and not self.plan.in_warm_up:
            assert isinstance(self.compressor, PowerSGD)
            self.compressor.adopt_errors(self.warm_up)
            self.warm_up = None
        self.waits = self.compressor.waits(self.rank)
        if self.warm_up is not None:
            self.waits = max(self.waits, self.warm_up.waits(_THROUGH))
        self._next_due = self.monitor.next_due(self.iteration)
        self._statistics = Statistics()
        self._due = self._unused = False
        if self.iteration == self._next_due:
            self._begin_due()

    def _begin_due(self) -> None:
        self._due, self._unused = True, False
        self.plan = self.controller.plan(self.iteration)
        self.monitor.begin(self.iteration)

    @property
    def rank(self) -> int | None:
        """Rank in use on this stage in this iteration; None is uncompressed."""
        return self.plan.ranks[self.stage]

    @property
    def compresses(self) -> bool:
        """True if this iteration compresses, or times how long that would take; equal on all ranks of the stage."""
        return self.rank is not None or self.warm_up is not None or self.plan.probe_rank is not None

    @property
    def closes_at_once(self) -> bool:
        """True if this iteration must be closed before the next thing happens, even if the host waits for a GPU."""
        return self._due and (self.plan.exchange or self.monitor.closes_at_once or self._unused)

    @property
    def skips(self) -> int | torch.Tensor:
        """Reductions of this iteration that have met a gradient that was not finite; on a GPU nobody waits for it."""
        return self._statistics.skipped

    @property
    def given_up(self) -> bool:
        """True if there are :attr:`skips`; on a GPU the host waits."""
        return bool(self.skips)

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """Those that have state: the method's, and in warm-up that of warm-up."""
        return (self.compressor,) if self.warm_up is None else (self.compressor, self.warm_up)

    @own_modes()
    def reduce(self, gradients: Gradients, group: Group, *, compress: bool = True, shards: Shards = ()) -> None:
        """Average ``gradients`` over ``group`` in place, compressed as the controller says.

        Args:
            compress: False sends them dense whatever the controller says.
            shards: flat buffers that the gradients are views of, if this rank needs the means only in its own of
                ``group.size()`` equal parts of each: what goes dense is then reduce-scattered.
        """
        for _ in self.exchange(gradients, group, compress=compress, shards=shards):
            pass

    def exchange(self, gradients: Gradients, group: Group, *, compress: bool = True, shards: Shards = ()) -> Steps:
        """:meth:`reduce` as a generator that yields while collectives are under way.

        Between two yields a driver may advance other reductions, in an order that is the same on every rank.
        """
        if self._due or self.observer is not None:
            return self._observed(gradients, group, compress, shards)
        gradients, channel, compressor, rank = self._open(gradients, group, compress, shards)
        return compressor.exchange(gradients, channel, rank, self._statistics)

    def _open(self, gradients: Gradients, group: Group, compress: bool, shards: Shards) -> Reduction:
        """Gradients of a reduction, its channel, compressor and rank."""
        channel = self.open_channel(group, shards)
        size, ways = sum(gradient.tensor.nbytes for gradient in gradients), 1 if shards else 2
        self._statistics.dense_bytes += ways * (channel.world - 1) * size // channel.world
        # With one replica there is nothing to send, so there is nothing to gain and an error to lose.
        compress = compress and channel.world > 1
        rank = self.plan.ranks[self.stage] if compress else None
        benchmark = self.monitor.benchmark
        if rank is not None and benchmark.gate is not None and not benchmark.compresses(gradients):
            rank = None
        if rank is None and compress and self.warm_up is not None:
            return gradients, channel, self.warm_up, _THROUGH
        return gradients, channel, self.compressor, rank

    def _observed(self, local: Gradients, group: Group, compress: bool, shards: Shards) -> Steps:
        """Reduction in an iteration in which something is due, with what is measured before and after."""
        # The result of an unused matrix is compared with what is kept of it while both are there.
        self._unused |= any(gradient.unused for gradient in local)
        self._look_at(local, "local")
        benchmark, plan = self.monitor.benchmark, self.plan
        if plan.probe_rank is not None and local and compress:
            # Added after the yields, between which other buckets add theirs; so below.
            bytes_sent = yield from benchmark.probe(local, group, plan.probe_rank, shards)
            self._statistics.bytes += bytes_sent
        gradients, channel, compressor, rank = self._open(local, group, compress, shards)
        if plan.gate and self.rank is not None and gradients and compress and channel.world > 1:
            bytes_sent = yield from benchmark.compare(gradients, group, self.rank, shards)
            self._statistics.bytes += bytes_sent
        yield from compressor.exchange(gradients, channel, rank, self._statistics)
        if self._due:
            self.monitor.reduced(gradients, channel, compressor if rank is not None else None)
        self._look_at(local, "reduced")

    def _look_at(self, gradients: Gradients, source: str) -> None:
        if source == "local" and self.observer is not None:
            self.observer(self.iteration, gradients)
        if self._due and source == self.config.entropy.source:
            self.entropy.add(self.iteration, gradients)

    @own_modes()
    def reduce_across_stages(self, gradients: Gradients, group: dist.ProcessGroup) -> None:
        """Average ``gradients`` over ``group`` in place, dense, where it has ranks of several stages.

        Its bytes count; its times do not: they are mostly those of waiting for the other stages.
        """
        self._look_at(gradients, "local")
        statistics = Statistics()
        for _ in self.compressor.exchange(gradients, self.open_channel(group), None, statistics):
            pass
        self._statistics.bytes += statistics.bytes
        self._statistics.dense_bytes += statistics.bytes
        self._look_at(gradients, "reduced")

    def add_loss(self, loss: float | torch.Tensor) -> None:
        """Take in the training loss of the iteration that has ended, on at least one rank; for policy ``loss``.

        Those of iterations that end a window come after its decision and count in the next window. Where no rank is
        told any in the first window, its end raises a ``UserError`` on every rank.

        Raises:
            UserError: it is no number.
        """
        try:
            if isinstance(loss, torch.Tensor) and loss.numel() != 1:
                raise TypeError
            value = float(loss.item() if isinstance(loss, torch.Tensor) else loss)  # without the graph behind it
        except (TypeError, ValueError):
            what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else repr(loss)
            raise UserError(f"loss = {what} is no number", fix="give the mean of the loss") from None
        self.monitor.window.add_loss(value)

    @own_modes()
    def take_back(self, name: str, gradient: torch.Tensor) -> None:
        """Do not keep ``gradient`` of an unused parameter of the last, closed iteration: its owner still has it.

        Args:
            gradient: as it was given to :meth:`exchange`.
        """
        for compressor in self.compressors:
            compressor.take_back(name, gradient)

    @own_modes()
    def rescale(self, scale: float) -> float:
        """Gradients come multiplied by ``scale`` from the next reduction on; error feedback follows by the factor that
        is returned."""
        factor = scale / self.entropy.scale
        if factor != 1:
            for compressor in self.compressors:
                compressor.rescale(factor)
            self.entropy.scale = scale
        return factor

    @own_modes()
    def end_iteration(
        self, backward_seconds: Sequence[float] = (), *, exposed: Stopwatch | None = None, skipped: bool = False
    ) -> None:
        """Close the iteration: record it, exchange measurements where planned, plan the next one.

        Args:
            backward_seconds: durations of this iteration's micro-batch backward passes on this rank. The median
                counts: the last one may hold reductions that overlap with it.
            exposed: time in which this rank's step has waited for averaged gradients, if that was measured.
            skipped: whether the step is given up, the same on every rank of every stage: nothing of the iteration is
                taken as a measurement, and error feedback and warm start stay as they were.
        """
        monitor, plan = self.monitor, self.plan
        # Benchmarks disturb the step that they are part of.
        if monitor.keeps_times and not (skipped or plan.probe_rank is not None or plan.gate):
            monitor.window.times.add(self.iteration, self._statistics)
        self._statistics.unscale(self.entropy.scale)
        rank = self.rank if self.compressor.has_rank and self._statistics.lossy else None
        self.last = Iteration(self.iteration, rank, self._statistics, exposed=exposed, skipped=skipped)
        self.decision = None
        for compressor in self.compressors:
            compressor.settle(not skipped)
        if not self._due:
            self.iteration += 1
            self._statistics = Statistics()
            if self.iteration == self._next_due:
                self._begin_due()
            return
        self.last = monitor.end(self.last, self.compressor)
        if plan.exchange:
            self.decision = monitor.decide(self.iteration, plan, backward_seconds)
        self.iteration += 1
        self._look_ahead()
        if self.plan.ranks != plan.ranks:
            monitor.window.times.clear()
        if self.plan.probe_rank is None:
            monitor.benchmark.end_search()

    @own_modes()
    def state_dict(self) -> dict[str, Any]:
        """State that this rank needs to go on exactly after a whole iteration: tensors and plain values."""
        compressor = self.compressor.state_dict()
        if self.warm_up is not None:
            # By parameter name, as the method itself keeps it: a state means the same whichever of the two holds it.
            compressor["errors"] |= self.warm_up.state_dict()["errors"]
        return {
            "settings": self.config.to_dict(),
            "iteration": self.iteration,
            "compressor": compressor,
            **self.monitor.state_dict(),
        }

    @own_modes()
    def load_state_dict(self, state: dict[str, Any], *, changed_settings: bool = False) -> None:
        """Go on from :meth:`state_dict` of the same rank.

        Args:
            changed_settings: whether the state may be of other settings, which are then replaced by this engine's: its
                limits, its ranks, its types. The measurements of the window under way are dropped.

        Raises:
            UserError: the state lacks a part, is of another method or, without ``changed_settings``, of other settings.
        """
        need(state, _STATE, "engine")
        changed = compare_settings(state["settings"], self.config, allowed=changed_settings)
        self.monitor.load_state_dict(state, changed_settings=changed)
        self.iteration = int(state["iteration"])
        compressor = state["compressor"]
        in_warm_up = self.controller.plan(self.iteration).in_warm_up
        self.warm_up = self.config.build_warm_up() if in_warm_up else None
        if self.warm_up is not None:
            self.warm_up.load_state_dict({"errors": compressor["errors"], "counts": {}})
            compressor = {**compressor, "errors": {}}
        self.compressor.load_state_dict(compressor)
        self._look_ahead()
