"""Measurements of one rank in a window, and the report that all ranks make of what all have measured.

Plain arithmetic: equal rows give equal reports.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from edgc.checks import need
from edgc.compressors.base import Statistics
from edgc.measurement.spectral import Curve
from edgc.timing.benchmark import GateVerdict, seconds

if TYPE_CHECKING:  # needs torch
    from edgc.entropy.meter import Entropies

_KINDS = ("layers", "embeddings", "embedding_share")
_MEANS = ("full", "loss", *_KINDS)


@dataclass
class Mean:
    """Running mean of the finite values given to it."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self.total += value
            self.count += 1

    @property
    def value(self) -> float:
        """Mean; nan if there was no value."""
        return self.total / self.count if self.count else math.nan


@dataclass
class NoisyMean(Mean):
    """Running mean whose error is known from how far successive values differ (von Neumann): half the mean square of
    the differences is the variance of a value, and a slow trend hardly adds to it."""

    last: float = math.nan
    differences_sq: float = 0.0

    def add(self, value: float) -> None:
        if math.isfinite(value):
            if self.count:
                self.differences_sq += (value - self.last) ** 2
            self.last = value
        super().add(value)

    @property
    def error(self) -> float:
        """Standard error of the mean; nan with fewer than two values."""
        if self.count < 2:
            return math.nan
        return math.sqrt(self.differences_sq / (2 * (self.count - 1)) / self.count)


def mean(values: Iterable[float]) -> float:
    """Mean of the finite values, in their order; nan if there is none."""
    result = Mean()
    for value in values:
        result.add(value)
    return result.value


def mean_curve(curves: Iterable[Sequence[float]]) -> Curve | None:
    """Mean, point by point, of the finite curves of one length, in their order; None if there is none, or if they have
    no points."""
    finite = [curve for curve in curves if all(map(math.isfinite, curve))]
    return tuple(mean(points) for points in zip(*finite, strict=True)) or None


def relative(error_sq: float, input_sq: float) -> float:
    """Root of ``error_sq / input_sq``; nan where nothing came in or it is not known."""
    return math.sqrt(error_sq / input_sq) if input_sq > 0 else math.nan


class WindowTimes:
    """Times of this rank's reductions at up to ``MOST`` evenly spread iterations of a window.

    They are kept by place in the window, so that those of several ranks can be compared iteration by iteration. On a
    GPU the times are read when somebody asks for them.
    """

    MOST = 64

    def __init__(self, window: int) -> None:
        self.window, self.stride = window, -(-window // self.MOST)
        self.clear()

    def clear(self) -> None:
        self._slots: list[Statistics | float] = [math.nan] * -(-self.window // self.stride)

    def add(self, iteration: int, done: Statistics) -> None:
        """Take in the statistics of one iteration (1-based), if it is one of those that are kept."""
        place, rest = divmod((iteration - 1) % self.window, self.stride)
        if rest == 0:
            self._slots[place] = done

    @property
    def values(self) -> list[float]:
        """Seconds by place, nan where nothing is known: compress + communicate + decompress."""
        values = [item if isinstance(item, float) else seconds(item) for item in self._slots]
        self._slots = list(values)
        return values

    @values.setter
    def values(self, values: Iterable[float]) -> None:
        self._slots = [float(value) for value in values]


class Window:
    """Running measurements of one rank since the last window's end.

    Args:
        window: length in iterations.

    Attributes:
        entropy: in nats, sampled.
        means: by name, of the losses (nats per token) and of the other fields of the meter's ``Entropies``.
        errors: at the window's end, squared norms of what the replicas' mean lacks and of that mean; nan if unknown.
        curve: at the window's end, predicted squared relative error of the mean by rank; None if unknown.
        times: of reductions, in seconds.
    """

    def __init__(self, window: int) -> None:
        self.times = WindowTimes(window)
        self.start()

    def start(self) -> None:
        self.entropy, self.means = NoisyMean(), {name: Mean() for name in _MEANS}
        self._told = False  # a loss, be it finite or not
        self.errors = math.nan, math.nan
        self.curve: Curve | None = None
        self.times.clear()

    def add_entropy(self, measured: Entropies) -> None:
        """Take in the entropies of one iteration."""
        self.entropy.add(measured.sampled)
        for name in ("full", *_KINDS):
            self.means[name].add(getattr(measured, name))

    def add_loss(self, loss: float) -> None:
        self.means["loss"].add(loss)
        self._told = True

    def row(self, grid: Sequence[int], watches: bool) -> dict[str, Any]:
        """Measurements of this rank for :func:`report`, nan where there is none.

        Args:
            grid: ranks of the error curve.
            watches: whether times of reductions are asked for.
        """
        means = {name: item.value for name, item in self.means.items()}
        return {
            "entropy": self.entropy.value,
            "entropy_full": means["full"],
            "entropy_error": self.entropy.error,
            "entropy_layers": means["layers"],
            "entropy_embeddings": means["embeddings"],
            "embedding_share": means["embedding_share"],
            "loss": math.inf if self._told and not self.means["loss"].count else means["loss"],
            "errors": self.errors,
            "curve": self.curve or (math.nan,) * len(grid),
            "times": self.times.values if watches else [],
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "entropy": asdict(self.entropy),
            "means": [[item.total, item.count] for item in self.means.values()],
            "times": self.times.values,
            "told": self._told,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        need(state, ("entropy", "means", "times", "told"), "engine.window")
        self.entropy = NoisyMean(**state["entropy"])
        means = (Mean(float(total), int(count)) for total, count in state["means"])
        self.means = dict(zip(_MEANS, means, strict=True))
        self._told = bool(state["told"])
        self.times.values = state["times"]


@dataclass(frozen=True)
class Report:
    """Measurements of all ranks; the same numbers on every rank.

    Attributes:
        entropy: per stage, nats, mean over this window's samples so far and over replicas; nan if none.
        entropy_error: per stage, standard error of one rank's mean entropy (:class:`NoisyMean`), mean over ranks: an
            upper bound for that of ``entropy``; nan with fewer than two samples.
        entropy_layers, entropy_embeddings: per stage, the same samples by kind of parameters.
        embedding_share: per stage, share of the entries of all compressible gradients that embeddings have.
        probe_seconds: per stage, seconds of the reduction asked for by ``probe_rank``; None without a probe.
        backward_seconds: per stage, backward time of one micro-batch, nan where none was timed; None as a whole
            where nothing was.
        error_curve: at a window's end, per stage, predicted squared relative error of the mean of M at every rank of
            :attr:`~edgc.control.controller.Controller.rank_grid`, of this window's samples together, mean over the
            stage's ranks; None for a stage without spectra, and as a whole where no policy asks for them.
        gate: verdicts of the cost gate on all stages.
        reduction_seconds: per stage, seconds that a reduction of the training step took in this window (compress +
            communicate + decompress), nan where that is not known; None where it was not asked for.
        loss: mean of the finite training losses of this window that some rank was told; nan if none was told, infinite
            if none that was told is finite.
        mean_error: at a window's end, per stage, the part that the replicas' mean lacked, relative to it, all shards of
            the stage together; nan where nothing was compressed with error feedback.
    """

    entropy: tuple[float, ...]
    probe_seconds: tuple[float, ...] | None = None
    backward_seconds: tuple[float, ...] | None = None
    error_curve: tuple[Curve | None, ...] | None = None
    gate: tuple[GateVerdict, ...] = ()
    reduction_seconds: tuple[float, ...] | None = None
    loss: float = math.nan
    mean_error: tuple[float, ...] = ()
    entropy_error: tuple[float, ...] = ()
    entropy_layers: tuple[float, ...] = ()
    entropy_embeddings: tuple[float, ...] = ()
    embedding_share: tuple[float, ...] = ()


def report(
    rows: Sequence[Mapping[str, Any]],
    stages: int,
    grid: Sequence[int],
    *,
    watches: bool,
    probed: bool,
    gate: tuple[GateVerdict, ...],
) -> tuple[Report, tuple[float, ...]]:
    """Report on all ranks' rows, in rank order; and the entropies of all entries, per stage.

    Args:
        rows: those of :meth:`Window.row`, each with the ``stage`` of its rank, the number of its group of ``replicas``
            (nan if it has no other replica), and ``probe_seconds`` and ``backward_seconds`` of a timed reduction and of
            a micro-batch's backward pass.
    """
    by_stage = [[row for row in rows if row["stage"] == stage] for stage in range(stages)]

    def means(name: str) -> tuple[float, ...]:
        return tuple(mean(row[name] for row in stage) for stage in by_stage)

    backward, losses = means("backward_seconds"), [row["loss"] for row in rows]
    # Every shard of a stage has as many replicas, so that these are the sums over shards up to one factor.
    squares = [[mean(row["errors"][part] for row in stage) for part in (0, 1)] for stage in by_stage]
    curves = tuple(mean_curve(row["curve"] for row in stage) for stage in by_stage)
    times = tuple(stage_seconds([(row["replicas"], row["times"]) for row in stage]) for stage in by_stage)
    result = Report(
        probe_seconds=means("probe_seconds") if probed else None,
        backward_seconds=backward if any(map(math.isfinite, backward)) else None,
        error_curve=curves if grid else None,
        gate=gate,
        reduction_seconds=times if watches else None,
        loss=math.inf if math.inf in losses and not any(map(math.isfinite, losses)) else mean(losses),
        mean_error=tuple(relative(*pair) for pair in squares),
        **{name: means(name) for name in ("entropy", "entropy_error", "entropy_layers", "entropy_embeddings")},
        embedding_share=means("embedding_share"),
    )
    return result, means("entropy_full")


def stage_seconds(rows: Sequence[tuple[float, Sequence[float]]]) -> float:
    """Seconds that the reductions of one stage took, from the times that its ranks have kept.

    At each iteration the replica that waited least counts, because the last to arrive waits for nobody; of the
    iterations the median, because what disturbs a few of them is no change of the network; and the mean of what the
    groups of replicas (one per tensor-parallel rank) say, as of their benchmarks.

    Args:
        rows: per rank the number of its group of replicas (nan: it has no other replica) and its times by place.

    Returns:
        nan unless at least half of the iterations are known.
    """
    groups: dict[float, list[Sequence[float]]] = {}
    for group, times in rows:
        if math.isfinite(group):
            groups.setdefault(group, []).append(times)
    medians = []
    for replicas in groups.values():
        least = [min(times) for times in zip(*replicas, strict=True) if all(map(math.isfinite, times))]
        if least and 2 * len(least) >= len(replicas[0]):
            medians.append(statistics.median(least))
    return mean(medians)
