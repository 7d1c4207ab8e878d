"""Benchmarks of reductions beside the real ones, and the verdicts of the cost gate that follow from them.

Reductions are timed on copies, with nothing of the training step hidden or touched. A benchmark is a generator like a
reduction itself, so that it can run while other buckets are in flight; what it sends, and when, depends on the calls
alone. But it waits for its own collectives before it yields, never after: time that another bucket would fill must not
be hidden from the measurement, nor the other bucket's time counted in it. The sum of the spans in which this reduction
computes or waits is what counts. While it runs it takes the memory of the gradients' copies and of one more
compressor's state.

The cost gate compresses a group of gradients only where that was measured to be faster than sending it dense. A group
is what one call of :meth:`edgc.engine.Engine.exchange` reduces. On the controller's schedule every rank times a
compressed and a dense reduction of each of its groups. The ranks exchange these times, every rank averages them in the
same order (:func:`verdicts`), and each follows the verdicts of its own stage until the next measurement. They are kept
per gradient and not per group, because groups may be cut anew: DDP rebuilds its buckets after the first iteration of
every process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from edgc.compressors.base import Compressor, Gradient, Statistics
from edgc.compressors.dense import flat_view
from edgc.lazy import Tensor, torch
from edgc.runtime.channel import Channel

if TYPE_CHECKING:
    import torch.distributed as dist

GroupTimes: TypeAlias = tuple[str, float, float]
"""A group of one rank, by :func:`label`, with the seconds of its compressed and of its dense reduction."""


@dataclass(frozen=True)
class GateVerdict:
    """Outcome for one group of one stage: mean seconds over the stage's ranks, and whether to compress."""

    stage: int
    group: str
    seconds_compressed: float
    seconds_dense: float
    compress: bool


def timed(
    compressor: Compressor, gradients: Sequence[Gradient], channel: Channel, rank: int | None
) -> Generator[None, None, Statistics]:
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
    compressor.settle(True)
    return statistics


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
    copied = list(gradients)
    for indices in by_type.values():
        tensors = [gradients[index].tensor for index in indices]
        flat = flat_view(tensors)
        if flat is None:
            parts = [tensor.clone() for tensor in tensors]
        else:
            split = torch.split(flat.clone(), [tensor.numel() for tensor in tensors])
            parts = [part.view_as(tensor) for part, tensor in zip(split, tensors, strict=True)]
        for index, part in zip(indices, parts, strict=True):
            copied[index] = replace(gradients[index], tensor=part)
    return copied


class Benchmark:
    """One rank's benchmarks in the current iteration, for the search of r_max and for the cost gate.

    Args:
        make: a new compressor of the run's kind.
        open_channel: opens what reductions are sent through.

    Attributes:
        gate: the verdicts in force, by name of a gradient; None unless ``gated``, without a cost gate.
        probe_seconds: of the probes of this iteration together.
    """

    def __init__(
        self, make: Callable[[], Compressor], stage: int, gated: bool, open_channel: Callable[..., Channel]
    ) -> None:
        self.make, self.stage, self.open_channel = make, stage, open_channel
        self.gate: dict[str, bool] | None = {} if gated else None
        self._compressor: Compressor | None = None
        self.start_iteration()

    def start_iteration(self) -> None:
        self._probes: list[Statistics] = []
        self._compared: list[tuple[list[str], list[Statistics], list[Statistics]]] = []

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
        self._probes.append((yield from timed(self._compressor, gradients, channel, rank or None)))
        return channel.bytes

    def compare(
        self, gradients: Sequence[Gradient], group: dist.ProcessGroup | None, rank: int, shards: Sequence[Tensor]
    ) -> Generator[None, None, int]:
        """Time a compressed and a dense reduction of this group, for the cost gate. Returns the bytes sent.

        Each twice, in turn, with a compressor of its own; the first time also pays for memory that the second one has,
        and the faster one counts.
        """
        channel = self._channel(group, shards)
        compressors = self.make(), self.make()
        results: tuple[list[Statistics], list[Statistics]] = [], []
        for _ in range(2):
            for compressor, common_rank, statistics in zip(compressors, (rank, None), results, strict=True):
                statistics.append((yield from timed(compressor, gradients, channel, common_rank)))
        self._compared.append(([gradient.name for gradient in gradients], *results))
        return channel.bytes

    def _channel(self, group: dist.ProcessGroup | None, shards: Sequence[Tensor]) -> Channel:
        return self.open_channel(group, [buffer.clone() for buffer in shards])

    @property
    def probe_seconds(self) -> float:
        return sum(map(seconds, self._probes))

    @property
    def group_times(self) -> list[GroupTimes]:
        """Seconds of this iteration's comparisons, of the faster reduction of a kind; nan where none was completed."""
        return [(label(names), _fastest(compressed), _fastest(dense)) for names, compressed, dense in self._compared]

    def follow(self, outcome: Sequence[GateVerdict]) -> None:
        """Take over the verdicts of this rank's stage on the groups of this iteration."""
        assert self.gate is not None
        by_group = {verdict.group: verdict.compress for verdict in outcome if verdict.stage == self.stage}
        for names, *_ in self._compared:
            if label(names) in by_group:
                self.gate |= dict.fromkeys(names, by_group[label(names)])

    def compresses(self, gradients: Sequence[Gradient]) -> bool:
        """True if the verdict in force on most entries of a group is to compress, or unknown."""
        assert self.gate is not None
        sizes = {gradient.name: gradient.tensor.numel() for gradient in gradients}
        return 2 * sum(size for name, size in sizes.items() if not self.gate.get(name, True)) <= sum(sizes.values())


def _fastest(statistics: Sequence[Statistics]) -> float:
    return min((time for time in map(seconds, statistics) if math.isfinite(time)), default=math.nan)


def label(names: Sequence[str]) -> str:
    """Name of a group in verdicts and logs: its first gradient's, which no other group of the rank has, and how many
    follow."""
    return names[0] if len(names) == 1 else f"{names[0]} + {len(names) - 1} more"


def verdicts(rows: Sequence[tuple[int, Sequence[GroupTimes]]]) -> tuple[GateVerdict, ...]:
    """Verdicts to compress exactly where the mean compressed time is below the mean dense time.

    Args:
        rows: per rank, in rank order, its stage and its measurements; times that are not finite do not count, and a
            group without any gets no verdict.

    Returns:
        Ordered by stage, then as the first rank of the stage met the groups. Equal rows give equal verdicts, bit for
        bit.
    """
    times: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for stage, measured in rows:
        for group, *pair in measured:
            known = times.setdefault((stage, group), [])
            known += [(pair[0], pair[1])] if all(map(math.isfinite, pair)) else []
    outcome = []
    for (stage, group), pairs in sorted(times.items(), key=lambda item: item[0][0]):
        if pairs:
            compressed, dense = (math.fsum(column) / len(pairs) for column in zip(*pairs, strict=True))
            outcome.append(GateVerdict(stage, group, compressed, dense, compressed < dense))
    return tuple(outcome)
