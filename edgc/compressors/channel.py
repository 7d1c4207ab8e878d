"""Collectives of one reduction, asynchronous, with their bytes counted where they are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgc.lazy import Tensor, torch
from edgc.runtime.clock import Stopwatch, mark
from edgc.runtime.profiling import named


class Channel:
    """Collectives over a process group that are started now and finished later, in order.

    Every method hands its tensors over until :meth:`finish` returns. With one rank nothing is sent, and results are
    what the collective would give.

    Means of fp16 are divided before they are added, as DDP does it: the sum of two ranks' 40 000 is beyond fp16, their
    mean is not (:func:`before_sum`). Wider types have the range of fp32 and are divided afterwards.

    Args:
        group: None is the world.
        shards: flat buffers of which this rank needs only its own of ``world`` equal parts, if the gradients of the
            reduction lie in such buffers.

    Attributes:
        world: number of ranks.
        bytes: what this rank has sent so far, by the formula of the bandwidth-optimal (ring or direct) algorithm: of
            a tensor of n bytes, 2(W-1)/W n for an all-reduce, (W-1)/W n for a reduce-scatter and for an all-to-all
            (n: all destinations together), and (W-1) n for an all-gather (n: one rank's share).
        waited: time that :meth:`finish` took: communication that nothing hid.
    """

    def __init__(self, group: torch.distributed.ProcessGroup | None, shards: Sequence[Tensor] = ()) -> None:
        self.group = group
        self.shards = tuple(shards)
        self.world = torch.distributed.get_world_size(group) if torch.distributed.is_initialized() else 1
        self.rank = torch.distributed.get_rank(group) if torch.distributed.is_initialized() else 0
        self.bytes = 0
        self.waited = Stopwatch()
        self._pending: list[tuple[Any, Tensor | None]] = []  # with what is to become a mean once it is summed
        self._device = torch.device("cpu")

    @named("edgc::all_reduce")
    def mean_(self, tensor: Tensor) -> None:
        """All-reduce ``tensor``, contiguous and of a floating-point type, in place to its mean over the ranks."""
        if self.world == 1 or tensor.numel() == 0:
            return
        before_sum(tensor, self.world)
        self._start(
            torch.distributed.all_reduce(tensor, group=self.group, async_op=True), tensor, divide=True
        )
        self.bytes += all_reduce_bytes(_bytes(tensor), self.world)

    @named("edgc::reduce_scatter")
    def scatter_means(self, buffers: Sequence[Tensor]) -> None:
        """Reduce-scatter flat buffers: this rank's part of each becomes its mean, the other parts are undefined."""
        if self.world == 1:
            return
        for buffer in buffers:
            own = self.own_part(buffer)
            before_sum(buffer, self.world)
            work = torch.distributed.reduce_scatter_tensor(own, buffer, group=self.group, async_op=True)
            self._start(work, own, divide=True)
            self.bytes += (self.world - 1) * _bytes(buffer) // self.world

    def own_part(self, buffer: Tensor) -> Tensor:
        """This rank's part of a flat buffer that is cut into ``world`` equal parts."""
        return buffer.view(self.world, -1)[self.rank]

    @named("edgc::all_to_all")
    def all_to_all(self, output: Tensor, source: Tensor) -> None:
        """Part j of ``source``, cut along its first axis into ``world`` equal parts, becomes rank j's part of mine."""
        if self.world == 1:
            output.copy_(source)
            return
        self._start(
            torch.distributed.all_to_all_single(output, source, group=self.group, async_op=True), source
        )
        self.bytes += (self.world - 1) * _bytes(source) // self.world

    @named("edgc::all_gather")
    def all_gather(self, output: Tensor, source: Tensor) -> None:
        """``output`` becomes the ``source`` of every rank, in rank order, one after another along the first axis."""
        if self.world == 1:
            output.copy_(source.view_as(output))
            return
        self._start(
            torch.distributed.all_gather_into_tensor(output, source, group=self.group, async_op=True), source
        )
        self.bytes += (self.world - 1) * _bytes(source)

    def _start(self, work: Any, tensor: Tensor, divide: bool = False) -> None:
        self._pending.append((work, tensor if divide else None))
        self._device = tensor.device

    @named("edgc::wait")
    def finish(self) -> None:
        """Wait for everything that was started; on a GPU the current stream waits, not the caller.

        Raises:
            RuntimeError: what the backend raises when a peer is lost.
        """
        if not self._pending:
            return
        started = mark(self._device)
        pending, self._pending = self._pending, []
        for work, mean in pending:
            work.wait()
            if mean is not None:
                after_sum(mean, self.world)
        self.waited.add(started, mark(self._device))


def before_sum(tensor: Tensor, world: int) -> None:
    """Make ``tensor`` ready to be summed over ``world`` ranks: fp16 is divided by the next power of two, which rounds
    nothing but denormal numbers."""
    if tensor.dtype == torch.float16:
        tensor.mul_(1 / _power_above(world))


def after_sum(tensor: Tensor, world: int) -> None:
    """Make the mean of the sum over ``world`` ranks of what :func:`before_sum` has left."""
    if tensor.dtype != torch.float16:
        tensor.div_(world)
    elif world != _power_above(world):
        # Rounding of the sum must not carry a mean near the largest number over it.
        limit = torch.finfo(torch.float16).max
        mean = tensor.float().mul_(_power_above(world) / world).clamp_(-limit, limit)
        tensor.copy_(torch.where(tensor.isfinite(), mean, tensor.float()))


def _power_above(world: int) -> int:
    """The smallest power of two that is at least ``world``."""
    return 1 << (world - 1).bit_length()


def all_reduce_bytes(size: int, world: int) -> int:
    """Bytes that each of ``world`` ranks sends in a ring all-reduce of ``size`` bytes."""
    return 2 * (world - 1) * size // world


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
