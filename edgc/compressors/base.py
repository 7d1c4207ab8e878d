"""The contract that every compressor keeps.

What comes in: the local gradients of one data-parallel replica, as views into the communication buffer; any shape,
layout and floating-point type, the same names, shapes, types and order on every rank of the group.
What is in the buffer afterwards: the same approximation of their mean over the replicas, on every replica bit for bit.
What is kept: whatever was not sent, as error feedback, keyed by parameter name, so that
mean(buffer + kept) = mean(gradient + kept before).
Bytes are counted where a collective is called (:class:`~edgc.compressors.channel.Channel`), never from shapes.
How it fails: from finite input nothing non-finite comes out. If any replica's gradient is not finite, the buffer is
not finite on any replica, and a compressor that keeps state leaves its state as it was. With ``deferred`` on, no
reduction changes the state before :meth:`Compressor.settle` says so, for the reductions of a whole step together.
Where only a part of a mean is needed (:attr:`Gradient.needed`, :attr:`Channel.shards`), the rest of the buffer is
undefined.

A reduction is a generator that yields whenever it needs the collectives it has started to be finished. One driver runs
it straight through (:meth:`Compressor.reduce`); another keeps several buckets in flight (:mod:`edgc.ddp`). What a
rank sends, and in which order, depends on the calls alone and never on their timing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from edgc.checks import need
from edgc.compressors.channel import Channel
from edgc.errors import UserError
from edgc.lazy import Tensor, torch
from edgc.runtime.clock import Stopwatch, mark
from edgc.runtime.profiling import parts

Steps = Generator[None, None, None]


@dataclass(frozen=True)
class Gradient:
    """A named gradient of any shape; ``tensor`` is read and overwritten in place.

    ``needed`` is the range of its entries, in memory order, whose mean this rank needs; None is all of them. ``rank``
    stands for the call's where a low-rank method is to give this matrix one of its own; the same on every worker.
    """

    name: str
    tensor: Tensor
    needed: tuple[int, int] | None = None
    rank: int | None = None


@dataclass
class Statistics:
    """Sums over the gradients of one reduction; ``+`` adds two of them.

    Squared norms are of this replica's own tensors and cover what was compressed with a loss: ``gradient_sq`` of G,
    ``input_sq`` of M = G + E, ``error_sq`` of what this replica keeps; on a GPU they may be tensors, so that nobody
    waits for them. Stopwatches hold wall time on this rank, ``communicate`` only the part that nothing hid.
    ``skipped`` counts reductions that were given up because a gradient was not finite; also a tensor on a GPU.
    """

    bytes: int = 0
    compress: Stopwatch = field(default_factory=Stopwatch)
    communicate: Stopwatch = field(default_factory=Stopwatch)
    decompress: Stopwatch = field(default_factory=Stopwatch)
    gradient_sq: float | Tensor = 0.0
    input_sq: float | Tensor = 0.0
    error_sq: float | Tensor = 0.0
    skipped: int | Tensor = 0

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def seconds_compress(self) -> float:
        return self.compress.seconds

    @property
    def seconds_communicate(self) -> float:
        return self.communicate.seconds

    @property
    def seconds_decompress(self) -> float:
        return self.decompress.seconds

    @property
    def compressed(self) -> bool:
        """Whether anything was compressed with a loss."""
        return float(self.input_sq) > 0

    @property
    def worker_error(self) -> float | None:
        """The root of error_sq / input_sq, the share of its own M that this replica kept back; None if nothing was
        compressed. How far workers differ counts in it, which the error of their mean does not have
        (:mod:`edgc.measurement.mean_error`)."""
        return math.sqrt(float(self.error_sq) / float(self.input_sq)) if self.compressed else None

    @property
    def error_feedback_ratio(self) -> float | None:
        """The norm of the kept error over that of the gradient; None if nothing was compressed."""
        norm = float(self.gradient_sq)
        return math.sqrt(float(self.error_sq) / norm) if norm > 0 else None


class Compressor(ABC):
    """One method of averaging gradients over data-parallel replicas.

    Attributes:
        deferred: whether changes of state wait for :meth:`settle`; to be set before the first reduction. It costs the
            memory of a second error feedback and no pass over it.
    """

    deferred = False
    _changes: list[Callable[[], None]] | None = None

    @abstractmethod
    def steps(
        self, gradients: Sequence[Gradient], channel: Channel, rank: int | None, statistics: Statistics
    ) -> Steps:
        """The reduction as a generator; yields with collectives started, is resumed when they are finished.

        Args:
            gradients: at least one.
            channel: of this reduction alone.
            rank: of a low-rank approximation; ignored by methods that have none, except that None asks every
                method for the exact mean, error feedback included.
            statistics: norms and ``skipped`` are to be filled in.
        """

    def waits(self, rank: int | None) -> int:
        """How often :meth:`steps` yields with ``rank``, at most, in a group of several workers."""
        return 1

    def exchange(
        self, gradients: Sequence[Gradient], channel: Channel, rank: int | None
    ) -> Generator[None, None, Statistics]:
        """:meth:`steps` with its times taken; after each yield it waits for its collectives itself.

        Raises:
            ValueError: if ``rank`` is below 1.
        """
        if rank is not None and rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        statistics = Statistics()
        if not gradients:
            return statistics
        device = gradients[0].tensor.device
        if rank is None and channel.shards:
            steps = self.scattered(gradients, channel, statistics)
        else:
            steps = self.steps(gradients, channel, rank, statistics)
        sent = channel.bytes
        before, channel.waited = channel.waited, statistics.communicate
        started = mark(device)
        for _ in parts(steps, self.waits(rank)):
            statistics.compress.add(started, mark(device))
            yield
            channel.finish()
            started = mark(device)
        # What follows the last collective; a reduction without one has compressed nothing and sent nothing.
        statistics.decompress.add(started, mark(device))
        statistics.bytes = channel.bytes - sent
        channel.waited = before + statistics.communicate
        return statistics

    def reduce(self, gradients: Sequence[Gradient], channel: Channel, rank: int | None) -> Statistics:
        """Replace every gradient by (an approximation of) its mean over ``channel``, and wait for it."""
        exchange = self.exchange(gradients, channel, rank)
        while True:
            try:
                next(exchange)
            except StopIteration as end:
                statistics: Statistics = end.value
                return statistics

    def scattered(self, gradients: Sequence[Gradient], channel: Channel, statistics: Statistics) -> Steps:
        """The exact mean, as :meth:`steps` without a rank, but each rank gets only its part of ``channel.shards``,
        which the gradients are views of."""
        self._drain(gradients)
        channel.scatter_means(channel.shards)
        yield

    def _drain(self, gradients: Sequence[Gradient]) -> None:  # noqa: B027  (most keep nothing)
        """Add what error feedback holds of ``gradients`` to them, and forget it (see ``deferred``)."""

    @property
    def kept(self) -> Mapping[str, Tensor]:
        """Error feedback by parameter name, in the gradients' shapes; to be read only. Empty where there is none."""
        return {}

    def sent_sq(self, name: str) -> Tensor | None:
        """The squared norm (fp64) of the result of this gradient's last reduction, where that is known for nothing and
        the mean of what is kept is orthogonal to it; else None."""
        return None

    def rescale(self, factor: float) -> None:  # noqa: B027
        """Gradients come multiplied by ``factor`` from now on, as when a loss scale changes: state follows."""

    def _then(self, change: Callable[[], None]) -> None:
        """Change the state, now or when :meth:`settle` says so."""
        if not self.deferred:
            change()
        elif self._changes is None:
            self._changes = [change]
        else:
            self._changes.append(change)

    def settle(self, keep: bool) -> None:
        """Make the deferred changes of all reductions since the last call, or drop them as if these had not been."""
        changes, self._changes = self._changes, None
        if keep:
            for change in changes or ():
                change()

    def state_dict(self) -> dict[str, Any]:
        """What this replica must keep to go on exactly: error feedback, warm start."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of :meth:`state_dict`."""
        need(state, (), "compressor")
        if state:
            what = f"the saved state's compressor has {', '.join(sorted(state))}"
            raise UserError(what, fix=f"{type(self).__name__} keeps nothing: load a state of the same method")


def flat_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """One flat view of tensors that follow each other without a gap in one storage; None if they do not."""
    first = tensors[0]
    position = first.storage_offset()
    for tensor in tensors:
        same = (
            tensor.dtype == first.dtype
            and tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        )
        if not (same and tensor.is_contiguous() and tensor.storage_offset() == position):
            return None
        position += tensor.numel()
    return torch.as_strided(first, (position - first.storage_offset(),), (1,), first.storage_offset())
