"""Several workers of a compressor in one process, step by step, without any process group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgc.compressors import Channel, Compressor, Gradient, Statistics
from edgc.runtime.channel import after_sum, before_sum


class Room:
    """Where the channels of all workers meet; collectives happen once everybody has started the same one."""

    def __init__(self, world: int) -> None:
        self.channels = [_Channel(self, rank, world) for rank in range(world)]
        self.meetings = 0

    def meet(self) -> None:
        self.meetings += 1
        started = [channel.started for channel in self.channels]
        assert len({len(s) for s in started}) == 1, "workers started different numbers of collectives"
        for calls in zip(*started, strict=True):
            kinds = {kind for kind, _, _ in calls}
            assert len(kinds) == 1, f"workers started different collectives: {kinds}"
            sources = [source.clone() for _, _, source in calls]
            for rank, (kind, output, _) in enumerate(calls):
                if kind == "mean":
                    # In one order for all workers; every element of the sum is the same on all of them.
                    total = sources[0]
                    for source in sources[1:]:
                        total = total + source
                    after_sum(total, len(sources))
                    output.copy_(total)
                elif kind == "all_to_all":
                    output.copy_(torch.stack([s.chunk(len(sources))[rank] for s in sources]).view_as(output))
                else:
                    output.copy_(torch.cat([s.reshape(-1) for s in sources]).view_as(output))
        for channel in self.channels:
            channel.started = []


class _Channel(Channel):
    def __init__(self, room: Room, rank: int, world: int) -> None:
        super().__init__(None)
        self.room, self.rank, self.world = room, rank, world
        self.started: list[tuple[str, Tensor, Tensor]] = []

    def mean_(self, tensor: Tensor) -> None:
        if self.world > 1 and tensor.numel():
            before_sum(tensor, self.world)
            self.started.append(("mean", tensor, tensor))

    def all_to_all(self, output: Tensor, source: Tensor) -> None:
        self.started.append(("all_to_all", output, source))

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        self.started.append(("all_gather", output, source))

    def finish(self) -> None:
        """Everything is done in :meth:`Room.meet`, before anybody is resumed."""


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


def reduce_together(
    compressors: Sequence[Compressor],
    gradients: Sequence[Sequence[Gradient]],
    rank: int | None,
    room: Room | None = None,
    settle: bool = True,
) -> list[Statistics]:
    """One reduction of every worker, each with its own compressor and gradients; a whole step, unless told not to."""
    room = room or Room(len(compressors))
    results = [Statistics() for _ in compressors]
    running = [
        compressor.exchange(own, channel, rank, done)
        for compressor, own, channel, done in zip(compressors, gradients, room.channels, results, strict=True)
    ]
    while {next(exchange, "end") for exchange in running} != {"end"}:
        room.meet()
    for compressor in compressors if settle else ():
        compressor.settle(True)
    return results
