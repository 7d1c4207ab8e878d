"""Several replicas in one process: a thread each, and collectives that happen once every replica has started them.

Compressors, engines and strategies run as between processes: what they send through is a :class:`LocalChannel`. Sums
are made in the order of the replicas: bit for bit those of gloo among two, and up to the order of a sum among more.
One replica works at a time, with all of torch's threads, until it waits in a collective or ends.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from edgc.lazy import Tensor, torch
from edgc.runtime.channel import Channel

T = TypeVar("T")
Call = tuple[str, Any, Any]  # kind of collective, its output, its source


class Room:
    """Place where the replicas of one process meet.

    Args:
        world: number of replicas.
        device: theirs; on a GPU their threads use it, in the stream that is current where :meth:`run` is called.

    Attributes:
        sent: bytes that each replica has sent so far, by kind of collective.
        meetings: how often the replicas have waited for collectives.
    """

    def __init__(self, world: int, device: torch.device | None = None) -> None:
        self.world, self.device = world, device
        self.sent: list[Counter[str]] = [Counter() for _ in range(world)]
        self._threads = ThreadPoolExecutor(world, thread_name_prefix="edgc-replica")
        self._turn = threading.Condition()  # held by the replica that works
        self._brought: dict[int, list[Call]] = {}
        self._results: list[list[Any]] = []
        self._ended = self.meetings = 0
        self._error: BaseException | None = None

    def opener(self, rank: int) -> Callable[..., Channel]:
        """Opener of one replica's channels, to be used as :class:`~edgc.runtime.channel.Channel` itself is."""
        return partial(LocalChannel, self, rank)

    def run(self, function: Callable[[int], T]) -> list[T]:
        """``function(rank)`` of every replica, each in a thread of its own; the results in rank order.

        Raises:
            Exception: the first that a replica raised; the others stop at their next collective.
            RuntimeError: the replicas have started different collectives.
        """
        self._brought, self._ended, self._error = {}, 0, None
        gpu = self.device is not None and self.device.type == "cuda"
        stream = torch.cuda.current_stream(self.device) if gpu else None
        futures = [self._threads.submit(self._attend, function, rank, stream) for rank in range(self.world)]
        results: list[Any] = [future.result() for future in futures]
        if self._error is not None:
            raise self._error
        return results

    def _attend(self, function: Callable[[int], T], rank: int, stream: torch.cuda.Stream | None) -> T | None:
        result, error = None, None
        with self._turn, torch.cuda.stream(stream):
            try:
                result = function(rank)
            except _Stopped:
                pass
            except BaseException as raised:
                error = raised
            self._ended += 1
            self._error = self._error or error
            self._refuse_to_wait()
        return result

    def meet(self, rank: int, calls: list[Call]) -> list[Any]:
        """Wait until every replica has brought its collectives, and they are done; returns gathered objects. To be
        called inside :meth:`run`."""
        self._brought[rank] = calls
        meeting = self.meetings
        self._refuse_to_wait()
        if len(self._brought) == self.world and self._error is None:
            try:
                self._results = self._perform([self._brought[each] for each in range(self.world)])
            except Exception as error:
                self._error = error
            self._brought = {}
            self.meetings += 1
            self._turn.notify_all()
        self._turn.wait_for(lambda: self.meetings != meeting or self._error is not None)
        if self._error is not None:
            raise _Stopped
        return self._results

    def _refuse_to_wait(self) -> None:
        """End waiting for what cannot come any more: a replica has failed, or has ended before the others."""
        if self._error is None and self._brought and self._ended:
            self._error = RuntimeError(f"{self._ended} replicas have ended, and others wait for them in a collective")
        if self._error is not None:
            self._turn.notify_all()

    def _perform(self, brought: Sequence[list[Call]]) -> list[Any]:
        if len({len(calls) for calls in brought}) > 1:
            raise RuntimeError(f"replicas have started {', '.join(str(len(calls)) for calls in brought)} collectives")
        gathered = []
        for calls in zip(*brought, strict=True):
            kinds, outputs, sources = zip(*calls, strict=True)
            if len(set(kinds)) > 1:
                raise RuntimeError(f"replicas have started different collectives: {', '.join(kinds)}")
            if kinds[0] == "objects":
                gathered.append(list(sources))
                continue
            tensors = [source[1] if kinds[0] == "swap" else source for source in sources]
            if len({(tensor.numel(), tensor.dtype) for tensor in tensors}) > 1:
                raise RuntimeError(f"replicas have brought different tensors to a collective {kinds[0]}")
            for output, result in zip(outputs, _RESULTS[kinds[0]](sources), strict=True):
                output.copy_(result.view_as(output))
        return gathered


def _sums(sources: Sequence[Tensor]) -> list[Tensor]:
    total = sources[0].clone()
    for source in sources[1:]:
        total += source
    return [total] * len(sources)


def _parts(sources: Sequence[Tensor]) -> list[Tensor]:
    return list(_sums(sources)[0].view(len(sources), -1))


def _exchanged(sources: Sequence[Tensor]) -> list[Tensor]:
    parts = [source.view(len(sources), -1) for source in sources]
    return [torch.stack([part[rank] for part in parts]) for rank in range(len(sources))]


def _joined(sources: Sequence[Tensor]) -> list[Tensor]:
    return [torch.stack([source.reshape(-1) for source in sources])] * len(sources)


def _swapped(sources: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
    for rank, (other, _) in enumerate(sources):
        if sources[other][0] != rank:
            raise RuntimeError(f"replica {rank} swaps with {other}, which swaps with {sources[other][0]}")
    return [sources[other][1] for other, _ in sources]


_RESULTS: dict[str, Callable[[Sequence[Any]], list[Tensor]]] = {
    "all_reduce": _sums,
    "reduce_scatter": _parts,
    "all_to_all": _exchanged,
    "all_gather": _joined,
    "swap": _swapped,
}


class _Stopped(Exception):
    """End of a replica whose peer has failed."""


class _Work:
    """Handle of a collective that :meth:`LocalChannel.finish` has done."""

    def wait(self) -> None: ...


class LocalChannel(Channel):
    """Collectives of one replica of a :class:`Room`, counted as between processes; there are no smaller groups."""

    def __init__(self, room: Room, rank: int, group: object = None, shards: Sequence[Tensor] = ()) -> None:
        super().__init__(None, shards)
        self.room, self.rank, self.world = room, rank, room.world
        self._calls: list[Call] = []

    def finish(self) -> None:
        if self._calls:
            self.room.meet(self.rank, self._calls)
            self._calls = []
        super().finish()

    def gather(self, value: T) -> list[T]:
        gathered: list[T] = self.room.meet(self.rank, [("objects", None, value)])[0]
        return gathered

    @property
    def first(self) -> int:
        return 0

    def _count(self, kind: str, sent: int) -> None:
        super()._count(kind, sent)
        self.room.sent[self.rank][kind] += sent

    def _call(self, kind: str, output: Tensor, source: Any) -> _Work:
        self._calls.append((kind, output, source))
        return _Work()

    def _all_reduce(self, tensor: Tensor) -> _Work:
        return self._call("all_reduce", tensor, tensor)

    def _reduce_scatter(self, part: Tensor, buffer: Tensor) -> _Work:
        return self._call("reduce_scatter", part, buffer)

    def _all_to_all(self, output: Tensor, source: Tensor) -> _Work:
        return self._call("all_to_all", output, source)

    def _all_gather(self, output: Tensor, source: Tensor) -> _Work:
        return self._call("all_gather", output, source)

    def _swap(self, output: Tensor, source: Tensor, other: int) -> Sequence[_Work]:
        return [self._call("swap", output, (other, source))]
