"""What is timed: engines under one small interface, each replacing a flat buffer of gradients by what it would send."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from edgc.compressors import Channel, Gradient
from edgc.compressors.base import Statistics
from edgc.config import EDGCConfig
from edgc.runtime.channel import mark
from experiments.bench.gradients import Shape, entries, name, views

SEED = 0  # of the first Q


class Variant(ABC):
    """One engine with its state, for one rank."""

    @abstractmethod
    def step(self, buffer: Tensor) -> Statistics:
        """Replace ``buffer``, flat, by the mean over the workers of what the engine sends; times are of this rank."""

    @abstractmethod
    def kept(self) -> Tensor | None:
        """Error feedback as one flat fp32 tensor; None if the engine keeps none."""


class Mirror(Channel):
    """One of two workers whose gradients are the same: what its peer would send is known, and nothing is sent.

    All work of a worker is done, so that it can be timed by itself; the bytes are those of two workers.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.world, self.rank = 2, 0
        self._parts: Tensor | None = None

    def mean_(self, tensor: Tensor) -> None:
        self.bytes += tensor.numel() * tensor.element_size()

    def all_to_all(self, output: Tensor, source: Tensor) -> None:
        self._parts = source
        for part in output.chunk(2):
            part.copy_(source.chunk(2)[0].view_as(part))
        self.bytes += source.numel() * source.element_size() // 2

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        mine, other = output.view(-1).chunk(2)
        mine.copy_(source.view(-1))
        # The peer's share: it has packed the mean of two equal parts again, which gives that part.
        parts = self._parts
        known = parts is not None and parts.numel() == output.numel() and parts.dtype == output.dtype
        other.copy_((parts.view(-1).chunk(2)[1] if known and parts is not None else source).view(-1))
        self.bytes += source.numel() * source.element_size()


class Copy(Variant):
    """What a dense hook has to do around its all-reduce: one pass over the gradients.

    With a group the all-reduce is done; the gradients are the message.
    """

    def __init__(self, shapes: Sequence[Shape], group: dist.ProcessGroup | None, like: Tensor) -> None:
        self.group = group
        self.message = like.new_empty(entries(shapes))

    def step(self, buffer: Tensor) -> Statistics:
        done, channel = Statistics(), Channel(self.group)
        started = mark(buffer.device)
        self.message.copy_(buffer)
        done.compress.add(started, mark(buffer.device))
        if self.group is not None:
            started = mark(buffer.device)
            channel.mean_(self.message)
            channel.finish()
            done.communicate.add(started, mark(buffer.device))
        done.bytes = channel.bytes
        return done

    def kept(self) -> None:
        return None


class Ours(Variant):
    """This project's PowerSGD.

    Args:
        group: None works as one of two workers with equal gradients (:class:`Mirror`).
    """

    def __init__(self, shapes: Sequence[Shape], rank: int, group: dist.ProcessGroup | None, factor_dtype: str) -> None:
        options = {"rank": rank, "factor_dtype": factor_dtype, "min_compression_elements": 1, "seed": SEED}
        self.compressor = EDGCConfig(method="powersgd", **options).build()
        self.shapes, self.rank, self.group = shapes, rank, group

    def step(self, buffer: Tensor) -> Statistics:
        channel = Mirror() if self.group is None else Channel(self.group)
        gradients = [Gradient(name(index), matrix) for index, matrix in enumerate(views(buffer, self.shapes))]
        return self.compressor.reduce(gradients, channel, self.rank)

    def kept(self) -> Tensor | None:
        errors = self.compressor.state_dict()["errors"]
        if not errors:
            return None
        return torch.cat([errors[name(index)].reshape(-1).float() for index in range(len(self.shapes))])
