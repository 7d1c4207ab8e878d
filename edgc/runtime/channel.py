"""Collectives of one reduction: their bytes, their times, and the names of their parts in traces.

Times are wall times of work on a device that never make the device wait: on a GPU a mark is an event in the current
stream, and the seconds between two marks are read when somebody asks for them.

In the traces of ``torch.profiler``, and in those of tools that listen to it, ``edgc::compress`` is what a reduction
does before its last wait for a collective, ``edgc::decompress`` what comes after it; ``edgc::all_reduce``,
``edgc::reduce_scatter``, ``edgc::all_to_all``, ``edgc::all_gather`` and ``edgc::swap`` start a collective, and
``edgc::wait`` waits for all that were started: on a GPU the stream does, and the host goes on at once. Buckets of DDP
and Megatron-Core are reduced in a thread of their own. Of other threads than its own torch's profiler shows only
kernels, unless it is told to take all of them::

    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=all_threads) as profiler:
        ...
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from edgc.lazy import Tensor, torch

T = TypeVar("T")

Mark: TypeAlias = "float | torch.cuda.Event"


def collective(name: str, older: str) -> Any:
    """torch's collective of this name, or of the one that it had before torch 2.13."""
    return getattr(torch.distributed, name, None) or getattr(torch.distributed, older)


def mark(device: torch.device) -> Mark:
    """Mark this moment: seconds on a CPU, an event in the current stream on a GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Seconds from one mark to another of the same device; waits until the GPU has reached ``end``."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@dataclass
class Stopwatch:
    """A sum of spans; on a GPU it stays unread until :attr:`seconds` is asked for."""

    total: float = 0.0
    spans: list[tuple[Mark, Mark]] = field(default_factory=list)

    def add(self, start: Mark, end: Mark) -> None:
        if isinstance(start, float) and isinstance(end, float):
            self.total += end - start
        else:
            self.spans.append((start, end))

    @property
    def seconds(self) -> float:
        self.total += sum(seconds_between(start, end) for start, end in self.spans)
        self.spans.clear()
        return self.total


_NOTHING = contextlib.nullcontext()


def traced() -> bool:
    """True if there is a profiler; also where this version of torch does not say so."""
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", True))


def span(name: str) -> contextlib.AbstractContextManager[object]:
    """Name work inside ``name`` in a trace. Without a profiler it does nothing: a range that nobody looks at takes
    15 us, and a step has hundreds of them."""
    return torch.autograd.profiler.record_function(name) if traced() else _NOTHING


class Channel:
    """Collectives over a process group that are started now and finished later, in order.

    Every method hands its tensors over until :meth:`finish` returns. With one rank nothing is sent, and results are
    what the collective would give.

    Means are divided before they are added, as DDP does it: the sum of two ranks' 40 000 is beyond fp16, their mean is
    not (:func:`before_sum`). A mean is finite where the numbers are; among a number of ranks that is no power of two,
    and in other types than fp16, where they are below the largest number of their type by its rounding.

    Args:
        group: None is the world.
        shards: flat buffers of which this rank needs only its own of ``world`` equal parts, if the gradients of the
            reduction lie in such buffers.

    Attributes:
        world: number of ranks.
        bytes: what this rank has sent so far, by the formula of the bandwidth-optimal (ring or direct) algorithm: of
            a tensor of n bytes, 2(W-1)/W n for an all-reduce, (W-1)/W n for a reduce-scatter and for an all-to-all
            (n: all destinations together), (W-1) n for an all-gather (n: one rank's share), and n for a swap.
        waited: time that :meth:`finish` took: communication that nothing hid.
    """

    def __init__(self, group: torch.distributed.ProcessGroup | None, shards: Sequence[Tensor] = ()) -> None:
        self.group, self.shards = group, tuple(shards)
        joined = torch.distributed.is_initialized()
        self.world = torch.distributed.get_world_size(group) if joined else 1
        self.rank = torch.distributed.get_rank(group) if joined else 0
        self.bytes = 0
        self.waited = Stopwatch()
        self._pending: list[tuple[Any, Tensor | None]] = []  # with what is to become a mean once it is summed
        self._device = torch.device("cpu")

    def mean_(self, tensor: Tensor) -> None:
        """All-reduce ``tensor``, contiguous and of a floating-point type, in place to its mean over the ranks."""
        if self.world == 1 or tensor.numel() == 0:
            return
        with span("edgc::all_reduce"):
            before_sum(tensor, self.world)
            self._start(self._all_reduce(tensor), tensor, divide=True)
        self._count("all_reduce", all_reduce_bytes(tensor.nbytes, self.world))

    def scatter_means(self, buffers: Sequence[Tensor]) -> None:
        """Reduce-scatter flat buffers: this rank's part of each becomes its mean, the other parts are undefined."""
        if self.world == 1:
            return
        with span("edgc::reduce_scatter"):
            for buffer in buffers:
                part = self.own_part(buffer)
                before_sum(buffer, self.world)
                self._start(self._reduce_scatter(part, buffer), part, divide=True)
                self._count("reduce_scatter", (self.world - 1) * buffer.nbytes // self.world)

    def own_part(self, buffer: Tensor) -> Tensor:
        """This rank's part of a flat buffer that is cut into ``world`` equal parts."""
        return buffer.view(self.world, -1)[self.rank]

    def all_to_all(self, output: Tensor, source: Tensor) -> None:
        """Exchange parts: part j of ``source``, cut along its first axis into ``world`` equal parts, goes to rank j."""
        if self.world == 1:
            output.copy_(source)
            return
        with span("edgc::all_to_all"):
            self._start(self._all_to_all(output, source), source)
        self._count("all_to_all", (self.world - 1) * source.nbytes // self.world)

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        """Gather the ``source`` of every rank in ``output``, in rank order, one after another along the first axis."""
        if self.world == 1:
            output.copy_(source.view_as(output))
            return
        with span("edgc::all_gather"):
            self._start(self._all_gather(output, source), source)
        self._count("all_gather", (self.world - 1) * source.nbytes)

    def swap(self, output: Tensor, source: Tensor, other: int) -> None:
        """Exchange tensors with the rank ``other`` of the group, which does so with this one; of this rank itself
        ``source`` is copied, and nothing is sent."""
        with span("edgc::swap"):
            for work in self._swap(output, source, other):
                self._start(work, source)
        self._count("swap", 0 if other == self.rank else source.nbytes)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank; pickled, and not counted."""
        from edgc.runtime.groups import gather_objects  # torch, which settings do without

        return gather_objects(value, self.group)

    @property
    def first(self) -> int:
        """Rank in the world of the first rank of the group, by which groups are told apart."""
        return min(torch.distributed.get_process_group_ranks(self.group or torch.distributed.group.WORLD))

    # What another way between replicas exchanges (edgc.runtime.local): each starts a collective and returns its handle.

    def _all_reduce(self, tensor: Tensor) -> Any:
        return torch.distributed.all_reduce(tensor, group=self.group, async_op=True)

    def _reduce_scatter(self, part: Tensor, buffer: Tensor) -> Any:
        start = collective("reduce_scatter_single", "reduce_scatter_tensor")
        return start(part, buffer, group=self.group, async_op=True)

    def _all_to_all(self, output: Tensor, source: Tensor) -> Any:
        return torch.distributed.all_to_all_single(output, source, group=self.group, async_op=True)

    def _all_gather(self, output: Tensor, source: Tensor) -> Any:
        start = collective("all_gather_single", "all_gather_into_tensor")
        # Flat, for gloo takes no [W, n] of [n].
        return start(output.view(-1), source.view(-1), group=self.group, async_op=True)

    def _swap(self, output: Tensor, source: Tensor, other: int) -> Sequence[Any]:
        if other == self.rank:
            output.copy_(source)
            return []
        operations = [
            torch.distributed.P2POp(operation, tensor, group=self.group, group_peer=other)
            for operation, tensor in ((torch.distributed.isend, source), (torch.distributed.irecv, output))
        ]
        works: Sequence[Any] = torch.distributed.batch_isend_irecv(operations)
        return works

    def _count(self, kind: str, sent: int) -> None:
        self.bytes += sent

    def _start(self, work: Any, tensor: Tensor, divide: bool = False) -> None:
        self._pending.append((work, tensor if divide else None))
        self._device = tensor.device

    def finish(self) -> None:
        """Wait for everything that was started; on a GPU the current stream waits, not the caller.

        Raises:
            RuntimeError: what the backend raises when a peer is lost.
        """
        if not self._pending:
            return
        started = mark(self._device)
        pending, self._pending = self._pending, []
        with span("edgc::wait"):
            for work, mean in pending:
                work.wait()
                if mean is not None:
                    after_sum(mean, self.world)
        self.waited.add(started, mark(self._device))


def before_sum(tensor: Tensor, world: int) -> None:
    """Make ``tensor`` ready to be summed over ``world`` ranks: divide it by the next power of two, which rounds nothing
    but denormal numbers."""
    tensor.mul_(1 / _power_above(world))


def after_sum(tensor: Tensor, world: int) -> None:
    """Make the mean of the sum over ``world`` ranks of what :func:`before_sum` has left: the same bits as the sum of
    what was there before, divided."""
    share = world / _power_above(world)
    if share == 1:
        return
    if tensor.dtype != torch.float16:
        tensor.div_(share)
        return
    # Rounding of the sum must not carry a mean near the largest number over it.
    limit = torch.finfo(torch.float16).max
    mean = tensor.float().mul_(1 / share).clamp_(-limit, limit)
    tensor.copy_(torch.where(tensor.isfinite(), mean, tensor.float()))


def _power_above(world: int) -> int:
    """The smallest power of two that is at least ``world``."""
    return 1 << (world - 1).bit_length()


def all_reduce_bytes(size: int, world: int) -> int:
    """Bytes that each of ``world`` ranks sends in a ring all-reduce of ``size`` bytes."""
    return 2 * (world - 1) * size // world
