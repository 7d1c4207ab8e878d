"""Engines that are timed, each replacing a flat buffer of gradients by what it would send, and such gradients.

Ours, torch's ``powerSGD_hook`` and a dense copy, with collectives done, or answered without a network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as original

from edgc.compressors import Channel, Gradient
from edgc.compressors.base import Statistics
from edgc.compressors.powersgd.state import random_factor
from edgc.config import EDGCConfig
from edgc.runtime.channel import Mark, mark

Shape = tuple[int, int]
SEED = 0  # of the first Q
DIRECTIONS = 96  # of the part of a gradient that is not noise


def layer_shapes(layers: int, hidden: int, embeddings: Sequence[int] = ()) -> list[Shape]:
    """Matrices of ``layers`` transformer layers as torch stores them: qkv, attention output and the two of the MLP.

    ``embeddings``: rows of each embedding; they come last, as their gradients do.
    """
    layer = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]
    return layer * layers + [(rows, hidden) for rows in embeddings]


def entries(shapes: Sequence[Shape]) -> int:
    return sum(rows * columns for rows, columns in shapes)


def views(buffer: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Matrices one after another in a flat buffer."""
    parts = buffer.split([rows * columns for rows, columns in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def name(index: int) -> str:
    return f"matrix.{index}"


def make(shapes: Sequence[Shape], count: int, *, seed: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """``count`` flat gradients that follow each other: the same directions with other weights, and fresh noise.

    A decaying spectrum (exponent 0.7) plus noise, so that a rank that is too small leaves a large error and the
    warm start of an engine has something to follow.
    """
    generator = torch.Generator().manual_seed(seed)
    buffers = [torch.empty(entries(shapes)) for _ in range(count)]
    matrices = [views(buffer, shapes) for buffer in buffers]
    for index, (rows, columns) in enumerate(shapes):
        kept = min(DIRECTIONS, rows, columns)
        decay = torch.arange(1, kept + 1, dtype=torch.float32) ** -0.7
        left = torch.randn(rows, kept, generator=generator) * decay
        right = torch.randn(kept, columns, generator=generator)
        for matrix in (of_one[index] for of_one in matrices):
            weights = 1 + 0.3 * torch.randn(1, kept, generator=generator)
            torch.randn(matrix.shape, generator=generator, out=matrix)
            matrix.mul_(0.2).addmm_(left * weights, right)
    return [buffer.to(device, dtype) for buffer in buffers]


class Engine(ABC):
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


class Copy(Engine):
    """Work of a dense hook around its all-reduce: one pass over the gradients.

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


class Ours(Engine):
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


class OneRank:
    """A process group of one rank, without a backend."""

    def size(self) -> int:
        return 1


class _Done:
    """A collective that is finished when it starts."""

    def __init__(self, tensor: Tensor) -> None:
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result([tensor])

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


class _Noted:
    """A collective and its future in one; tells when the hook goes on after it, in whichever way the hook waits."""

    def __init__(self, work: dist.Work, note: Callable[[], None]) -> None:
        self._future, self._note = work.get_future(), note

    def get_future(self) -> _Noted:
        return self

    def wait(self) -> Any:
        value = self._future.wait()
        self._note()
        return value

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        def noted(future: torch.futures.Future[Any]) -> Any:
            self._note()
            return callback(future)

        return self._future.then(noted)


class Watched:
    """``torch.distributed`` as the hook sees it, noting when each all-reduce starts and ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.started: list[Mark] = []
        self.ended: list[Mark] = []
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: Tensor, *, group: Any, async_op: bool) -> Any:
        self.started.append(mark(self.device))
        if isinstance(group, OneRank):
            self.ended.append(mark(self.device))
            return _Done(tensor)
        self.bytes += 2 * (group.size() - 1) * tensor.numel() * tensor.element_size() // group.size()
        work = dist.all_reduce(tensor, group=group, async_op=async_op)
        return _Noted(work, lambda: self.ended.append(mark(self.device)))


class TorchHook(Engine):
    """torch's hook, with the first Q of :class:`Ours`, so that errors can be compared.

    Args:
        group: None answers every all-reduce at once with what was sent, as one rank.
    """

    def __init__(self, shapes: Sequence[Shape], rank: int, group: dist.ProcessGroup | None, like: Tensor) -> None:
        self.shapes = shapes
        self.state = original.PowerSGDState(
            cast(Any, group or OneRank()), matrix_approximation_rank=rank, start_powerSGD_iter=2
        )
        self.state.iter = 2  # the two iterations that the hook would send uncompressed are over
        first = [random_factor(SEED, 1, name(i), shape[1], min(rank, *shape)) for i, shape in enumerate(shapes)]
        # The hook keeps its factors shape by shape, and begins with those that it finds.
        order = [i for shape in dict.fromkeys(shapes) for i, other in enumerate(shapes) if other == shape]
        self.state.q_memory_dict[0] = torch.cat([first[i].reshape(-1) for i in order]).to(like)
        size = sum(rows * q.shape[1] for (rows, _), q in zip(shapes, first, strict=True))
        self.state.p_memory_dict[0] = like.new_empty(size)

    def step(self, buffer: Tensor) -> Statistics:
        matrices = views(buffer, self.shapes)
        bucket: Any = SimpleNamespace(
            buffer=lambda: buffer, gradients=lambda: matrices, index=lambda: 0, is_last=lambda: True
        )
        watch, done = Watched(buffer.device), Statistics()
        with mock.patch.object(original, "dist", watch):
            marks = [mark(buffer.device)]
            original.powerSGD_hook(self.state, bucket).wait()
            finished = mark(buffer.device)
        # Everything before the last all-reduce is compression, all that follows it decompression.
        for started, ended in zip(watch.started, watch.ended, strict=True):
            done.compress.add(marks[-1], started)
            done.communicate.add(started, ended)
            marks.append(ended)
        done.decompress.add(marks[-1], finished)
        done.bytes = watch.bytes
        return done

    def kept(self) -> Tensor:
        return self.state.error_dict[0]
