"""Collectives told apart by their kind: what a reduction sends by which, what each takes by itself, and slower links.

On an injected link whoever waits for collectives sleeps for bytes / bandwidth more, bytes counted as
:class:`edgc.runtime.channel.Channel` counts them; nothing is emulated below. That is enough to give the stages of one
machine links of different speeds, and costs no processor time. On a CPU only.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from edgc.compressors import Channel
from edgc.runtime.channel import collective

ALL_REDUCE, ALL_TO_ALL, ALL_GATHER = "all_reduce", "all_to_all", "all_gather"
REDUCE_SCATTER = "reduce_scatter"
KINDS = (ALL_REDUCE, ALL_TO_ALL, ALL_GATHER)  # that are timed
SEND = "send"  # no collective: from one rank to another
Sent = tuple[str, float]  # the kind of a collective, and the bytes that a rank sends in it


def join(timeout: timedelta | None = None, backend: str = "gloo") -> None:
    """Make the workers of :func:`experiments.bench.workers.ranks` a process group."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["STORE"], world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


class Recording(Channel):
    """Notes what its rank sends between one wait and the next.

    Attributes:
        messages: per wait, one entry for each kind of collective that was started before it.
    """

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.messages: list[Sent] = []
        self._started: dict[str, int] = {}

    def mean_(self, tensor: Tensor) -> None:
        with self._noting(ALL_REDUCE):
            super().mean_(tensor)

    def scatter_means(self, buffers: Sequence[Tensor]) -> None:
        with self._noting(REDUCE_SCATTER):
            super().scatter_means(buffers)

    def all_to_all(self, output: Tensor, source: Tensor) -> None:
        with self._noting(ALL_TO_ALL):
            super().all_to_all(output, source)

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        with self._noting(ALL_GATHER):
            super().all_gather(output, source)

    @contextlib.contextmanager
    def _noting(self, kind: str) -> Iterator[None]:
        before = self.bytes
        yield
        if self.bytes > before:
            self._started[kind] = self._started.get(kind, 0) + self.bytes - before

    def finish(self) -> None:
        super().finish()
        self.messages += self._started.items()
        self._started = {}


class SlowLink:
    """Opens channels that are slowed down; to be given to an engine as ``open_channel``.

    Attributes:
        bandwidth: bytes per second that a rank sends; None injects nothing. It may be changed between iterations.
        note: called with the start and the end of every wait, delay included.
        messages: what a rank has sent since :meth:`take`, collective by collective.
    """

    def __init__(self, bandwidth: float | None, note: Callable[[float, float], None] = lambda start, end: None) -> None:
        self.bandwidth, self.note = bandwidth, note
        self.messages: list[Sent] = []

    def take(self) -> list[Sent]:
        """The messages since the last call."""
        taken, self.messages = self.messages, []
        return taken

    def __call__(self, group: dist.ProcessGroup | None, shards: Sequence[Tensor] = ()) -> Channel:
        return _SlowChannel(group, shards, self)


class _SlowChannel(Recording):
    def __init__(self, group: dist.ProcessGroup | None, shards: Sequence[Tensor], link: SlowLink) -> None:
        super().__init__(group, shards)
        self._link = link

    def finish(self) -> None:
        began, before = time.perf_counter(), len(self.messages)
        super().finish()
        new = self.messages[before:]
        if not new:
            return
        self._link.messages += new
        if self._link.bandwidth is not None:
            started = time.perf_counter()
            time.sleep(total(new) / self._link.bandwidth)
            self.waited.add(started, time.perf_counter())
        self._link.note(began, time.perf_counter())


def total(messages: Iterable[Sent]) -> float:
    """Bytes of all messages together."""
    return sum(bytes_ for _, bytes_ in messages)


def sent_in(kind: str, entries: int, world: int) -> float:
    """Bytes that each of ``world`` ranks sends when a buffer of so many fp32 numbers is reduced, exchanged, gathered
    (:class:`edgc.runtime.channel.Channel` has the formulas) or sent."""
    share = 1.0 if kind == SEND else (2 if kind == ALL_REDUCE else 1) * (world - 1) / world
    return share * 4 * entries


def seconds_of(kind: str, entries: int, group: dist.ProcessGroup | None = None) -> float:
    """Time one collective on a buffer of so many fp32 numbers, a multiple of the group's size.

    Raises:
        RuntimeError: a wrong result.
    """
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    # Part j of the result of an exchange or a gathering is rank j's.
    buffer = torch.full((entries,), float(rank))
    share = entries // world
    expected = torch.arange(world, dtype=torch.float32).repeat_interleave(share)
    dist.barrier()
    started = time.perf_counter()
    if kind == ALL_REDUCE:
        dist.all_reduce(buffer, group=group)
    elif kind == ALL_TO_ALL:
        dist.all_to_all_single(output := torch.empty_like(buffer), buffer, group=group)
    else:
        gather = collective("all_gather_single", "all_gather_into_tensor")
        gather(output := torch.empty_like(buffer), buffer[:share], group=group)
    seconds = time.perf_counter() - started
    right = (buffer == world * (world - 1) / 2).all() if kind == ALL_REDUCE else torch.equal(output, expected)
    if not right:
        raise RuntimeError(f"the {kind.replace('_', '-')} gave a wrong result")
    return seconds
