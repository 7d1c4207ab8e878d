"""What a rank measures in a window, and the report that all ranks make of what all have measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from edgc.checks import need
from edgc.control.plan import Report
from edgc.measurement.mean_error import MeanError, relative
from edgc.measurement.means import Mean, WindowTimes, mean, mean_curve, stage_seconds
from edgc.measurement.spectral import Curve
from edgc.timing.cost_gate import GateVerdict

_COLUMNS = 9  # of a row, before the error curve


class Window:
    """Running measurements of one rank since the last window's end.

    Args:
        window: length in iterations.
        seed: of :class:`edgc.measurement.mean_error.MeanError`.

    Attributes:
        entropy, entropy_full: in nats, sampled and of all entries.
        loss: of training, in nats per token.
        mean: what the replicas' mean lacks.
        errors: at the window's end, squared norms of what it lacks and of what it is of; nan if unknown.
        curve: at the window's end, predicted squared relative error of the mean by rank; None if unknown.
        times: of reductions, in seconds.
    """

    def __init__(self, window: int, seed: int) -> None:
        self.times = WindowTimes(window)
        self.mean = MeanError(seed)
        self.start()

    def start(self) -> None:
        self.entropy, self.entropy_full, self.loss = Mean(), Mean(), Mean()
        self._told = False  # a loss, be it finite or not
        self.errors = math.nan, math.nan
        self.curve: Curve | None = None
        self.times.clear()

    def add_loss(self, loss: float) -> None:
        self.loss.add(loss)
        self._told = True

    def row(
        self, stage: int, grid: Sequence[int], watches: bool, probe: float, backward: float, replicas: float
    ) -> list[float]:
        """This rank's numbers for :func:`report`.

        Args:
            grid: ranks of the error curve.
            watches: whether times of reductions are asked for.
            probe, backward: seconds of a timed reduction and of a micro-batch's backward pass; nan if there was none.
            replicas: number of this rank's group of replicas; nan if it has no other replica.
        """
        curve = self.curve or (math.nan,) * len(grid)
        loss = math.inf if self._told and not self.loss.count else self.loss.value
        means = [self.entropy.value, self.entropy_full.value, probe, backward, replicas, loss]
        return [float(stage), *means, *self.errors, *curve, *(self.times.values if watches else [])]

    def state_dict(self) -> dict[str, Any]:
        return {
            "means": [[item.total, item.count] for item in (self.entropy, self.entropy_full, self.loss)],
            "mean": self.mean.state_dict(),
            "times": self.times.values,
            "told": self._told,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        need(state, ("means", "mean", "times"), "engine.window")
        self.entropy, self.entropy_full, self.loss = (Mean(float(t), int(c)) for t, c in state["means"])
        self._told = bool(state.get("told", self.loss.count))
        self.mean.load_state_dict(state["mean"])
        self.times.values = state["times"]


def report(
    rows: Sequence[Sequence[float]],
    stages: int,
    grid: Sequence[int],
    *,
    watches: bool,
    probed: bool,
    gate: tuple[GateVerdict, ...],
) -> tuple[Report, tuple[float, ...]]:
    """The report on all ranks' :meth:`Window.row`, in rank order, and the entropies of all entries per stage."""
    by_stage = [[row for row in rows if int(row[0]) == stage] for stage in range(stages)]
    entropy, full, probe, backward = (
        tuple(mean(row[column] for row in stage) for stage in by_stage) for column in (1, 2, 3, 4)
    )
    end = _COLUMNS + len(grid)
    curves = tuple(mean_curve(row[_COLUMNS:end] for row in stage) for stage in by_stage)
    errors, inputs = (tuple(mean(row[column] for row in stage) for stage in by_stage) for column in (7, 8))
    times = tuple(stage_seconds([(row[5], row[end:]) for row in stage]) for stage in by_stage)
    made = Report(
        entropy=entropy,
        probe_seconds=probe if probed else None,
        backward_seconds=backward if any(map(math.isfinite, backward)) else None,
        error_curve=curves if grid else None,
        gate=gate,
        reduction_seconds=times if watches else None,
        loss=_loss([row[6] for row in rows]),
        # Every shard of a stage has as many replicas, so that these are the sums over shards up to one factor.
        mean_error=tuple(map(relative, errors, inputs)),
    )
    return made, full


def _loss(losses: Sequence[float]) -> float:
    """The report's loss of the ranks': infinite, nan or a mean, see :class:`edgc.control.plan.Report`."""
    return math.inf if math.inf in losses and not any(map(math.isfinite, losses)) else mean(losses)


def gather(values: Sequence[float], group: dist.ProcessGroup | None) -> list[list[float]]:
    """The values of every rank of ``group``, in rank order, the same on every rank."""
    if not dist.is_initialized():
        return [list(values)]
    on_gpu = dist.get_backend(group) == "nccl"
    row = torch.tensor(values, dtype=torch.float64, device="cuda" if on_gpu else "cpu")
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    return [item.tolist() for item in rows]
