"""Collectives told apart by their kind: what a reduction sends by which, and what each takes by itself, on a CPU."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from edgc.compressors import Channel
from edgc.runtime.channel import collective

ALL_REDUCE, ALL_TO_ALL, ALL_GATHER = "all_reduce", "all_to_all", "all_gather"
KINDS = (ALL_REDUCE, ALL_TO_ALL, ALL_GATHER)  # that are timed
Message = tuple[str, float]  # the kind of a collective, and the bytes that a rank sends in it


def join(timeout: timedelta | None = None, backend: str = "gloo") -> None:
    """Make the workers of :func:`experiments.bench.workers.ranks` a process group."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STORE"], world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _noted(kind: str, method: Callable[..., None]) -> Callable[..., None]:
    """A collective of :class:`Channel` whose bytes are noted under its kind."""

    def call(channel: NotingChannel, *tensors: Any) -> None:
        before = channel.bytes
        method(channel, *tensors)
        channel.started[kind] += channel.bytes - before

    return call


class NotingChannel(Channel):
    """A channel that notes at every wait what was sent since the one before, by the kind of the collective."""

    def __init__(self, group: dist.ProcessGroup | None, shards: Sequence[Tensor], messages: list[Message]) -> None:
        super().__init__(group, shards)
        self.messages = messages
        self.started: Counter[str] = Counter()

    mean_ = _noted(ALL_REDUCE, Channel.mean_)
    scatter_means = _noted("reduce_scatter", Channel.scatter_means)
    all_to_all = _noted(ALL_TO_ALL, Channel.all_to_all)
    all_gather = _noted(ALL_GATHER, Channel.all_gather)

    def finish(self) -> None:
        super().finish()
        self.messages += (+self.started).items()
        self.started.clear()


def noting(channels: list[list[Message]]) -> Callable[..., Channel]:
    """Return an ``open_channel`` for an engine: the messages of every channel are a list of their own."""

    def open_channel(group: dist.ProcessGroup | None, shards: Sequence[Tensor] = ()) -> Channel:
        channels.append([])
        return NotingChannel(group, shards, channels[-1])

    return open_channel


def total_bytes(messages: Iterable[Message]) -> float:
    """Bytes of all messages together."""
    return sum(size for _, size in messages)


def bytes_sent(kind: str, entries: int, world: int) -> float:
    """Bytes that each of ``world`` ranks sends when a buffer of so many fp32 numbers is reduced, exchanged or gathered
    (:class:`edgc.runtime.channel.Channel` has the formulas)."""
    return (2 if kind == ALL_REDUCE else 1) * (world - 1) / world * 4 * entries


def time_collective(kind: str, entries: int) -> float:
    """Seconds of one collective on a buffer of so many fp32 numbers, a multiple of the group's size.

    Raises:
        RuntimeError: a wrong result.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    # Part j of the result of an exchange or a gathering is rank j's.
    buffer = torch.full((entries,), float(rank))
    share = entries // world
    expected = torch.arange(world, dtype=torch.float32).repeat_interleave(share)
    dist.barrier()
    started = time.perf_counter()
    if kind == ALL_REDUCE:
        dist.all_reduce(buffer)
    elif kind == ALL_TO_ALL:
        dist.all_to_all_single(output := torch.empty_like(buffer), buffer)
    else:
        gather = collective("all_gather_single", "all_gather_into_tensor")
        gather(output := torch.empty_like(buffer), buffer[:share])
    seconds = time.perf_counter() - started
    right = (buffer == world * (world - 1) / 2).all() if kind == ALL_REDUCE else torch.equal(output, expected)
    if not right:
        raise RuntimeError(f"the {kind.replace('_', '-')} gave a wrong result")
    return seconds
