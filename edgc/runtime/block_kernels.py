"""The work of :class:`edgc.compressors.quantization.Blocks` in one launch: choose steps, round, pack and keep what was
not sent; unpack, weigh and add up.

Written in Triton, which comes with torch's builds for CUDA. An instance of a kernel does some groups of blocks; one
launch does all matrices that lie in a vector, and the messages to all ranks. Numbers are rounded one by one, as torch
does it (no products fused with sums, true divisions, ties to even), so messages are torch's, bit for bit; only sums
over the entries of a block may be rounded in another order: the step of 1 bit, and in 4 and 2 bits the choice between
two steps of as good as the same error.

To be imported only where there is a ``triton``; with ``TRITON_INTERPRET=1`` set before that it works on CPU tensors.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from edgc.compressors.quantization import Blocks

_ENTRIES = 2048  # of an instance
_SIZES = ["total", "groups", "of_message", "int16s", "int8s", "weight"]  # a kernel is compiled once for all of them


@triton.jit
def _whole(x):
    """The nearest whole number, of two the even one, where |x| < 2^22: sums beyond 2^23 have no room for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _inverse(step, times):
    """``times`` / step, and zero where that is not finite."""
    found = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step) * times
    return tl.where(tl.abs(found) < float("inf"), found, 0.0)


@triton.jit
def _error(scaled, f: tl.constexpr, LEVELS: tl.constexpr, SIZE: tl.constexpr):
    """The squared error of magnitudes in units of the step, under f; with one level less what f does not change."""
    if LEVELS == 1:
        return (tl.sum(tl.maximum(scaled, f / 2), axis=2) - SIZE * f / 2) * -f
    else:
        off = scaled - f * tl.minimum(_whole(scaled * (1 / f)), LEVELS)
        return tl.sum(off * off, axis=2)


@triton.jit
def _best_factor(magnitude, amax, LEVELS: tl.constexpr, SIZE: tl.constexpr):
    """The f of 1, .9, ..., .5 with the least squared error, for every block."""
    scaled = magnitude * _inverse(amax, LEVELS)[:, :, None]
    factor, least = tl.full(amax.shape, 1.0, tl.float32), _error(scaled, 1.0, LEVELS, SIZE)
    for i in tl.static_range(1, 6):
        error = _error(scaled, (10 - i) / 10, LEVELS, SIZE)
        factor = tl.where(error < least, (10 - i) / 10, factor)
        least = tl.minimum(error, least)
    return factor


@triton.jit(do_not_specialize=_SIZES)
def _pack(
    x,
    steps,
    codes,
    residual,
    total,
    groups,
    of_message,
    int16s,
    int8s,
    KEEPS: tl.constexpr,
    BITS: tl.constexpr,
    LEVELS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    PER_WORD: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    place, entry, inside = tl.arange(0, PER_WORD), tl.arange(0, SIZE), group < groups
    message, local = group // of_message, group % of_message
    at = (group[:, None, None] * PER_WORD + place[None, :, None]) * SIZE + entry[None, None, :]
    values = tl.load(x + at, mask=at < total, other=0.0)
    magnitude = tl.abs(values)
    if BITS == 1:
        step = tl.sum(magnitude * (1 / SIZE), axis=2)
    else:
        step = tl.max(magnitude, axis=2)
    if (BITS == 4) or (BITS == 2):
        step = step * _best_factor(magnitude, step, LEVELS, SIZE)
    step = step * (1 / LEVELS)
    step = tl.minimum(tl.where(step > SMALLEST, step, 0.0), LARGEST)
    # To bfloat16, ties to even; NaN, for the whole group, where an entry is not finite.
    raw = step.to(tl.int32, bitcast=True)
    rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
    broken = tl.sum(tl.sum(values - values, axis=2), axis=1)
    rounded = tl.where((broken == 0)[:, None], rounded, 0x7FC0)
    there = message * int16s + local * PER_WORD
    tl.store(steps + there[:, None] + place[None, :], rounded.to(tl.int16), mask=inside[:, None])
    step = (rounded << 16).to(tl.float32, bitcast=True)

    if BITS == 1:
        levels = tl.where(values >= 0, 1.0, -1.0)
        digits = (values >= 0).to(tl.int32)
    else:
        levels = _whole(values * _inverse(step, 1.0)[:, :, None])
        levels = tl.minimum(tl.maximum(levels, -LEVELS), LEVELS)
        digits = tl.where((broken == 0)[:, None, None], levels, 0.0).to(tl.int32)
    if WIDTH > 4:
        digits = digits.to(tl.int64)
    word = tl.sum(digits << (place * BITS)[None, :, None], axis=1)
    if BITS == 1:
        word -= 128
    there = message * int8s + 2 * PER_WORD * of_message + local * (WIDTH * SIZE)
    for byte in tl.static_range(WIDTH):
        where = codes + there[:, None] + byte * SIZE + entry[None, :]
        tl.store(where, (word >> (8 * byte)).to(tl.int8), mask=inside[:, None])
    if KEEPS:
        tl.store(residual + at, values - levels * step[:, :, None], mask=at < total)


@triton.jit(do_not_specialize=_SIZES)
def _unpack(
    out,
    steps,
    codes,
    weight,
    total,
    groups,
    of_message,
    int16s,
    int8s,
    COUNT: tl.constexpr,
    ADDS: tl.constexpr,
    BITS: tl.constexpr,
    PER_WORD: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    place, entry, inside = tl.arange(0, PER_WORD), tl.arange(0, SIZE), group < groups
    message, local = group // of_message, group % of_message
    at = (group[:, None, None] * PER_WORD + place[None, :, None]) * SIZE + entry[None, None, :]
    if ADDS:
        values = tl.load(out + at, mask=at < total, other=0.0)
    else:
        values = tl.zeros((GROUPS, PER_WORD, SIZE), tl.float32)
    # Half of the base added to every digit makes all of them positive.
    BASE: tl.constexpr = 1 << BITS
    OFFSET: tl.constexpr = 128 if BITS == 1 else BASE // 2 * ((1 << (BITS * PER_WORD)) - 1) // (BASE - 1)
    for i in range(COUNT):
        there = (message + i) * int16s + local * PER_WORD
        rounded = tl.load(steps + there[:, None] + place[None, :], mask=inside[:, None], other=0)
        step = (rounded.to(tl.int32) << 16).to(tl.float32, bitcast=True) * weight
        there = (message + i) * int8s + 2 * PER_WORD * of_message + local * (WIDTH * SIZE)
        word = tl.zeros((GROUPS, SIZE), tl.int64 if WIDTH > 4 else tl.int32) + OFFSET
        for byte in tl.static_range(WIDTH):
            where = codes + there[:, None] + byte * SIZE + entry[None, :]
            part = tl.load(where, mask=inside[:, None], other=0).to(word.dtype)
            if byte < WIDTH - 1:  # the last one has the sign
                part = part & 0xFF
            word += part << (8 * byte)
        digits = (word[:, None, :] >> (place * BITS)[None, :, None]) & (BASE - 1)
        if BITS == 1:
            levels = (2 * digits - 1).to(tl.float32)
        else:
            levels = (digits - BASE // 2).to(tl.float32)
        values += levels * step[:, :, None]
    tl.store(out + at, values, mask=at < total)


def pack(blocks: Blocks, x: Tensor, messages: Tensor, residual: Tensor | None) -> None:
    """Pack consecutive parts of ``x`` into the rows of ``messages`` [n, bytes], each as :meth:`Blocks.pack` does."""
    groups = len(messages) * _groups(blocks, messages)
    constants = {"LEVELS": blocks.levels, "LARGEST": blocks.largest_step, "SMALLEST": blocks.smallest_step}
    kept = x if residual is None else residual
    _launch(_pack, blocks, x, messages, kept, groups, KEEPS=residual is not None, **constants)


def unpack(
    blocks: Blocks, messages: Tensor, out: Tensor, *, weight: float = 1.0, add: bool = False, summed: bool = False
) -> None:
    """Unpack as :meth:`Blocks.unpack` does: ``messages`` [n, bytes] one after another or, ``summed``, their sum."""
    groups, count = -(-out.numel() // blocks.group), len(messages) if summed else 1
    _launch(_unpack, blocks, out, messages, weight, groups, COUNT=count, ADDS=add)


def _groups(blocks: Blocks, messages: Tensor) -> int:
    """Groups of blocks in a message."""
    return messages.shape[1] // (2 * blocks.per_word + blocks.size * blocks.width)


def _launch(
    kernel: Any, blocks: Blocks, x: Tensor, messages: Tensor, more: object, groups: int, **constants: Any
) -> None:
    at_once, stride = max(1, _ENTRIES // blocks.group), messages.stride(0)
    sizes = (x.numel(), groups, _groups(blocks, messages), stride // 2, stride)
    constants |= {"BITS": blocks.bits, "PER_WORD": blocks.per_word, "WIDTH": blocks.width, "SIZE": blocks.size}
    constants |= {"GROUPS": at_once, "enable_fp_fusion": False}
    with torch.cuda.device_of(x):
        kernel[(-(-groups // at_once),)](
            x, messages.view(torch.int16), messages.view(torch.int8), more, *sizes, **constants
        )
