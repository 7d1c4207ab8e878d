"""GDS, controller and compressor of one rank, put together; knows no training framework.

An adapter (:mod:`edgc.megatron`) hands over the gradients of a bucket with :meth:`Engine.reduce`, and calls
:meth:`Engine.end_iteration` once all buckets of the iteration are done. At window ends, and during the search for
r_max, the ranks exchange their measurements with one all-gather of a few numbers (a second one where the cost gate has
measured); every rank then computes the same means in the same order, so that all controllers take the same decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist

from edgc.checkpoints.saved_state import compare_settings
from edgc.checks import need
from edgc.compressors import Channel, Gradient, Statistics
from edgc.compressors.base import Compressor, Steps
from edgc.compressors.entrywise.feedback import Feedback
from edgc.compressors.powersgd.algorithm import PowerSGD, saves_bytes
from edgc.compressors.quantised_warm_up import THROUGH, WarmUp
from edgc.config import CompressingConfig, EDGCConfig
from edgc.control.adaptive import make_controller
from edgc.control.layer_ranks import LayerRanks
from edgc.control.plan import Decision, Plan
from edgc.control.policies.spectral import SpectralConfig
from edgc.entropy.meter import EntropyMeter, Measured
from edgc.measurement.mean_error import Measured as MeanMeasured
from edgc.measurement.mean_error import relative
from edgc.measurement.spectral import error_curve
from edgc.measurement.window import Window, gather, report
from edgc.runtime.clock import Stopwatch
from edgc.timing.benchmark import Benchmark

Observer = Callable[[int, Sequence[Gradient]], None]
Shape = tuple[int, int]
_STATE = ("settings", "iteration", "scale", "controller", "compressor", "window", "gate", "layer_ranks")


@dataclass(frozen=True)
class Iteration:
    """What this rank did in one iteration.

    Attributes:
        rank: None where nothing was compressed.
        entropy, entropy_full: in nats; nan if not measured.
        exposed: time in which the step waited for averaged gradients; None if nobody measured it.
        skipped: whether the whole step was given up because of a gradient that was not finite.
        mean_error_sq, mean_input_sq: at window ends, what :class:`edgc.measurement.mean_error.Measured` says of the
        window; nan
            elsewhere, and where nothing is compressed with error feedback. The same on all replicas.
    """

    iteration: int
    rank: int | None
    entropy: float
    entropy_full: float
    seconds_entropy: float
    statistics: Statistics
    exposed: Stopwatch | None = None
    skipped: bool = False
    mean_error_sq: float = math.nan
    mean_input_sq: float = math.nan

    @property
    def mean_error(self) -> float:
        """What the mean lacked, relative to it, over the window that ends here; nan where that is not known."""
        return relative(self.mean_error_sq, self.mean_input_sq)


class Engine:
    """State of EDGC on one rank.

    Args:
        config: validated settings, equal on all ranks.
        stage: pipeline stage of this rank.
        shapes: shapes of the compressible matrices of every stage, stage 0 first, equal on all ranks.
        iterations: length of the run, which warm-up is a share of.
        exchange_group: group over which ranks exchange measurements; None is the world.
        observer: called with the local gradients before they are reduced, for studies.
        deferred: whether an iteration's changes of error feedback and warm start wait for :meth:`end_iteration`,
            which can then drop them.
        overlapped: whether reductions overlap with backward or with each other, so that the time they are waited for
            is only what nothing hid. Measurements of times know how to deal with that.
        open_channel: what reductions are sent through, for studies of other networks.
        gradient_bits: of an entry of the first stage's compressible gradients, on average; equal on all ranks.

    Attributes:
        deferred: see above.
        layer_ranks: ranks of single matrices; None unless they are asked for.
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
        deferred: bool = False,
        overlapped: bool = False,
        open_channel: Callable[..., Channel] = Channel,
        gradient_bits: float = 32,
    ) -> None:
        self.config = config
        self.stage = stage
        self.stages = len(shapes)
        self.compressor = config.build()
        self.deferred = self.compressor.deferred = deferred
        self.warm_up = WarmUp.of(config, self.compressor, deferred)
        self.controller = make_controller(
            config, shapes, iterations, overlapped=overlapped, gradient_bits=gradient_bits
        )
        self._gradient_bits = gradient_bits
        self.entropy = EntropyMeter(config)
        self.exchange_group = exchange_group
        self.observer = observer
        self.open_channel = open_channel
        self.iteration = 1
        self.plan: Plan = self.controller.plan(1)
        self.last: Iteration | None = None
        self.decision: Decision | None = None
        self.decision_entropy_full: tuple[float, ...] = ()
        self.layer_ranks = LayerRanks() if isinstance(config, SpectralConfig) and config.per_layer else None
        gated = isinstance(config, CompressingConfig) and config.cost_gate
        # Through whatever reductions are sent at the time: studies exchange it.
        self._benchmark = Benchmark(config.build, stage, gated, lambda *options: self.open_channel(*options))
        self._window = Window(config.window, config.seed)
        self._replicas = math.nan  # number of this rank's group of replicas, if it has one with others in it
        self._start_iteration()

    def _start_iteration(self) -> None:
        self._statistics = Statistics()
        self._compressed: set[str] = set()  # names handed over to be compressed
        self._benchmark.start_iteration()
        self._window.mean.start_iteration()

    @property
    def rank(self) -> int | None:
        """Rank in use on this stage in this iteration; None is uncompressed."""
        return self.plan.ranks[self.stage]

    @property
    def closes_at_once(self) -> bool:
        """Whether this iteration must be closed before the next thing happens, even if the host waits for a GPU.

        Where it ends with collectives, every rank has to come to them at the same point; and where the result of an
        entrywise method is measured, gradients must still be there.
        """
        entrywise = isinstance(self.compressor, Feedback) and self._samples
        return entrywise or self.plan.exchange or self._window_ends

    @property
    def given_up(self) -> bool:
        """Whether a reduction of this iteration has met a gradient that was not finite; on a GPU the host waits."""
        return bool(self._statistics.skipped)

    @property
    def _compressors(self) -> tuple[Compressor, ...]:
        return (self.compressor,) if self.warm_up is None else (self.compressor, self.warm_up.compressor)

    @property
    def waits(self) -> int:
        """How often a reduction of this iteration waits for its collectives, measurements aside."""
        warm_up = (
            self.warm_up.compressor.waits(THROUGH) if self.warm_up is not None and self.warm_up.on else 0
        )
        return max(warm_up, self.compressor.waits(self.rank))

    def reduce(
        self,
        gradients: Sequence[Gradient],
        group: dist.ProcessGroup | None,
        *,
        compress: bool = True,
        shards: Sequence[torch.Tensor] = (),
    ) -> None:
        """Average ``gradients`` over ``group`` in place, compressed as the controller says.

        Args:
            compress: False sends them dense whatever the controller says.
            shards: flat buffers that the gradients are views of, if this rank needs the means only in its own of
                ``group.size()`` equal parts of each: what goes dense is then reduce-scattered.

        Raises:
            ValueError: if a gradient has no elements of a floating-point type.
        """
        for _ in self.exchange(gradients, group, compress=compress, shards=shards):
            pass

    def exchange(
        self,
        gradients: Sequence[Gradient],
        group: dist.ProcessGroup | None,
        *,
        compress: bool = True,
        shards: Sequence[torch.Tensor] = (),
    ) -> Steps:
        """:meth:`reduce` as a generator that yields while collectives are under way.

        Between two yields a driver may advance other reductions, in an order that is the same on every rank.
        """
        self._look_at_local(gradients)
        channel = self.open_channel(group, shards)
        if channel.world > 1 and math.isnan(self._replicas):
            self._replicas = float(min(dist.get_process_group_ranks(group or dist.group.WORLD)))
        # With one replica there is nothing to send, so there is nothing to gain and an error to lose.
        rank = self.rank if channel.world > 1 and compress else None
        if self.plan.probe_rank is not None and gradients and compress:
            sent = yield from self._benchmark.probe(gradients, group, self.plan.probe_rank, shards)
            self._statistics.bytes += sent
        if self.layer_ranks is not None and rank is not None:
            gradients = self.layer_ranks.given(gradients)
        gate = self._benchmark.gate
        if gate is not None and rank is not None:
            if self.plan.gate and gradients:
                # Added after the yields, between which other buckets add theirs.
                sent = yield from self._benchmark.compare(gradients, group, rank, shards)
                self._statistics.bytes += sent
            if not gate.compresses({gradient.name: gradient.tensor.numel() for gradient in gradients}):
                rank = None
        compressor = self.compressor
        if rank is not None:
            self._compressed.update(gradient.name for gradient in gradients)
        elif self.warm_up is not None and self.warm_up.on and channel.world > 1 and compress:
            compressor, rank = self.warm_up.compressor, THROUGH
        statistics = yield from compressor.exchange(gradients, channel, rank)
        self._statistics = self._statistics + statistics
        if rank is not None and self._samples:
            self._window.mean.reduced(gradients, channel, compressor)
        self._look_at_reduced(gradients)

    def _look_at_local(self, gradients: Sequence[Gradient]) -> None:
        if self.observer is not None:
            self.observer(self.iteration, gradients)
        if self.config.entropy.source == "local":
            self.entropy.add(self.iteration, gradients)

    def _look_at_reduced(self, gradients: Sequence[Gradient]) -> None:
        if self.config.entropy.source == "reduced":
            self.entropy.add(self.iteration, gradients)

    def reduce_across_stages(self, gradients: Sequence[Gradient], group: dist.ProcessGroup) -> None:
        """Average ``gradients`` over ``group`` in place, dense, where it has ranks of several stages.

        Its bytes count; its times do not: they are mostly those of waiting for the other stages.
        """
        self._look_at_local(gradients)
        self._statistics.bytes += self.compressor.reduce(gradients, self.open_channel(group), None).bytes
        self._look_at_reduced(gradients)

    def add_loss(self, loss: float) -> None:
        """Take in the training loss of the iteration that has ended, on at least one rank; for policy ``loss``.

        Those of iterations that end a window come after its decision and count in the next window. Where no rank is
        told any in the first window, its end raises a ``UserError`` on every rank.
        """
        self._window.add_loss(loss)

    def rescale(self, scale: float) -> float:
        """Gradients come multiplied by ``scale`` from the next reduction on; error feedback follows by the factor that
        is returned."""
        factor = scale / self.entropy.scale
        if factor != 1:
            for compressor in self._compressors:
                compressor.rescale(factor)
            self.entropy.scale = scale
        return factor

    @property
    def _samples(self) -> bool:
        """Whether this iteration's errors are measured: where GDS samples and at window ends."""
        return self.entropy.samples(self.iteration) or self._window_ends

    @property
    def _window_ends(self) -> bool:
        return self.iteration % self.config.window == 0

    def _measure_errors(self, skipped: bool) -> MeanMeasured:
        """Sketch what this rank has kept, and at a window's end say what the replicas' mean lacks. Collective then."""
        mean, spectra, grid = self._window.mean, {}, self.controller.rank_grid
        if self._samples and not skipped:
            if grid and self._compressed and not self._statistics.skipped:
                assert isinstance(self.compressor, PowerSGD)
                spectra = self.compressor.spectra(self._compressed)
            mean.measure(self.iteration, self.entropy.scale, self._statistics.skipped, spectra)
        if not self._window_ends:
            return MeanMeasured()
        message = mean.message()
        if message is not None:
            channel = self.open_channel(mean.group)
            channel.mean_(message)
            channel.finish()
            self._statistics.bytes += channel.bytes
        measured = mean.close(message)
        self._window.errors = measured.error_sq, measured.input_sq
        if isinstance(self.compressor, PowerSGD):
            dtype = self.compressor.factor_dtype
            saves = partial(saves_bytes, factor_dtype=dtype, gradient_bits=self._gradient_bits)
            self._window.curve = error_curve(list(measured.spectra.values()), grid, saves)
        if self.layer_ranks is not None:
            self.layer_ranks.take(measured.spectra, grid)
        return measured

    def end_iteration(
        self,
        backward_seconds: Sequence[float] = (),
        *,
        exposed: Stopwatch | None = None,
        skipped: bool = False,
    ) -> None:
        """Close the iteration: record it, exchange measurements where planned, plan the next one.

        Args:
            backward_seconds: durations of this iteration's micro-batch backward passes on this rank. The median
                counts: the last one may hold reductions that overlap with it.
            exposed: time in which this rank's step has waited for averaged gradients, if that was measured.
            skipped: whether the step is given up, the same on every rank of every stage: nothing of the iteration is
                taken as a measurement, and what was ``deferred`` is dropped.
        """
        for compressor in self._compressors:
            compressor.settle(not skipped)
        entropy = self.entropy.close()
        if skipped:
            entropy = Measured(math.nan, math.nan, entropy.seconds)
        self._window.entropy.add(entropy.sampled)
        self._window.entropy_full.add(entropy.full)
        # Benchmarks disturb the step that they are part of.
        if not (skipped or self.plan.probe_rank is not None or self.plan.gate):
            self._window.times.add(self.iteration, self._statistics)
        measured = self._measure_errors(skipped)
        self.last = Iteration(
            iteration=self.iteration,
            rank=self.rank if isinstance(self.compressor, PowerSGD) and self._has_compressed() else None,
            entropy=entropy.sampled,
            entropy_full=entropy.full,
            seconds_entropy=entropy.seconds,
            statistics=self._statistics,
            exposed=exposed,
            skipped=skipped,
            mean_error_sq=measured.error_sq,
            mean_input_sq=measured.input_sq,
        )
        self.decision = None
        if self.plan.exchange:
            self._exchange_and_decide(backward_seconds)
        self.iteration += 1
        before, self.plan = self.plan, self.controller.plan(self.iteration)
        if self.warm_up is not None:
            self.warm_up.follow(self.plan)
        if self.plan.ranks != before.ranks:
            self._window.times.clear()
        if self.plan.probe_rank is None:
            self._benchmark.end_search()
        self._start_iteration()

    def _has_compressed(self) -> bool:
        norm = self._statistics.input_sq
        # A norm on a GPU is there because something was compressed; reading it would wait for the device.
        return norm.is_cuda or float(norm) > 0 if isinstance(norm, torch.Tensor) else norm > 0

    def _exchange_and_decide(self, backward_seconds: Sequence[float]) -> None:
        probe = backward = math.nan
        if self.plan.probe_rank is not None:
            probe = self._benchmark.probe_seconds
            finite = [seconds for seconds in backward_seconds if math.isfinite(seconds)]
            backward = median_low(finite) if finite else math.nan
        grid, watches = self.controller.rank_grid, self.controller.watches(self.iteration)
        row = self._window.row(self.stage, grid, watches, probe, backward, self._replicas)
        made, self.decision_entropy_full = report(
            gather(row, self.exchange_group),
            self.stages,
            grid,
            watches=watches,
            probed=self.plan.probe_rank is not None,
            gate=self._benchmark.judge(self.exchange_group) if self.plan.gate else (),
        )
        self.decision = self.controller.observe(self.iteration, made)
        if self.layer_ranks is not None and self.controller.rank_grid != grid:
            self.layer_ranks.forget()
        elif self.layer_ranks is not None and self._window_ends:
            common = self.controller.plan(self.iteration + 1).ranks[self.stage]
            self.layer_ranks.decide(self.stage, common, grid, self.exchange_group)
        if self._window_ends:
            self._window.start()

    def state_dict(self) -> dict[str, Any]:
        """Everything this rank needs to go on exactly after a whole iteration: tensors and plain values."""
        compressor = self.compressor.state_dict()
        return {
            "settings": self.config.to_dict(),
            "iteration": self.iteration,
            "scale": self.entropy.scale,
            "controller": self.controller.state_dict(),
            "compressor": compressor if self.warm_up is None else self.warm_up.state_dict(compressor),
            "window": self._window.state_dict(),
            "gate": self._benchmark.gate.state_dict() if self._benchmark.gate is not None else None,
            "layer_ranks": self.layer_ranks.state_dict() if self.layer_ranks is not None else None,
        }

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
        self.controller.load_state_dict(state["controller"], changed_settings=changed)
        self.iteration, self.entropy.scale = int(state["iteration"]), float(state["scale"])
        self.plan = self.controller.plan(self.iteration)
        compressor = state["compressor"]
        if self.warm_up is not None:
            compressor = self.warm_up.load_state_dict(compressor, self.plan)
        self.compressor.load_state_dict(compressor)
        if changed:
            self._window.start()
            self._window.mean.load_state_dict(None)
        else:
            self._window.load_state_dict(state["window"])
        if self._benchmark.gate is not None:
            self._benchmark.gate.load_state_dict(state["gate"] or {})
        if self.layer_ranks is not None and not changed:
            self.layer_ranks.load_state_dict(state["layer_ranks"])
        self._start_iteration()
