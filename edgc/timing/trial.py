"""Timing a reduction beside the real one: on copies, with nothing of the training step hidden or touched.

A trial is a generator like a reduction itself, so that it can run while other buckets are in flight; what it sends, and
when, depends on the calls alone. But it waits for its own collectives before it yields, never after: time that another
bucket would fill must not be hidden from the measurement, nor the other bucket's time counted in it. What counts is the
sum of the spans in which this reduction computes or waits.

While it runs a trial takes the memory of the gradients' copies and of one more compressor's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edgc.compressors.base import Compressor, Gradient, Statistics
from edgc.compressors.dense import flat_view
from edgc.runtime.channel import Channel

Trial = Generator[None, None, Statistics]


def timed(compressor: Compressor, gradients: Sequence[Gradient], channel: Channel, rank: int | None) -> Trial:
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
    """One rank's trials of one group of gradients, compressed and dense."""

    compressed: tuple[Statistics, ...]
    dense: tuple[Statistics, ...]

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of the fastest compressed and of the fastest dense trial; nan where none was completed."""
        return _fastest(self.compressed), _fastest(self.dense)


def compare(
    build: Callable[[], Compressor],
    gradients: Sequence[Gradient],
    channel: Channel,
    rank: int,
    rounds: int = 2,
) -> Generator[None, None, Comparison]:
    """Reduce copies of ``gradients`` compressed and dense in turn, with compressors of their own from ``build``.

    The first round also pays for memory that later ones have; therefore two, of which the faster counts.
    """
    compressors = build(), build()
    made: tuple[list[Statistics], list[Statistics]] = [], []
    for _ in range(rounds):
        for compressor, wanted, results in zip(compressors, (rank, None), made, strict=True):
            statistics = yield from timed(compressor, gradients, channel, wanted)
            results.append(statistics)
    return Comparison(tuple(made[0]), tuple(made[1]))


def _fastest(trials: Iterable[Statistics]) -> float:
    return min((time for time in map(seconds, trials) if math.isfinite(time)), default=math.nan)


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
