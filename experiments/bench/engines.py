"""Engines that are timed, and flat buffers of gradients for them.

Ours, torch's ``powerSGD_hook`` and a dense copy, each with its state, for one rank, with collectives done, or answered
without a network. ``step`` replaces the buffer by the mean over the workers of what the engine sends; times are of this
rank. ``errors`` is error feedback as one flat fp32 tensor; None if the engine keeps none.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as original

from edgc.compressors import Channel, Gradient
from edgc.compressors.base import Statistics
from edgc.compressors.powersgd.state import random_factor
from edgc.config import EDGCConfig
from edgc.runtime.channel import all_reduce_bytes, mark

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
    """Number of entries of all matrices together."""
    return sum(rows * columns for rows, columns in shapes)


def views(buffer: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Matrices one after another in a flat buffer."""
    parts = buffer.split([rows * columns for rows, columns in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def name(index: int) -> str:
    return f"matrix.{index}"


def make(shapes: Sequence[Shape], count: int, *, seed: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Flat gradients, ``count`` of them, that follow each other: the same directions, other weights, fresh noise.

    A decaying spectrum (exponent 0.7) plus noise, so that a rank that is too small leaves a large error and the
    warm start of an engine has something to follow.
    """
    generator = torch.Generator().manual_seed(seed)
    buffers = [torch.empty(entries(shapes)) for _ in range(count)]
    matrices = [views(buffer, shapes) for buffer in buffers]
    for index, (rows, columns) in enumerate(shapes):
        directions = min(DIRECTIONS, rows, columns)
        decay = torch.arange(1, directions + 1, dtype=torch.float32) ** -0.7
        left = torch.randn(rows, directions, generator=generator) * decay
        right = torch.randn(directions, columns, generator=generator)
        for matrix in (gradient[index] for gradient in matrices):
            weights = 1 + 0.3 * torch.randn(1, directions, generator=generator)
            torch.randn(matrix.shape, generator=generator, out=matrix)
            matrix.mul_(0.2).addmm_(left * weights, right)
    return [buffer.to(device, dtype) for buffer in buffers]


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
        first, other = output.view(-1).chunk(2)
        first.copy_(source.view(-1))
        # The peer's share: it has packed the mean of two equal parts again, which gives that part.
        parts = self._parts
        known = parts is not None and parts.numel() == output.numel() and parts.dtype == output.dtype
        other.copy_((parts.view(-1).chunk(2)[1] if known and parts is not None else source).view(-1))
        self.bytes += source.numel() * source.element_size()


class Copy:
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

    def errors(self) -> None:
        return None


class Ours:
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

    def errors(self) -> Tensor | None:
        errors = self.compressor.state_dict()["errors"]
        if not errors:
            return None
        return torch.cat([errors[name(index)].reshape(-1).float() for index in range(len(self.shapes))])


class TorchHook:
    """torch's hook, with the first Q of :class:`Ours`, so that errors can be compared.

    Args:
        group: None answers every all-reduce at once with what was sent, as one rank.
    """

    def __init__(self, shapes: Sequence[Shape], rank: int, group: dist.ProcessGroup | None, like: Tensor) -> None:
        self.shapes = shapes
        one_rank: Any = SimpleNamespace(size=lambda: 1)
        self.state = original.PowerSGDState(group or one_rank, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        self.state.iter = 2  # the two iterations that the hook would send uncompressed are over
        first = [random_factor(SEED, 1, name(i), shape[1], min(rank, *shape)) for i, shape in enumerate(shapes)]
        # The hook keeps its factors shape by shape, and begins with those that it finds.
        order = [i for shape in dict.fromkeys(shapes) for i, other in enumerate(shapes) if other == shape]
        self.state.q_memory_dict[0] = torch.cat([first[i].reshape(-1) for i in order]).to(like)
        size = sum(rows * q.shape[1] for (rows, _), q in zip(shapes, first, strict=True))
        self.state.p_memory_dict[0] = like.new_empty(size)

    def step(self, buffer: Tensor) -> Statistics:
        matrices, device, done = views(buffer, self.shapes), buffer.device, Statistics()
        bucket: Any = SimpleNamespace(
            buffer=lambda: buffer, gradients=lambda: matrices, index=lambda: 0, is_last=lambda: True
        )
        reduce, ended = dist.all_reduce, mark(device)

        def all_reduce(tensor: Tensor, *, group: Any, async_op: bool) -> Any:
            """Wait for each all-reduce, as the hook does anyhow; all that comes before the last is compression."""
            nonlocal ended
            started = mark(device)
            done.compress.add(ended, started)
            if group.size() > 1:
                reduce(tensor, group=group)
            ended = mark(device)
            done.communicate.add(started, ended)
            done.bytes += all_reduce_bytes(tensor.nbytes, group.size())
            future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
            future.set_result([tensor])
            return SimpleNamespace(get_future=lambda: future)

        with mock.patch.object(dist, "all_reduce", all_reduce):
            original.powerSGD_hook(self.state, bucket).wait()
        done.decompress.add(ended, mark(device))
        return done

    def errors(self) -> Tensor:
        return self.state.error_dict[0]


Engine = Copy | Ours | TorchHook
