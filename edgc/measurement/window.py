"""What a rank measures in a window."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from edgc.checks import need
from edgc.compressors import Statistics
from edgc.entropy.meter import Measured
from edgc.measurement.mean_error import MeanError
from edgc.measurement.report import Mean, NoisyMean
from edgc.measurement.spectral import Curve
from edgc.timing.benchmark import seconds


class WindowTimes:
    """What the reductions of this rank took at up to ``MOST`` evenly spread iterations of a window.

    They are kept by place in the window, so that those of several ranks can be compared iteration by iteration. On a
    GPU the times are read when somebody asks for them.
    """

    MOST = 64

    def __init__(self, window: int) -> None:
        self.window, self.stride = window, -(-window // self.MOST)
        self._slots: list[Statistics | float] = []
        self.clear()

    def clear(self) -> None:
        self._slots = [math.nan] * -(-self.window // self.stride)

    def add(self, iteration: int, done: Statistics) -> None:
        """Take in what one iteration (1-based) has done, if it is one of those that are kept."""
        place, rest = divmod((iteration - 1) % self.window, self.stride)
        if rest == 0:
            self._slots[place] = done

    @property
    def values(self) -> list[float]:
        """Seconds by place, nan where nothing is known: compress + communicate + decompress."""
        self._slots = [item if isinstance(item, float) else seconds(item) for item in self._slots]
        return [item for item in self._slots if isinstance(item, float)]

    @values.setter
    def values(self, values: Iterable[float]) -> None:
        self._slots = [float(value) for value in values]


class Window:
    """Running measurements of one rank since the last window's end.

    Args:
        window: length in iterations.
        seed: of :class:`edgc.measurement.mean_error.MeanError`.

    Attributes:
        entropy, entropy_full: in nats, sampled and of all entries.
        layers, embeddings: as ``entropy``, by kind of parameters; ``embedding_share`` of the entries.
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
        self.entropy, self.entropy_full, self.loss = NoisyMean(), Mean(), Mean()
        self.layers, self.embeddings, self.embedding_share = Mean(), Mean(), Mean()
        self._told = False  # a loss, be it finite or not
        self.errors = math.nan, math.nan
        self.curve: Curve | None = None
        self.times.clear()

    def add_entropy(self, measured: Measured) -> None:
        """Take in what GDS has measured in one iteration."""
        self.entropy.add(measured.sampled)
        self.entropy_full.add(measured.full)
        self.layers.add(measured.layers)
        self.embeddings.add(measured.embeddings)
        self.embedding_share.add(measured.embedding_share)

    @property
    def _by_kind(self) -> tuple[Mean, Mean, Mean]:
        return self.layers, self.embeddings, self.embedding_share

    def add_loss(self, loss: float) -> None:
        self.loss.add(loss)
        self._told = True

    def row(
        self, stage: int, grid: Sequence[int], watches: bool, probe: float, backward: float, replicas: float
    ) -> list[float]:
        """This rank's numbers for :func:`edgc.measurement.report.report`.

        Args:
            grid: ranks of the error curve.
            watches: whether times of reductions are asked for.
            probe, backward: seconds of a timed reduction and of a micro-batch's backward pass; nan if there was none.
            replicas: number of this rank's group of replicas; nan if it has no other replica.
        """
        curve = self.curve or (math.nan,) * len(grid)
        loss = math.inf if self._told and not self.loss.count else self.loss.value
        means = [self.entropy.value, self.entropy_full.value, probe, backward, replicas, loss]
        kinds = [mean.value for mean in self._by_kind]
        means += [*self.errors, self.entropy.error, *kinds]
        return [float(stage), *means, *curve, *(self.times.values if watches else [])]

    def state_dict(self) -> dict[str, Any]:
        return {
            "entropy": asdict(self.entropy),
            "means": [[item.total, item.count] for item in (self.entropy_full, self.loss, *self._by_kind)],
            "mean": self.mean.state_dict(),
            "times": self.times.values,
            "told": self._told,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        need(state, ("entropy", "means", "mean", "times"), "engine.window")
        self.entropy = NoisyMean(**state["entropy"])
        self.entropy_full, self.loss, self.layers, self.embeddings, self.embedding_share = (
            Mean(float(total), int(count)) for total, count in state["means"]
        )
        self._told = bool(state.get("told", self.loss.count))
        self.mean.load_state_dict(state["mean"])
        self.times.values = state["times"]


def gather(values: Sequence[float], group: dist.ProcessGroup | None) -> list[list[float]]:
    """The values of every rank of ``group``, in rank order, the same on every rank."""
    if not dist.is_initialized():
        return [list(values)]
    on_gpu = dist.get_backend(group) == "nccl"
    row = torch.tensor(values, dtype=torch.float64, device="cuda" if on_gpu else "cpu")
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    return [item.tolist() for item in rows]
