"""Several workers of a compressor in one process, without any process group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from torch import Tensor

from edgc.compressors import Channel, Compressor, Gradient, Statistics
from edgc.runtime.local import Room


class Twin(Channel):
    """One of two workers that send the same; collectives without memory of their own."""

    def __init__(self) -> None:
        super().__init__(None)
        self.world = 2

    def mean_(self, tensor: Tensor) -> None:
        """The mean of the same is the same."""

    def all_to_all(self, output: Tensor, source: Tensor) -> None:
        output.copy_(source)

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        output.copy_(source.expand_as(output))


room = cache(Room)
"""The room of so many workers; its threads are made once."""


def reduce_together(
    compressors: Sequence[Compressor],
    gradients: Sequence[Sequence[Gradient]],
    rank: int | None,
    settle: bool = True,
) -> list[Statistics]:
    """One reduction of every worker, each with its own compressor and gradients; a whole step, unless told not to."""
    place = room(len(compressors))

    def reduce(worker: int) -> Statistics:
        statistics = Statistics()
        for _ in compressors[worker].exchange(gradients[worker], place.opener(worker)(), rank, statistics):
            pass
        if settle:
            compressors[worker].settle(True)
        return statistics

    return place.run(reduce)
