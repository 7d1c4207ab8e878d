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
from typing import Any

import torch
import torch.distributed as dist

from edgc import trial
from edgc.clock import mark, seconds_between
from edgc.compressors import Channel, Compressor, Gradient, PowerSGD, Statistics, build
from edgc.compressors.base import Steps
from edgc.compressors.powersgd import compressible, saves_bytes
from edgc.config import EDGCConfig
from edgc.controller import Controller, Decision, Plan, Report
from edgc.cost_gate import CostGate, GateVerdict, GroupTimes, label, verdicts
from edgc.entropy import Sampler, combine, estimate
from edgc.measurements import CurveMean, Mean, mean, mean_curve
from edgc.spectral import MatrixSpectrum, error_curve

RANKED = ("powersgd", "edgc")  # to other methods the rank says only that they are to compress
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
        self.gate = CostGate() if config.cost_gate else None
        self._trial: Compressor | None = None
        self._start_window()
        self._start_iteration()

    def _start_window(self) -> None:
        self._window, self._window_full, self._backward = Mean(), Mean(), Mean()
        self._curve = CurveMean()

    def _start_iteration(self) -> None:
        self._statistics = Statistics()
        self._sampled: list[tuple[float, int]] = []
        self._full: list[tuple[float, int]] = []
        self._entropy_seconds = 0.0
        self._compressed: set[str] = set()  # names handed over to be compressed
        self._probes: list[Statistics] = []
        self._compared: list[tuple[tuple[str, ...], trial.Comparison]] = []

    @property
    def rank(self) -> int | None:
        """Rank in use on this stage in this iteration; None is uncompressed."""
        return self.plan.ranks[self.stage]

    @property
    def waits(self) -> int:
        """How often a reduction of this iteration waits for its collectives, measurements aside."""
        return self.compressor.waits(self.rank)

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
        # With one replica there is nothing to send, so there is nothing to gain and an error to lose.
        rank = self.rank if channel.world > 1 else None
        if self.plan.probe_rank is not None and gradients:
            yield from self._time_probe(gradients, group, self.plan.probe_rank)
        if self.gate is not None and rank is not None:
            if self.plan.gate and gradients:
                yield from self._time_both(gradients, group, rank)
            if not self.gate.compresses({gradient.name: gradient.tensor.numel() for gradient in gradients}):
                rank = None
        if rank is not None:
            self._compressed.update(gradient.name for gradient in gradients)
        statistics = yield from self.compressor.exchange(gradients, channel, rank)
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

    def _time_probe(self, gradients: Sequence[Gradient], group: dist.ProcessGroup | None, rank: int) -> Steps:
        """Time a reduction on copies for the search of r_max (0: dense); the training step stays uncompressed."""
        if self._trial is None:
            self._trial = build(self.config)
        channel = Channel(group)
        statistics = yield from trial.timed(self._trial, gradients, channel, rank or None)
        self._probes.append(statistics)
        self._statistics.bytes += channel.bytes

    def _time_both(self, gradients: Sequence[Gradient], group: dist.ProcessGroup | None, rank: int) -> Steps:
        """Time a compressed and a dense reduction of this group on copies, for the cost gate."""
        channel = Channel(group)
        comparison = yield from trial.compare(lambda: build(self.config), gradients, channel, rank)
        self._compared.append((tuple(gradient.name for gradient in gradients), comparison))
        self._statistics.bytes += channel.bytes

    def _measure_spectra(self) -> None:
        """The error curve of what this rank has compressed, at iterations that GDS samples and at window ends."""
        grid = self.controller.rank_grid
        sampled = self.sampler.measures(self.iteration) or self.iteration % self.config.window == 0
        if not (grid and sampled and self._compressed) or self._statistics.skipped:
            return
        assert isinstance(self.compressor, PowerSGD)
        spectra = self.compressor.spectra()
        matrices = [
            MatrixSpectrum(item.shape, item.singular_sq.tolist(), float(item.input_sq))
            # In an order that does not depend on when a matrix was first seen: sums must repeat after a resume.
            for name, item in sorted(spectra.items())
            if name in self._compressed
        ]
        curve = error_curve(matrices, grid, partial(saves_bytes, factor_dtype=self.config.factor_dtype))
        if curve is not None:
            self._curve.add(curve)

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
            rank=self.rank if self.config.method in RANKED and self._has_compressed() else None,
            entropy=entropy,
            entropy_full=entropy_full,
            seconds_entropy=self._entropy_seconds,
            statistics=self._statistics,
        )
        self._measure_spectra()
        self.decision = None
        if self.plan.exchange:
            self._exchange_and_decide()
        self.iteration += 1
        self.plan = self.controller.plan(self.iteration)
        if self.plan.phase in ("active", "disabled"):
            self._trial = None
        self._start_iteration()

    def _has_compressed(self) -> bool:
        norm = self._statistics.input_sq
        # A norm on a GPU is there because something was compressed; reading it would wait for the device.
        return norm.is_cuda or float(norm) > 0 if isinstance(norm, torch.Tensor) else norm > 0

    def _exchange_and_decide(self) -> None:
        probe = math.nan
        if self.plan.probe_rank is not None:
            probe = sum(trial.seconds(statistics) for statistics in self._probes)
        grid = self.controller.rank_grid
        curve = self._curve.value or (math.nan,) * len(grid)
        means = [self._window.value, self._window_full.value, probe, self._backward.value]
        rows = self._gather([float(self.stage), *means, *curve])
        by_stage = [[row for row in rows if int(row[0]) == stage] for stage in range(self.stages)]
        entropy = tuple(mean(row[1] for row in stage) for stage in by_stage)
        self.decision_entropy_full = tuple(mean(row[2] for row in stage) for stage in by_stage)
        probe_seconds = tuple(mean(row[3] for row in stage) for stage in by_stage)
        backward = mean(row[4] for row in rows)
        report = Report(
            entropy=entropy,
            probe_seconds=None if self.plan.probe_rank is None else probe_seconds,
            backward_seconds=backward if math.isfinite(backward) else None,
            error_curve=tuple(mean_curve(row[5:] for row in stage) for stage in by_stage) if grid else None,
            gate=self._judge() if self.plan.gate else (),
        )
        self.decision = self.controller.observe(self.iteration, report)
        if self.iteration % self.config.window == 0:
            self._start_window()

    def _judge(self) -> tuple[GateVerdict, ...]:
        """Verdicts of all stages from the times of all ranks; this rank follows those of its stage from now on."""
        assert self.gate is not None
        groups = {label(names): names for names, _ in self._compared}
        times = [GroupTimes(label(names), *comparison.seconds) for names, comparison in self._compared]
        rows: list[Any] = [(self.stage, times)]
        if dist.is_initialized():
            rows *= dist.get_world_size(self.exchange_group)
            dist.all_gather_object(rows, (self.stage, times), group=self.exchange_group)
        made = verdicts(rows)
        self.gate.follow([verdict for verdict in made if verdict.stage == self.stage], groups)
        return made

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
            "curve": [list(self._curve.totals), self._curve.count],
            "gate": self.gate.state_dict() if self.gate is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict` of the same rank under the same configuration."""
        self.iteration = int(state["iteration"])
        self.controller.load_state_dict(state["controller"])
        self.compressor.load_state_dict(state["compressor"])
        self._window, self._window_full, self._backward = (Mean(t, int(c)) for t, c in state["means"])
        self._curve = CurveMean([float(value) for value in state["curve"][0]], int(state["curve"][1]))
        if self.gate is not None:
            self.gate.load_state_dict(state["gate"] or {})
        self.plan = self.controller.plan(self.iteration)
        self._start_iteration()


def _combined(entropies: Sequence[tuple[float, int]]) -> float:
    if not entropies:
        return math.nan
    return combine([value for value, _ in entropies], [size for _, size in entropies])
