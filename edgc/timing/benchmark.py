"""Benchmarks of reductions beside the real ones: on copies, with nothing of the training step hidden or touched.

A benchmark is a generator like a reduction itself, so that it can run while other buckets are in flight; what it sends,
and when, depends on the calls alone. But it waits for its own collectives before it yields, never after: time that
another bucket would fill must not be hidden from the measurement, nor the other bucket's time counted in it. What
counts is the sum of the spans in which this reduction computes or waits.

While it runs it takes the memory of the gradients' copies and of one more compressor's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from edgc.compressors.base import Compressor, Gradient, Statistics
from edgc.compressors.dense import flat_view
from edgc.runtime.channel import Channel
from edgc.runtime.groups import gather_objects
from edgc.timing.cost_gate import CostGate, GateVerdict, GroupTimes, label, verdicts

Timed = Generator[None, None, Statistics]


def timed(compressor: Compressor, gradients: Sequence[Gradient], channel: Channel, rank: int | None) -> Timed:
    """Reduce copies of ``gradients`` with ``compressor``, one that the training step does not use.

    The ranks meet before the clock starts: waiting for a late one is not a cost of the method. The few bytes of that
    are counted by ``channel``, not in the statistics.
    """
    copied = copies(gradients)
    channel.mean_(torch.zeros(1, dtype=torch.float32, device=copied[0].tensor.device))
    channel.finish()
    statistics = Statistics()
    for _ in compressor.exchange(copied, channel, rank, statistics):
        # Waited for at once: its times are those of a reduction alone.
        channel.finish()
        yield
    return statistics


@dataclass(frozen=True)
class Comparison:
    """One rank's benchmarks of one group of gradients, compressed and dense."""

    compressed: tuple[Statistics, ...]
    dense: tuple[Statistics, ...]

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of the fastest compressed and of the fastest dense one; nan where none was completed."""
        return _fastest(self.compressed), _fastest(self.dense)


def compare(
    build: Callable[[], Compressor], gradients: Sequence[Gradient], channel: Channel, rank: int
) -> Generator[None, None, Comparison]:
    """Reduce copies of ``gradients`` compressed and dense in turn, with compressors of their own from ``build``.

    The first round also pays for memory that later ones have; therefore two, of which the faster counts.
    """
    compressors = build(), build()
    made: tuple[list[Statistics], list[Statistics]] = [], []
    for _ in range(2):
        for compressor, wanted, results in zip(compressors, (rank, None), made, strict=True):
            statistics = yield from timed(compressor, gradients, channel, wanted)
            results.append(statistics)
    return Comparison(tuple(made[0]), tuple(made[1]))


class Benchmark:
    """One rank's benchmarks in the current iteration, for the search of r_max and for the cost gate, and the verdicts
    that follow from them.

    Args:
        make: a new compressor of the run's kind.
        open_channel: what reductions are sent through.

    Attributes:
        gate: the verdicts in force; None unless ``gated``, without a cost gate.
    """

    def __init__(
        self, make: Callable[[], Compressor], stage: int, gated: bool, open_channel: Callable[..., Channel]
    ) -> None:
        self.make, self.stage, self.open_channel = make, stage, open_channel
        self.gate = CostGate() if gated else None
        self._compressor: Compressor | None = None
        self.start_iteration()

    def start_iteration(self) -> None:
        self._probes: list[Statistics] = []
        self._compared: list[tuple[tuple[str, ...], Comparison]] = []

    def end_search(self) -> None:
        """Give back the memory of the compressor that was timed."""
        self._compressor = None

    def probe(
        self, gradients: Sequence[Gradient], group: dist.ProcessGroup | None, rank: int, shards: Sequence[Tensor]
    ) -> Generator[None, None, int]:
        """Time a reduction (rank 0: dense); the training step goes on as it is. Returns the bytes sent."""
        if self._compressor is None:
            self._compressor = self.make()
        channel = self._channel(group, shards)
        statistics = yield from timed(self._compressor, gradients, channel, rank or None)
        self._probes.append(statistics)
        return channel.bytes

    def compare(
        self, gradients: Sequence[Gradient], group: dist.ProcessGroup | None, rank: int, shards: Sequence[Tensor]
    ) -> Generator[None, None, int]:
        """Time a compressed and a dense reduction of this group, for the cost gate. Returns the bytes sent."""
        channel = self._channel(group, shards)
        comparison = yield from compare(self.make, gradients, channel, rank)
        self._compared.append((tuple(gradient.name for gradient in gradients), comparison))
        return channel.bytes

    def _channel(self, group: dist.ProcessGroup | None, shards: Sequence[Tensor]) -> Channel:
        return self.open_channel(group, [buffer.clone() for buffer in shards])

    @property
    def probe_seconds(self) -> float:
        """What the probes of this iteration took together."""
        return sum(seconds(statistics) for statistics in self._probes)

    def judge(self, exchange_group: dist.ProcessGroup | None) -> tuple[GateVerdict, ...]:
        """Verdicts of all stages from the times of all ranks; this rank follows those of its stage from now on."""
        assert self.gate is not None
        groups = {label(names): names for names, _ in self._compared}
        times = [GroupTimes(label(names), *comparison.seconds) for names, comparison in self._compared]
        made = verdicts(gather_objects((self.stage, times), exchange_group))
        self.gate.follow([verdict for verdict in made if verdict.stage == self.stage], groups)
        return made


def _fastest(made: Iterable[Statistics]) -> float:
    return min((time for time in map(seconds, made) if math.isfinite(time)), default=math.nan)


def seconds(statistics: Statistics) -> float:
    """Compress + communicate + decompress; nan if the reduction was given up, which says nothing about its time."""
    if statistics.skipped:
        return math.nan
    return statistics.compress.seconds + statistics.communicate.seconds + statistics.decompress.seconds


def copies(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Copies that lie in memory as the originals do: views of one buffer stay views of one buffer, which is what
    saves a dense reduction its packing."""
    by_type: dict[torch.dtype, list[int]] = {}
    for index, gradient in enumerate(gradients):
        by_type.setdefault(gradient.tensor.dtype, []).append(index)
    copied: dict[int, Tensor] = {}
    for indices in by_type.values():
        tensors = [gradients[index].tensor for index in indices]
        flat = flat_view(tensors)
        if flat is None:
            parts = [tensor.clone() for tensor in tensors]
        else:
            split = torch.split(flat.clone(), [tensor.numel() for tensor in tensors])
            parts = [part.view_as(tensor) for part, tensor in zip(split, tensors, strict=True)]
        copied.update(zip(indices, parts, strict=True))
    return [replace(gradient, tensor=copied[index]) for index, gradient in enumerate(gradients)]
