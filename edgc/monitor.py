"""Measurements of one rank, and the decisions that all ranks take from what all have measured.

At window ends, and during the search for r_max, the ranks exchange their measurements with one all-gather;
every rank then computes the same means in the same order, so that all controllers take the same decision. In between,
most iterations have nothing due, and nobody asks here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median_low
from typing import Any, NamedTuple

import torch.distributed as dist

from edgc.checks import need
from edgc.compressors import Channel, Compressor, Gradient, Statistics
from edgc.compressors.base import mean_bits
from edgc.compressors.entrywise.feedback import EntrywiseConfig
from edgc.compressors.powersgd import LowRankConfig, saves_bytes
from edgc.compressors.powersgd.algorithm import PowerSGD
from edgc.config import CompressingConfig, EDGCConfig
from edgc.control.adaptive import make_controller
from edgc.control.controller import Decision, Plan
from edgc.control.settings import PolicyConfig
from edgc.entropy.meter import EntropyMeter
from edgc.measurement.mean_error import MeanError
from edgc.measurement.report import Window, relative, report
from edgc.measurement.spectral import MatrixSpectrum, error_curve
from edgc.runtime.channel import Stopwatch
from edgc.timing.benchmark import Benchmark, verdicts

Shape = tuple[int, int]


class Matrix(NamedTuple):
    """A parameter that is compressed: its local shape, the bits of an entry of its gradient, and its kind."""

    rows: int
    columns: int
    bits: int = 32
    embedding: bool = False

    @property
    def shape(self) -> Shape:
        return self.rows, self.columns


@dataclass(frozen=True)
class Iteration:
    """Record of one iteration on this rank; as a string a line of it, for which a GPU is waited for.

    Attributes:
        rank: None where nothing was compressed.
        statistics: sums over all reductions. Squared norms are, like everything else here, of the gradients without
            their loss scale.
        entropy, entropy_full: in nats; nan if not measured.
        exposed: time in which the step waited for averaged gradients; None if nobody measured it.
        skipped: whether the whole step was given up because of a gradient that was not finite.
        mean_error_sq, mean_input_sq: at window ends, of its :class:`edgc.measurement.mean_error.WindowError`; nan
            elsewhere, and where nothing is compressed with error feedback. The same on all replicas.
    """

    iteration: int
    rank: int | None
    statistics: Statistics
    exposed: Stopwatch | None = None
    skipped: bool = False
    entropy: float = math.nan
    entropy_full: float = math.nan
    seconds_entropy: float = 0.0
    mean_error_sq: float = math.nan
    mean_input_sq: float = math.nan

    def __str__(self) -> str:
        count, dense, error = self.statistics.bytes, self.statistics.dense_bytes, self.statistics.worker_error
        parts = [f"rank {self.rank}" if self.rank is not None else "no compression" if error is None else "compressed"]
        parts.append(f"{count} bytes" + (f", {count / dense:.3f} of dense" if dense else ""))
        if math.isfinite(self.entropy):
            parts.append(f"entropy {self.entropy:.3f} nats")
        if error is not None:
            parts.append(f"error {error:.3f}")
        return f"iteration {self.iteration}: {', '.join(parts)}" + ", skipped" * self.skipped

    @property
    def mean_error(self) -> float:
        """Error of the mean, relative to it, over the window that ends here; nan where that is not known."""
        return relative(self.mean_error_sq, self.mean_input_sq)


class Monitor:
    """Measurements and controller of one rank; arguments are documented at :class:`edgc.engine.Engine`.

    Args:
        open_channel: opens what messages of measurements are sent through.

    Attributes:
        entropy: GDS.
        benchmark: reductions that are timed on copies, and the verdicts of the cost gate.
        mean_error: sketches of what the replicas' mean lacks in this window.
        samples, window_ends: whether this iteration's errors are measured (where GDS samples and at window ends), and
            whether it is the last of a window.
        keeps_times: whether the times of reductions may be asked for.
        replicas: number of this rank's group of replicas; nan as long as it has none with others in it.
        gradient_bits: of an entry of the first stage's compressible gradients, on average.
        entropy_sampled: as it was last measured; nan before.
        entropy_full: of the last decision, per stage and of all entries.
    """

    def __init__(
        self,
        config: EDGCConfig,
        open_channel: Callable[..., Channel],
        *,
        stage: int,
        stages: Sequence[Sequence[Matrix]],
        iterations: int,
        exchange_group: dist.ProcessGroup | None,
        overlapped: bool,
        embeddings: Collection[str],
    ) -> None:
        self.config, self.stage, self.stages = config, stage, len(stages)
        first = stages[0] if stages else ()
        self.gradient_bits = mean_bits((matrix.shape, matrix.bits) for matrix in first)
        self.controller = make_controller(
            config,
            [[matrix.shape for matrix in each] for each in stages],
            iterations,
            overlapped=overlapped,
            gradient_bits=self.gradient_bits,
            embeddings=[matrix.shape for matrix in first if matrix.embedding],
        )
        self.entropy = EntropyMeter(config, embeddings)
        gated = isinstance(config, CompressingConfig) and config.cost_gate
        self.benchmark = Benchmark(config.build_to_time, stage, gated, open_channel)
        self.window, self.mean_error = Window(config.window), MeanError(config.seed)
        self.keeps_times = isinstance(config, PolicyConfig) and config.remeasure_above is not None
        self.replicas = self.entropy_sampled = math.nan
        self.entropy_full: tuple[float, ...] = ()
        self._exchange_group, self._open_channel = exchange_group, open_channel
        self._noticed = ""
        self._warn()
        dtype = config.factor_dtype if isinstance(config, LowRankConfig) else "fp32"
        self._saves_bytes = partial(saves_bytes, factor_dtype=dtype, gradient_bits=self.gradient_bits)

    def _warn(self) -> None:
        """Warn, on the first rank, of a new notice of the controller's."""
        notice = self.controller.notice
        if notice and notice != self._noticed:
            self._noticed = notice
            if self._open_channel(self._exchange_group).rank == 0:
                warnings.warn(f"edgc: {notice}", stacklevel=2)

    def next_due(self, iteration: int) -> int:
        """First iteration from this one on at which something is measured or exchanged, if nothing is decided before;
        the end of the window at the latest."""
        while not (
            self.config.record_full_entropy
            or self.entropy.sampler.measures(iteration)
            or iteration % self.config.window == 0
            or self.controller.plan(iteration).exchange
        ):
            iteration += 1
        return iteration

    def begin(self, iteration: int) -> None:
        """Begin an iteration in which something is due."""
        self.window_ends = iteration % self.config.window == 0
        self.samples = self.entropy.sampler.measures(iteration) or self.window_ends
        self._compressed: set[str] = set()  # names handed over to be compressed
        self.benchmark.start_iteration()
        self.mean_error.start_iteration()

    @property
    def closes_at_once(self) -> bool:
        """True if this iteration must be closed at its end, even if the host waits for a GPU: where it ends with
        collectives, every rank has to come to them at the same point; and where the result of an entrywise method is
        measured, gradients must still be there."""
        return self.window_ends or (self.samples and isinstance(self.config, EntrywiseConfig))

    def reduced(self, gradients: Sequence[Gradient], channel: Channel, lossy: Compressor | None) -> None:
        """Note that ``gradients`` were reduced over ``channel``, by a ``lossy`` method or (None) exactly."""
        if channel.world > 1 and math.isnan(self.replicas):
            self.replicas = float(channel.first)
        if lossy is None:
            return
        self._compressed.update(gradient.name for gradient in gradients)
        if self.samples:
            self.mean_error.reduced(gradients, channel, lossy)

    def end(self, done: Iteration, compressor: Compressor) -> Iteration:
        """Add the measurements to ``done``, an iteration that was begun; collective at the end of a window."""
        entropy, statistics = self.entropy.close(), done.statistics
        if done.skipped:
            entropy = replace(entropy, **dict.fromkeys(("sampled", "full", "layers", "embeddings"), math.nan))
        self.window.add_entropy(entropy)
        if math.isfinite(entropy.sampled):
            self.entropy_sampled = entropy.sampled
        done = replace(done, entropy=entropy.sampled, entropy_full=entropy.full, seconds_entropy=entropy.seconds)
        grid = self.controller.rank_grid
        if self.samples and not done.skipped:
            spectra = {}
            if grid and self._compressed and not statistics.skipped:
                assert isinstance(compressor, PowerSGD)
                by_name = compressor.spectra(self._compressed)
                spectra = {name: MatrixSpectrum(*item) for name, item in by_name.items()}
            self.mean_error.measure(done.iteration, self.entropy.scale, statistics.skipped, spectra)
        if not self.window_ends:
            return done
        message = self.mean_error.message()
        if message is not None:
            channel = self._open_channel(self.mean_error.group)
            channel.mean_(message)
            channel.finish()
            statistics.bytes += channel.bytes
        measured = self.mean_error.close(message)
        self.window.errors = measured.error_sq, measured.input_sq
        self.window.curve = error_curve(list(measured.spectra.values()), grid, self._saves_bytes)
        return replace(done, mean_error_sq=measured.error_sq, mean_input_sq=measured.input_sq)

    def decide(self, iteration: int, plan: Plan, backward_seconds: Sequence[float]) -> Decision | None:
        """Exchange measurements with all ranks, and let the controller decide; collective."""
        probe = backward = math.nan
        if plan.probe_rank is not None:
            probe = self.benchmark.probe_seconds
            finite = [seconds for seconds in backward_seconds if math.isfinite(seconds)]
            backward = median_low(finite) if finite else math.nan
        grid, watches = self.controller.rank_grid, self.controller.watches(iteration)
        place = {"stage": self.stage, "replicas": self.replicas}
        row = place | self.window.row(grid, watches) | {"probe_seconds": probe, "backward_seconds": backward}
        # Pickled, floats keep their bits.
        channel = self._open_channel(self._exchange_group)
        told = channel.gather((row, self.benchmark.group_times if plan.gate else []))
        gate = verdicts([(each["stage"], groups) for each, groups in told])
        if plan.gate:
            self.benchmark.follow(gate)
        rows, probed = [each for each, _ in told], plan.probe_rank is not None
        summary, self.entropy_full = report(rows, self.stages, grid, watches=watches, probed=probed, gate=gate)
        decision = self.controller.observe(iteration, summary)
        self._warn()
        if self.window_ends:
            self.window.start()
        return decision

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.entropy.scale,
            "controller": self.controller.state_dict(),
            "window": self.window.state_dict() | {"mean": self.mean_error.state_dict()},
            "gate": None if self.benchmark.gate is None else dict(self.benchmark.gate),
        }

    def load_state_dict(self, state: dict[str, Any], *, changed_settings: bool) -> None:
        """Go on from :meth:`state_dict`; with ``changed_settings`` the window under way begins anew."""
        behind = int(state["iteration"]) - 1
        self.controller.load_state_dict(state["controller"], iteration=behind, changed_settings=changed_settings)
        self._warn()
        self.entropy.scale = float(state["scale"])
        if changed_settings:
            self.window.start()
            self.mean_error.load_state_dict(None)
        else:
            need(state["window"], ("mean",), "engine.window")
            self.window.load_state_dict(state["window"])
            self.mean_error.load_state_dict(state["window"]["mean"])
        if self.benchmark.gate is not None:
            self.benchmark.gate = dict(state["gate"] or {})
