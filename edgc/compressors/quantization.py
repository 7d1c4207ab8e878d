"""Block quantisation to 8, 7, 6, 5, 4, 2 or 1 bits (:class:`Blocks`), and the mean of quantised vectors.

Like a ring all-reduce :class:`QuantisedMean` moves every entry twice, (W-1)/W of a vector each way, but in the bits of
the quantiser: quantise, all-to-all, average, quantise again, all-gather.

A block of ``size`` consecutive entries shares one step s; an entry x becomes the nearest level to x/s:

======  =============  ====================================================================================
bits    levels         step
======  =============  ====================================================================================
8       -127 ... 127   amax / 127
7       -63 ... 63     amax / 63
6       -31 ... 31     amax / 31
5       -15 ... 15     amax / 15
4       -7 ... 7       f amax / 7, with the f of 1, .9, ..., .5 that has the least squared error
2       -1, 0, 1       f amax, likewise
1       -1, 1          mean of |x|
======  =============  ====================================================================================

The step is sent as bfloat16: the exponents of fp32 in half its bytes. Levels are multiples of the rounded step, so
its rounding is part of the quantisation and not an error on top, and level times step is exact in fp32. Steps below
2**-117 are sent as zero, steps whose highest level would not be finite are clamped; error feedback gets the rest.
Where an entry is not finite, all blocks of its group come out as NaN.
Stochastic rounding is that of QSGD (Alistarh et al., NeurIPS 2017), per block and with f = 1: the result is x on
average, down to a step of 2**-117.

A message is the steps of all blocks, then the levels. Word (g, i) holds the levels of entry i of all blocks of group g,
as balanced digits to the base 2**bits of a signed number (for 1 bit: as bits). Groups and words are the smallest that
leave no bit unused:

======  =====  =====  =====  =====  =====  =====  =====
bits    8      7      6      5      4      2      1
======  =====  =====  =====  =====  =====  =====  =====
blocks  1      8      4      8      2      4      8
bytes   1      7      3      5      1      1      1
======  =====  =====  =====  =====  =====  =====  =====

The words of a group are sent lowest bytes first: all their first bytes, then all their second ones, and so on.
"""

from __future__ import annotations

import copy
import math
import os
import threading
import weakref
from types import ModuleType
from typing import Protocol

from edgc.compressors.base import Steps
from edgc.compressors.kernels import kernels_for
from edgc.lazy import Tensor, torch
from edgc.runtime.channel import Channel
from edgc.runtime.device import host_decides

FACTORS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
LEVELS = {8: 127, 7: 63, 6: 31, 5: 15, 4: 7, 2: 1, 1: 1}
# Entries in work at a time: on a CPU few enough for its last cache, enough that starting an operation costs little.
_CHUNK_PER_THREAD, _CHUNK_ON_GPU = 1 << 18, 1 << 22


class Quantiser(Protocol):
    """Maker of messages from flat fp32 vectors, by entries or blocks of them.

    Its methods are those of :class:`Blocks`.

    Attributes:
        group: entries that cannot be cut: messages are of whole groups.
        align: entries that share something, which no two matrices are to share.
        stochastic: whether it draws: on each worker on its own.
    """

    group: int
    align: int
    stochastic: bool

    def kernels(self, device: torch.device) -> ModuleType | None: ...

    def bytes(self, elements: int) -> int: ...

    def pack(
        self, x: Tensor, out: Tensor, *, residual: Tensor | None = None, generator: torch.Generator | None = None
    ) -> None: ...

    def unpack(self, message: Tensor, out: Tensor, *, weight: float = 1.0, add: bool = False) -> None: ...

    def finite(self, message: Tensor) -> Tensor: ...


class QuantisedMean:
    """Buffers of one mean of quantised vectors; reuse them for vectors of the same length, one mean at a time.

    Args:
        elements: length of the vectors.
        world: number of ranks.
        blocks: used for both roundings.
    """

    def __init__(self, elements: int, world: int, blocks: Quantiser, device: torch.device) -> None:
        self.elements, self.world, self.blocks = elements, world, blocks
        self.shard = -(-elements // (world * blocks.group)) * blocks.group
        self._sent, self._received = (
            torch.empty((world, blocks.bytes(self.shard)), dtype=torch.uint8, device=device) for _ in range(2)
        )
        self._sum = torch.empty(self.shard, dtype=torch.float32, device=device)

    def steps(
        self, vector: Tensor, channel: Channel, residual: Tensor | None, generator: torch.Generator | None = None
    ) -> Steps:
        """Quantise, exchange shards, average them, quantise the mean, gather it; then :meth:`unpack` has it.

        Args:
            vector: this rank's, flat, contiguous, fp32; at least one entry; read at the start only.
            channel: with the ``world`` given above, of at least two ranks.
            residual: becomes what this rank did not get across; may be ``vector`` itself. Every entry has one rank
                that owns it: it rounds the mean once more and keeps that error times ``world``, so that the mean
                of (result + residual) is the mean of the vectors.
            generator: of stochastic rounding, this rank's own.
        """
        if kernels := self.blocks.kernels(vector.device):
            kernels.pack(self.blocks, vector, self._sent, residual)
        for rank, message in enumerate(() if kernels else self._sent):
            kept = None if residual is None else self._piece(residual, rank)
            self.blocks.pack(self._piece(vector, rank), message, residual=kept, generator=generator)
        channel.all_to_all(self._received, self._sent)
        yield
        mine = self._piece(vector if residual is None else residual, channel.rank)
        mean = self._sum[: mine.numel()]
        if kernels and mean.numel():
            kernels.unpack(self.blocks, self._received, mean, weight=1 / self.world, summed=True)
        for rank, message in enumerate(() if kernels else self._received):
            # Weighted before they are added: the sum of the ranks could overflow.
            self.blocks.unpack(message, mean, weight=1 / self.world, add=rank > 0)
        message = self._sent[:1]
        self.blocks.pack(mean, message[0], residual=mean, generator=generator)
        if residual is not None:
            mine.add_(mean, alpha=self.world)
        channel.all_gather(self._received, message)
        yield

    def finite(self) -> Tensor:
        """True, a 0-dim tensor, if the result is finite; the same on every rank."""
        return torch.stack([self.blocks.finite(message) for message in self._received]).all()

    def unpack(self, out: Tensor) -> None:
        """``out``, flat fp32, becomes the result, the same bits on every rank."""
        if kernels := self.blocks.kernels(out.device):
            kernels.unpack(self.blocks, self._received, out)
        for rank, message in enumerate(() if kernels else self._received):
            self.blocks.unpack(message, self._piece(out, rank))

    def _piece(self, vector: Tensor, rank: int) -> Tensor:
        return vector[rank * self.shard : (rank + 1) * self.shard]


class Blocks:
    """Quantiser of flat fp32 vectors. Its scratch, of fixed size, is one for all quantisers that a thread uses.

    On a GPU a kernel does it in one launch and without scratch, where it can (:mod:`edgc.compressors.kernels`).

    Args:
        bits: 8, 7, 6, 5, 4, 2 or 1.
        stochastic: round at random so that the result is x on average, instead of to the nearest; not with 1 bit.
        levels: the highest, if it is not that of whole numbers of so many bits.
    """

    size = align = 64  # entries that share a step
    smallest_step = 2.0**-117
    has_kernels = True

    def __init__(self, bits: int, *, stochastic: bool = False, levels: int = 0) -> None:
        self.bits, self.stochastic = bits, stochastic
        self.levels = levels or LEVELS[bits]
        self.width = bits // math.gcd(bits, 8)  # bytes of a word
        self.per_word = 8 // math.gcd(bits, 8)  # levels in it, blocks of a group
        self.group = self.size * self.per_word
        self._word = torch.int8 if self.width == 1 else torch.int32 if self.width <= 4 else torch.int64
        # The largest bfloat16 (8 significant bits) whose product with the highest level is finite.
        mantissa, exponent = math.frexp(torch.finfo(torch.float32).max / self.levels)
        self.largest_step = math.ldexp(math.floor(mantissa * 256), exponent - 8)
        self._used: dict[torch.device, Scratch] = {}  # so that it lives as long as somebody may want it again

    def bytes(self, elements: int) -> int:
        """Length of the message of so many entries; they are padded to whole groups of blocks."""
        return -(-elements // self.group) * (2 * self.per_word + self.size * self.width)

    def pack(
        self, x: Tensor, out: Tensor, *, residual: Tensor | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Quantise ``x`` into the message ``out``.

        Args:
            x: flat, contiguous, fp32.
            out: uint8, contiguous, of ``bytes(n)`` for some n of at least ``x.numel()``; the rest becomes zeros.
            residual: becomes what did not get across, x minus the unpacked message; may be ``x`` itself.
            generator: of stochastic rounding.
        """
        if not x.numel():
            # Of a short vector only the first ranks have a part.
            out.zero_()
        elif kernels := self.kernels(x.device):
            kernels.pack(self, x, out[None], residual)
        else:
            self.pack_by_torch(x, out, residual, generator)

    def pack_by_torch(
        self, x: Tensor, out: Tensor, residual: Tensor | None, generator: torch.Generator | None = None
    ) -> None:
        """:meth:`pack` without a kernel."""
        steps, codes = self._views(out)
        whole, total = self._scratch(x.device), x.numel()
        for first in range(0, len(steps), whole.blocks):
            begin, scratch = first * self.size, whole.cut(len(steps) - first)
            end = min(begin + scratch.blocks * self.size, total)
            group = first // self.per_word
            if end <= begin:
                steps[first:].zero_()
                codes[group:].zero_()
                return
            part = x[begin:end]
            full = end - begin == scratch.blocks * self.size
            if not full:
                padded = scratch.padded.view(-1)
                padded[: end - begin].copy_(part)
                padded[end - begin :].zero_()
                part = padded
            blocks = part.view(-1, self.size)
            self._choose_steps(blocks, scratch)
            # The receiver multiplies by the rounded step, so from here on it is the step.
            sent = steps[first : first + scratch.blocks]
            scratch.step.copy_(sent.copy_(scratch.step))
            self._choose_levels(blocks, scratch, generator)
            self._fold(codes[group : group + len(scratch.folded)], scratch)
            if residual is not None:
                missed = residual[begin:end]
                result = missed.view(-1, self.size) if full else blocks
                torch.addcmul(blocks, scratch.levels, scratch.step[:, None], value=-1, out=result)
                if not full:
                    missed.copy_(part[: end - begin])

    def unpack(self, message: Tensor, out: Tensor, *, weight: float = 1.0, add: bool = False) -> None:
        """``out``, flat, contiguous, fp32, as long as what was packed, becomes ``weight`` times it, or gains that."""
        if not out.numel():
            return
        if kernels := self.kernels(out.device):
            kernels.unpack(self, message[None], out, weight=weight, add=add)
        else:
            self.unpack_by_torch(message, out, weight, add)

    def unpack_by_torch(self, message: Tensor, out: Tensor, weight: float, add: bool) -> None:
        """:meth:`unpack` without a kernel."""
        steps, codes = self._views(message)
        whole, total = self._scratch(out.device), out.numel()
        for begin in range(0, total, whole.blocks * self.size):
            first, group = begin // self.size, begin // self.group
            scratch = whole.cut(len(steps) - first)
            step, levels = scratch.step.copy_(steps[first : first + scratch.blocks]), scratch.levels
            if weight != 1:
                step.mul_(weight)
            self._unfold(codes[group : group + len(scratch.folded)], scratch)
            target = out[begin : begin + scratch.blocks * self.size]
            if target.numel() < scratch.blocks * self.size:
                values = levels.mul_(step[:, None]).view(-1)[: target.numel()]
                target.add_(values) if add else target.copy_(values)
            elif add:
                target.view(-1, self.size).addcmul_(levels, step[:, None])
            else:
                torch.mul(levels, step[:, None], out=target.view(-1, self.size))

    def finite(self, message: Tensor) -> Tensor:
        """True, a 0-dim tensor, if everything in a message is finite; it takes only the steps to know."""
        return self._views(message)[0].amax().isfinite()

    def kernels(self, device: torch.device) -> ModuleType | None:
        """The kernels that quantise on a device in place of torch's operations, if any."""
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return None
        return kernels_for(self, device)

    def _views(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """The steps of a message (bfloat16, one a block) and the bytes of its words (int8, groups x width x size)."""
        groups = message.numel() // (2 * self.per_word + self.size * self.width)
        cut = 2 * self.per_word * groups
        return message[:cut].view(torch.bfloat16), message[cut:].view(torch.int8).view(groups, self.width, self.size)

    def _choose_steps(self, blocks: Tensor, scratch: Scratch) -> None:
        """The step of every block, not yet rounded to what is sent."""
        magnitude, step = torch.abs(blocks, out=scratch.magnitude), scratch.step
        if self.bits == 1:
            # Divided before they are added: the sum itself could overflow.
            torch.mv(magnitude.mul_(1 / self.size), scratch.ones, out=step)
        else:
            torch.amax(magnitude, dim=1, out=step)
        # Zero, or NaN for blocks that are not finite and those that share their words.
        broken = torch.sub(step, step, out=scratch.broken).view(-1, self.per_word)
        torch.sum(broken, dim=1, out=scratch.spoiled)
        if self.stochastic:
            # Rounded up, or the largest entry might lie beyond the highest level.
            step.mul_((1 + 2**-7) / self.levels)
        else:
            if self.bits in (4, 2):
                self._best_factors(scratch)
                step.mul_(scratch.factor)
            step.mul_(1 / self.levels)
        torch.threshold_(step, self.smallest_step, 0)
        step.clamp_(max=self.largest_step).view(-1, self.per_word).add_(scratch.spoiled[:, None])

    def _best_factors(self, scratch: Scratch) -> None:
        """``scratch.factor`` becomes the f of every block with the least squared error.

        Begins with the magnitudes of the entries, which it overwrites, and with their maximum in ``scratch.step``.
        """
        inverse, error, least, work = scratch.inverse, scratch.error, scratch.least, scratch.levels
        on_cpu = host_decides(least.device)
        torch.reciprocal(scratch.step, out=inverse).mul_(self.levels).nan_to_num_(0, 0, 0)
        scaled = scratch.magnitude.mul_(inverse[:, None])
        scratch.factor.fill_(1)
        for f in FACTORS:
            if self.levels == 1:
                # Up to what f does not change: that of all zeros, less 2 f sum(relu(scaled - f / 2)).
                torch.clamp(scaled, min=f / 2, out=work)
                torch.mv(work, scratch.ones, out=error)
                error.sub_(self.size * f / 2).mul_(-f)
            elif f == 1:
                torch.round(scaled, out=work)
                torch.mv(work.sub_(scaled).square_(), scratch.ones, out=error)
            else:
                # The maximum alone is off by levels (1 - f). Once that is more than any block's error, f is too
                # small, and so are the rest; a GPU would have to wait for the answer.
                if on_cpu and float(least.amax()) <= (self.levels * (1 - f)) ** 2:
                    break
                torch.mul(scaled, 1 / f, out=work).round_().clamp_(max=self.levels)
                torch.sub(scaled, work, alpha=f, out=work)
                torch.mv(work.square_(), scratch.ones, out=error)
            if f == 1:
                least.copy_(error)
            else:
                scratch.factor.masked_fill_(torch.lt(error, least, out=scratch.better), f)
                torch.minimum(error, least, out=least)

    def _choose_levels(self, blocks: Tensor, scratch: Scratch, generator: torch.Generator | None) -> None:
        """The levels as floats; under a step of zero or NaN they do not matter."""
        levels = scratch.levels
        if self.bits == 1:
            torch.ge(blocks, 0, out=levels).mul_(2).sub_(1)
            return
        inverse = torch.reciprocal(scratch.step, out=scratch.inverse).nan_to_num_(0, 0, 0)
        if self.stochastic:
            levels.uniform_(generator=generator).addcmul_(blocks, inverse[:, None]).floor_()
        else:
            torch.mul(blocks, inverse[:, None], out=levels).round_()
        levels.clamp_(-self.levels, self.levels)

    def _fold(self, codes: Tensor, scratch: Scratch) -> None:
        """Levels to words: sums of the levels of a group's blocks, each times a power of two, are whole and fit."""
        if self.bits == 8:
            codes[:, 0].copy_(scratch.levels)
            return
        digits, folded = scratch.levels.view(-1, self.per_word, self.size), scratch.folded
        if self.width > 1:
            word, digit = scratch.rest, scratch.digit
            word.copy_(digits[:, 0])
            for place in range(1, self.per_word):
                # Not in fp32, which has 24 bits.
                word.add_(digit.copy_(digits[:, place]), alpha=1 << place * self.bits)
            for place in range(self.width):
                codes[:, place].copy_(torch.bitwise_right_shift(word, 8 * place, out=digit))
            return
        if self.bits == 1:
            # -1 and 1 as bits 0 and 1: half the sum of 2**k times them, less a half, is that byte less 128.
            torch.mul(digits[:, 0], 0.5, out=folded).sub_(0.5)
        else:
            folded.copy_(digits[:, 0])
        for place in range(1, self.per_word):
            folded.add_(digits[:, place], alpha=2.0 ** (place * self.bits - (self.bits == 1)))
        codes[:, 0].copy_(folded)

    def _unfold(self, codes: Tensor, scratch: Scratch) -> None:
        """Words to levels, the inverse of :meth:`_fold`."""
        levels = scratch.levels
        if self.bits == 8:
            levels.copy_(codes[:, 0])
            return
        digits, rest, digit = levels.view(-1, self.per_word, self.size), scratch.rest, scratch.digit
        if self.bits == 1:
            torch.bitwise_xor(codes[:, 0], -128, out=rest)
            for place in range(8):
                torch.bitwise_right_shift(rest, place, out=digit).bitwise_and_(1)
                digits[:, place].copy_(digit)
            levels.mul_(2).sub_(1)
            return
        # The highest byte has the sign.
        rest.copy_(codes[:, -1])
        for place in reversed(range(self.width - 1)):
            rest.bitwise_left_shift_(8).add_(digit.copy_(codes.view(torch.uint8)[:, place]))
        half = 1 << (self.bits - 1)
        for place in range(self.per_word - 1):
            # The lowest digit is what is left over the nearest multiple of 2**bits.
            torch.add(rest, half, out=digit).bitwise_right_shift_(self.bits)
            digits[:, place].copy_(rest.sub_(digit, alpha=1 << self.bits))
            rest, digit = digit, rest
        digits[:, -1].copy_(rest)

    def _scratch(self, device: torch.device) -> Scratch:
        chunk = _CHUNK_PER_THREAD * torch.get_num_threads() if device.type == "cpu" else _CHUNK_ON_GPU
        scratch = Scratch.shared(max(1, chunk // self.group), self.per_word, self.size, self._word, device)
        self._used[device] = scratch
        return scratch


_OF_GROUPS = ("folded", "spoiled", "rest", "digit")
_own = threading.local()  # what a thread has shared; it goes with its last user


class Scratch:
    """Buffers for so many groups of blocks in work; the first axis counts blocks, or groups where it says so."""

    def __init__(self, groups: int, per_word: int, size: int, word: torch.dtype, device: torch.device) -> None:
        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.blocks = blocks = groups * per_word
        self.per_word = per_word
        self.padded, self.magnitude, self.levels = (buffer(blocks, size) for _ in range(3))
        self.step, self.inverse, self.error, self.least, self.factor, self.broken = (buffer(blocks) for _ in range(6))
        self.better = buffer(blocks, dtype=torch.bool)
        self.folded, self.spoiled = buffer(groups, size), buffer(groups)
        self.rest, self.digit = buffer(groups, size, dtype=word), buffer(groups, size, dtype=word)
        self.ones = buffer(size).fill_(1)  # entries of a block
        self.cuts: dict[int, Scratch] = {}  # made so far, by their blocks

    @classmethod
    def shared(cls, groups: int, per_word: int, size: int, word: torch.dtype, device: torch.device) -> Scratch:
        """The one scratch of this size, device and thread, on a GPU of its current stream too.

        Two threads, or two streams, may be at work at the same time. Within one, reductions take turns, but only
        where they wait for a collective: whoever uses the scratch is done with it, and with what is in it, before.
        """
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
        key = (groups, per_word, size, word, device, stream)
        every = vars(_own).setdefault("scratch", weakref.WeakValueDictionary())
        scratch: Scratch | None = every.get(key)
        if scratch is None:
            scratch = every[key] = cls(groups, per_word, size, word, device)
        return scratch

    def cut(self, blocks: int) -> Scratch:
        """The part of it for at most so many blocks, whole groups of them."""
        if blocks >= self.blocks:
            return self
        if blocks not in self.cuts:
            part = self.cuts[blocks] = copy.copy(self)
            part.blocks, part.cuts = blocks, {}
            for name, tensor in vars(self).items():
                if isinstance(tensor, torch.Tensor) and name != "ones":
                    count = blocks // self.per_word if name in _OF_GROUPS else blocks
                    setattr(part, name, tensor[:count])
        return self.cuts[blocks]
