"""The contract that every compressor keeps.

What comes in: the local gradients of one data-parallel replica, as views into the communication buffer; any shape,
layout and floating-point type, the same names, shapes, types and order on every rank of the group.
What is in the buffer afterwards: the same approximation of their mean over the replicas, on every replica bit for bit.
What is kept: whatever was not sent, as error feedback, keyed by parameter name, so that
mean(buffer + kept) = mean(gradient + kept before); under momentum correction a velocity stands for the gradient.
Bytes are counted where a collective is called (:class:`~edgc.runtime.channel.Channel`), never from shapes.
How it fails: from finite input nothing non-finite comes out, where the norm of every matrix, error feedback included,
is in the range of fp32; what fp32 rounds to zero is lost. Matrices of float64 are averaged as they are. If any
replica's gradient is not finite, the buffer is not finite on any replica, and a compressor that keeps state leaves its
state as it was. No reduction changes the state before :meth:`Compressor.settle` says so, for the reductions of a whole
step together, at the price of a second error feedback.
Where only a part of an exact mean is needed (:attr:`Channel.shards`), the rest of the buffer is undefined.

A reduction is a generator that yields whenever it needs the collectives it has started to be finished. One driver runs
it straight through (:meth:`Compressor.reduce`); another keeps several buckets in flight (:mod:`edgc.ddp`). What a
rank sends, and in which order, depends on the calls alone and never on their timing.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from edgc.checks import need
from edgc.errors import UserError
from edgc.lazy import Tensor, torch
from edgc.runtime.channel import Channel, Stopwatch, mark, span, traced
from edgc.runtime.device import host_decides

Steps = Generator[None, None, None]
_END = object()
# Squares of so many entries are added in fp32, their sums in fp64: relative error below 1e-6.
_SUM = 1 << 19
_SMALLEST, _LARGEST = 1e-24, 1e36  # outside this range squares may have left that of fp32
_FEW = 4096  # entries that are converted to fp64 at a time


@dataclass(frozen=True)
class Gradient:
    """A named gradient of any shape; ``tensor`` is read and overwritten in place.

    ``unused`` says that this rank's backward has not come by the parameter, so that the mean may be thrown away: what
    error feedback holds of it stays held, and this rank sends zeros. Ranks need not agree in it.
    """

    name: str
    tensor: Tensor
    unused: bool = False


@dataclass
class Statistics:
    """Sums over the gradients of one reduction, or of several.

    Squared norms are of this replica's own tensors and cover what was compressed with a loss: ``gradient_sq`` of G,
    ``input_sq`` of M = G + E, ``error_sq`` of what this replica keeps; on a GPU they may be tensors, so that nobody
    waits for them. Stopwatches hold wall time on this rank, ``communicate`` only the part that nothing hid.
    ``skipped`` counts reductions that were given up because a gradient was not finite; also a tensor on a GPU.
    ``dense_bytes``, of an engine's reductions, is what ``bytes`` would be without compression.
    """

    bytes: int = 0
    compress: Stopwatch = field(default_factory=Stopwatch)
    communicate: Stopwatch = field(default_factory=Stopwatch)
    decompress: Stopwatch = field(default_factory=Stopwatch)
    gradient_sq: float | Tensor = 0.0
    input_sq: float | Tensor = 0.0
    error_sq: float | Tensor = 0.0
    skipped: int | Tensor = 0
    dense_bytes: int = 0

    def unscale(self, scale: float) -> None:
        """Make the norms those of gradients that come multiplied by ``scale``."""
        if scale != 1:
            self.gradient_sq, self.input_sq, self.error_sq = (
                norm / scale**2 for norm in (self.gradient_sq, self.input_sq, self.error_sq)
            )

    def add(self, other: Statistics) -> None:
        """Take in what another reduction has done, which shares its stopwatches with this."""
        self.bytes += other.bytes
        self.add_norms(other.gradient_sq, other.input_sq, other.error_sq)
        self.skipped = self.skipped + other.skipped

    def add_norms(self, gradient_sq: float | Tensor, input_sq: float | Tensor, error_sq: float | Tensor) -> None:
        """Add squared norms of what was compressed together."""
        self.gradient_sq = self.gradient_sq + gradient_sq
        self.input_sq = self.input_sq + input_sq
        self.error_sq = self.error_sq + error_sq

    @property
    def compressed(self) -> bool:
        """True if anything was compressed with a loss."""
        return float(self.input_sq) > 0

    @property
    def lossy(self) -> bool:
        """:attr:`compressed`, without waiting for a GPU: a norm is there because something was compressed."""
        norm = self.input_sq
        return (isinstance(norm, torch.Tensor) and norm.is_cuda) or float(norm) > 0

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
    """One method of averaging gradients over data-parallel replicas."""

    has_rank = False  # whether it approximates at the rank that it is given
    _changes: list[Callable[[], object]] | None = None

    @abstractmethod
    def steps(self, gradients: Sequence[Gradient], channel: Channel, rank: int | None, statistics: Statistics) -> Steps:
        """The reduction as a generator; yields with collectives started, is resumed when they are finished.

        Args:
            gradients: at least one.
            channel: of this reduction alone.
            rank: of a low-rank approximation; ignored by methods that have none, except that None asks every
                method for the exact mean, error feedback included.
            statistics: norms and ``skipped`` are to be filled in.
        """

    def waits(self, rank: int | None) -> int:
        """Number of times that :meth:`steps` yields with ``rank``, at most, in a group of several workers."""
        return 1

    def exchange(
        self, gradients: Sequence[Gradient], channel: Channel, rank: int | None, statistics: Statistics
    ) -> Steps:
        """:meth:`steps` with its times taken; after each yield it waits for its collectives itself.

        Args:
            statistics: what this reduction has done is added to it when it ends.
        """
        if not gradients:
            return
        device = gradients[0].tensor.device
        own = Statistics(0, statistics.compress, statistics.communicate, statistics.decompress)
        if rank is None and channel.shards:
            steps = self.scattered(gradients, channel, own)
        else:
            steps = self.steps(gradients, channel, rank, own)
        # A reduction that turns out to wait less often, since it compresses nothing or has one worker only, has only
        # parts called edgc::compress.
        left = self.waits(rank) if traced() else 1
        sent, channel.waited = channel.bytes, own.communicate
        started = mark(device)
        while True:
            with span("edgc::compress" if left > 0 else "edgc::decompress"):
                ended = next(steps, _END) is _END
            if ended:
                break
            left -= 1
            own.compress.add(started, mark(device))
            yield
            channel.finish()
            started = mark(device)
        own.bytes = channel.bytes - sent
        statistics.add(own)
        # What follows the last collective; a reduction without one has compressed nothing and sent nothing.
        own.decompress.add(started, mark(device))

    def reduce(self, gradients: Sequence[Gradient], channel: Channel, rank: int | None) -> Statistics:
        """Replace every gradient by (an approximation of) its mean over ``channel``, a whole step by itself."""
        statistics = Statistics()
        for _ in self.exchange(gradients, channel, rank, statistics):
            pass
        self.settle(True)
        return statistics

    def scattered(self, gradients: Sequence[Gradient], channel: Channel, statistics: Statistics) -> Steps:
        """The exact mean, as :meth:`steps` without a rank, but each rank gets only its part of ``channel.shards``,
        which the gradients are views of."""
        self._drain(gradients)
        channel.scatter_means(channel.shards)
        yield

    def _drain(self, gradients: Sequence[Gradient]) -> None:  # noqa: B027
        """Add what error feedback holds of ``gradients`` to them, and forget it once that is settled."""

    @property
    def kept(self) -> Mapping[str, Tensor]:
        """Error feedback by parameter name, in the gradients' shapes; to be read only. Empty where there is none."""
        return {}

    def sent_sq(self, name: str) -> Tensor | None:
        """The squared norm (fp64) of the result of this gradient's last reduction, where that is known for nothing and
        the mean of what is kept is orthogonal to it; else None."""
        return None

    def take_back(self, name: str, gradient: Tensor) -> None:  # noqa: B027
        """Take ``gradient`` out of error feedback again if that of ``name``, which was unused, holds it: it was neither
        sent nor lost, for its owner still has it. To be called after :meth:`settle`."""

    def rescale(self, factor: float) -> None:  # noqa: B027
        """Gradients come multiplied by ``factor`` from now on, as when a loss scale changes: state follows."""

    def _then(self, change: Callable[[], object]) -> None:
        """Change the state when :meth:`settle` says so."""
        self._changes = self._changes or []
        self._changes.append(change)

    def settle(self, keep: bool) -> None:
        """Make the changes of all reductions since the last call, or drop them as if these had not been."""
        changes, self._changes = self._changes or [], None
        if keep:
            for change in changes:
                change()

    def state_dict(self) -> dict[str, Any]:
        """State that this replica must keep to go on exactly: error feedback, warm start."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of :meth:`state_dict`."""
        need(state, (), "compressor")
        if state:
            what = f"the saved state's compressor has {', '.join(sorted(state))}"
            raise UserError(what, fix=f"{type(self).__name__} keeps nothing: load a state of the same method")


def seeded(*parts: object) -> torch.Generator:
    """Random numbers of the CPU that depend on ``parts`` alone: the same on every worker."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def kept_of(kept: dict[str, Tensor], gradient: Gradient, what: str) -> Tensor:
    """Tensor of a gradient in ``kept``, moved to its device; ``what`` it is, for the error if the shapes differ."""
    found, tensor = kept[gradient.name], gradient.tensor
    if found.shape != tensor.shape:
        problem = f"{what} of {gradient.name} is {tuple(found.shape)}, its gradient {tuple(tensor.shape)}"
        raise UserError(problem, fix="load the compressor's state of this very model")
    kept[gradient.name] = found.to(tensor.device)
    return kept[gradient.name]


class KeepsErrors(Compressor):
    """A method with error feedback.

    Attributes:
        errors: what was not sent, by parameter name, in the gradients' shapes.
        held: gradients that error feedback took in whole in their last reduction, since they were unused, by name; with
            whether that reduction was kept.
        error_feedback: off only for ablations, and for methods that are unbiased without.
    """

    error_feedback: bool
    errors: dict[str, Tensor]
    held: dict[str, Tensor]

    @property
    def kept(self) -> Mapping[str, Tensor]:
        return self.errors

    def decay(self, factor: float) -> None:
        """Let so much of the error feedback live on."""
        for error in self.errors.values():
            error.mul_(factor)

    def rescale(self, factor: float) -> None:
        self.decay(factor)

    def take_back(self, name: str, gradient: Tensor) -> None:
        ok = self.held.pop(name, None)
        if ok is not None:
            self.errors[name].sub_(torch.where(ok, gradient, 0))

    @abstractmethod
    def compresses(self, tensor: Tensor, rank: int) -> bool:
        """True if a gradient like ``tensor`` is compressed with a loss at this rank."""

    def _holds(self, gradient: Gradient) -> bool:
        """True if all of a gradient is to be kept."""
        return gradient.unused and self.error_feedback

    def _owed(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Gradients with error feedback that is to be sent."""
        return [gradient for gradient in gradients if gradient.name in self.errors and not gradient.unused]

    def _drain(self, gradients: Sequence[Gradient]) -> None:
        owed = self._owed(gradients)
        self._forget(owed, self._add_errors(owed), torch.ones((), dtype=torch.bool, device="cpu"))

    def _add_errors(self, gradients: Sequence[Gradient]) -> list[Tensor | None]:
        """Add what is kept of ``gradients``, of each of them something; returns what is above the largest number of
        fp16, which has to stay."""
        rests: list[Tensor | None] = []
        for gradient in gradients:
            tensor, error = gradient.tensor, self._error(gradient)
            if tensor.dtype != torch.float16:
                tensor.add_(error)
                rests.append(None)
                continue
            whole = tensor.float().add_(error)
            bounded = within(whole.clone(), tensor.dtype)
            rests.append((whole - bounded).to(error.dtype))
            tensor.copy_(bounded.add_(whole * 0))  # a bound hides infinity, 0 times it does not
        return rests

    def _error(self, gradient: Gradient) -> Tensor:
        """Error feedback of a gradient, on its device: a state may have been loaded on another one."""
        return kept_of(self.errors, gradient, "error feedback")

    def _forget(self, gradients: Sequence[Gradient], rests: Sequence[Tensor | None], ok: Tensor) -> None:
        """Keep of ``gradients``, whose error feedback has been sent, the ``rests`` alone, if ``ok``."""
        for gradient, rest in zip(gradients, rests, strict=True):
            decides = host_decides(ok.device)
            if rest is not None and (not decides or rest.is_cuda or rest.any()):  # nobody waits for a GPU
                kept = rest if decides else torch.where(ok, rest, self._error(gradient))
                self._then(partial(self.errors.__setitem__, gradient.name, kept))
            elif decides:
                self._then(partial(self.errors.__delitem__, gradient.name))
            else:
                self._then(partial(self._error(gradient).masked_fill_, ok, 0))


def compressible(shape: Sequence[int], min_elements: int, bits: int = 32) -> bool:
    """True if a parameter of this shape is compressed at all: a matrix with at least ``min_elements`` entries, of so
    many bits. Whoever works in 64 wants all of them, and the range of them, which fp32 has not."""
    return len(shape) == 2 and min(shape) > 1 and shape[0] * shape[1] >= min_elements and bits < 64


def mean_bits(matrices: Iterable[tuple[Sequence[int], int]]) -> float:
    """Mean bits of an entry of matrices of these shapes and bits; 32 without any."""
    entries = bits = 0
    for (rows, columns), each in matrices:
        entries, bits = entries + rows * columns, bits + rows * columns * each
    return bits / entries if entries else 32


def square_sum(vector: Tensor) -> float:
    """The squared norm of a flat fp32 tensor on a CPU."""
    total = 0.0
    for start in range(0, vector.numel(), _SUM):
        part = vector[start : start + _SUM]
        value = float(torch.dot(part, part))
        total += value if _SMALLEST < value < _LARGEST else _careful_sum(part)
    return total


def _careful_sum(vector: Tensor) -> float:
    if not vector.any():
        return 0.0
    return sum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in vector.split(_FEW))


def square_sums(batches: Sequence[Tensor]) -> list[Tensor]:
    """The squared norm of every matrix of every batch [B, m, n], each contiguous or the transpose of a contiguous one:
    [B] in fp64; on a GPU launched once, and added in fp64 without being copied to it first."""
    if host_decides(batches[0].device):
        sums = [[square_sum((x if x.is_contiguous() else x.mT).reshape(-1)) for x in batch] for batch in batches]
        return [torch.tensor(each, dtype=torch.float64, device="cpu") for each in sums]
    norms = torch._foreach_norm([matrix for batch in batches for matrix in batch], 2, dtype=torch.float64)
    return list(torch.stack(norms).square().split([len(batch) for batch in batches]))


def finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """True, a 0-dim tensor, if every entry is finite; the same on every worker for messages that were averaged.

    Args:
        device: of all of them, and of the answer where there are none: what masks must lie beside what it masks.
    """
    ends = [end for tensor in tensors if tensor.numel() for end in torch.aminmax(tensor)]
    if not ends:
        return torch.ones((), dtype=torch.bool, device=device)
    alike = all(end.dtype == ends[0].dtype for end in ends)
    return torch.stack(ends if alike else [end.double() for end in ends]).isfinite().all()


def matrix_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape in which a parameter is compressed: of more than two dimensions the first one by the rest."""
    return tuple(shape) if len(shape) <= 2 else (shape[0], math.prod(shape[1:]))


def clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of every tensor."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def within(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 ``x``, clamped in place to the largest values of ``dtype``."""
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return x.clamp_(-limit, limit)
