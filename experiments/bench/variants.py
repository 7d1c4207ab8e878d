"""What is timed: engines under one small interface, each replacing a flat buffer of gradients by what it would send."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from edgc.compressors import Channel
from edgc.compressors.powersgd.state import random_factor
from edgc.config import EDGCConfig
from edgc.runtime.channel import Stopwatch, mark
from experiments.bench.gradients import Shape, entries, name, named, views
from experiments.bench.torch_hook import Hook

SEED = 0  # of the first Q


@dataclass(frozen=True)
class Parts:
    """One step: wall time on this rank by what it was spent on, and bytes sent."""

    compress: Stopwatch
    communicate: Stopwatch
    decompress: Stopwatch
    bytes: int


class Variant(ABC):
    """One engine with its state, for one rank."""

    @abstractmethod
    def step(self, buffer: Tensor) -> Parts:
        """Replace ``buffer``, flat, by the mean over the workers of what the engine sends."""

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

    def step(self, buffer: Tensor) -> Parts:
        compress, communicate, channel = Stopwatch(), Stopwatch(), Channel(self.group)
        started = mark(buffer.device)
        self.message.copy_(buffer)
        compress.add(started, mark(buffer.device))
        if self.group is not None:
            started = mark(buffer.device)
            channel.mean_(self.message)
            channel.finish()
            communicate.add(started, mark(buffer.device))
        return Parts(compress, communicate, Stopwatch(), channel.bytes)

    def kept(self) -> None:
        return None


class TorchHook(Variant):
    """torch's ``powerSGD_hook``, with the first Q of :class:`Ours`, so that their errors can be compared."""

    def __init__(self, shapes: Sequence[Shape], rank: int, group: dist.ProcessGroup | None, like: Tensor) -> None:
        first = [random_factor(SEED, 1, name(i), shape[1], min(rank, *shape)) for i, shape in enumerate(shapes)]
        self.hook = Hook(shapes, rank, first, group, like)

    def step(self, buffer: Tensor) -> Parts:
        self.hook.step(buffer)
        return Parts(self.hook.compress, self.hook.communicate, self.hook.decompress, self.hook.bytes)

    def kept(self) -> Tensor:
        return self.hook.kept()


class Ours(Variant):
    """This project's PowerSGD.

    Args:
        group: None works as one of two workers with equal gradients (:class:`Mirror`).
    """

    def __init__(self, shapes: Sequence[Shape], rank: int, group: dist.ProcessGroup | None, factor_dtype: str) -> None:
        config = EDGCConfig(
            method="powersgd", rank=rank, factor_dtype=factor_dtype, min_compression_elements=1, seed=SEED
        )
        self.compressor = config.build()
        self.shapes, self.rank, self.group = shapes, rank, group

    def step(self, buffer: Tensor) -> Parts:
        channel = Mirror() if self.group is None else Channel(self.group)
        done = self.compressor.reduce(named(views(buffer, self.shapes)), channel, self.rank)
        return Parts(done.compress, done.communicate, done.decompress, done.bytes)

    def kept(self) -> Tensor | None:
        errors = self.compressor.state_dict()["errors"]
        if not errors:
            return None
        return torch.cat([errors[name(index)].reshape(-1).float() for index in range(len(self.shapes))])
