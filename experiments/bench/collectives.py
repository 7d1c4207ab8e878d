"""Collectives told apart by their kind: what a reduction sends by which, and what each takes by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from edgc.compressors import Channel

ALL_REDUCE, ALL_TO_ALL, ALL_GATHER = "all_reduce", "all_to_all", "all_gather"
REDUCE_SCATTER = "reduce_scatter"
KINDS = (ALL_REDUCE, ALL_TO_ALL, ALL_GATHER)  # that are timed
Sent = tuple[str, float]  # the kind of a collective, and the bytes that a rank sends in it


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
        self._noting(ALL_REDUCE, lambda: super(Recording, self).mean_(tensor))

    def scatter_means(self, buffers: Sequence[Tensor]) -> None:
        self._noting(REDUCE_SCATTER, lambda: super(Recording, self).scatter_means(buffers))

    def all_to_all(self, output: Tensor, source: Tensor) -> None:
        self._noting(ALL_TO_ALL, lambda: super(Recording, self).all_to_all(output, source))

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        self._noting(ALL_GATHER, lambda: super(Recording, self).all_gather(output, source))

    def _noting(self, kind: str, start: Callable[[], None]) -> None:
        before = self.bytes
        start()
        if self.bytes > before:
            self._started[kind] = self._started.get(kind, 0) + self.bytes - before

    def finish(self) -> None:
        super().finish()
        self.messages += self._started.items()
        self._started = {}


def total(messages: Iterable[Sent]) -> float:
    """Bytes of all messages together."""
    return sum(bytes_ for _, bytes_ in messages)


def sent_in(kind: str, entries: int, world: int) -> float:
    """Bytes that each of ``world`` ranks sends when a buffer of so many fp32 numbers is reduced, exchanged or gathered
    (:class:`edgc.runtime.channel.Channel` has the formulas)."""
    return (2 if kind == ALL_REDUCE else 1) * (world - 1) / world * 4 * entries


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
        dist.all_gather_into_tensor(output := torch.empty_like(buffer), buffer[:share], group=group)
    seconds = time.perf_counter() - started
    right = (buffer == world * (world - 1) / 2).all() if kind == ALL_REDUCE else torch.equal(output, expected)
    if not right:
        raise RuntimeError(f"the {kind.replace('_', '-')} gave a wrong result")
    return seconds
