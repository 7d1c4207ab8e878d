"""Passes of low-rank methods over matrices M [B, m, n], each in one launch for all matrices of a shape: M = G + E with
its norms and P = M Q in one read; the new E and the result in another.

Written in Triton, as ``edgc.runtime.block_kernels``, and to be imported as that is. An instance of a kernel walks
along some rows of one matrix, so sums have one order and equal input gives equal bits. M is what torch's addition
gives, bit for bit. Products are made in three parts on tensor cores (3xTF32: Ootomo and Yokota, IJHPCA 36, 2022), which
keeps what fp32 does, and add up in fp32. Squares add up in fp64.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PRECISION = tl.constexpr("tf32x3")
_NARROW = {torch.float32: None, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
HEIGHTS = (16, 64)  # rows of an instance
_ENOUGH = 256  # instances that keep a GPU busy; with fewer each takes fewer rows


@triton.jit
def _squares(x):
    """Squares in fp64, four beside each other added up, which one thread has."""
    wide = x.to(tl.float64)
    return tl.sum(tl.reshape(wide * wide, (x.shape[0], x.shape[1] // 4, 4)), axis=2)


@triton.jit
def _to_bfloat16(x):
    """The nearest numbers of bfloat16, ties to even, in fp32; Triton's interpreter cuts off."""
    raw = x.to(tl.int32, bitcast=True)
    raw = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16 << 16
    return tl.where(x == x, raw.to(tl.float32, bitcast=True), x)


@triton.jit
def _load(
    m,
    error,
    right,
    left,
    sums,
    rows,
    columns,
    rank,
    between,
    left_batch,
    left_row,
    left_column,
    OWES: tl.constexpr,
    FACTORS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
):
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, r = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, RANK).to(tl.int64)
    of_m = m + batch * between + row[:, None] * columns
    of_error = error + (batch * rows + row)[:, None] * columns
    of_right = right + batch * rank * columns + r[None, :] * columns
    gradient_sq = tl.zeros((ROWS, COLUMNS // 4), tl.float64)
    input_sq = tl.zeros((ROWS, COLUMNS // 4), tl.float64)
    p = tl.zeros((ROWS, RANK), tl.float32)
    for begin in range(0, columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(of_m + column[None, :], mask=inside, other=0.0)
        gradient_sq += _squares(x)
        if OWES:
            x += tl.load(of_error + column[None, :], mask=inside, other=0.0).to(tl.float32)
            tl.store(of_m + column[None, :], x, mask=inside)
            input_sq += _squares(x)
        if FACTORS:
            known = (column < columns)[:, None] & (r < rank)[None, :]
            q = tl.load(of_right + column[:, None], mask=known, other=0.0)
            p = tl.dot(x, q, p, input_precision=_PRECISION)
    if FACTORS:
        there = left + batch * left_batch + row[:, None] * left_row + r[None, :] * left_column
        tl.store(there, p, mask=(row < rows)[:, None] & (r < rank)[None, :])
    there = sums + batch * tl.num_programs(0) + tile
    tl.store(there, tl.sum(tl.sum(gradient_sq, axis=1), axis=0))
    if OWES:
        there += tl.num_programs(1) * tl.num_programs(0)
        tl.store(there, tl.sum(tl.sum(input_sq, axis=1), axis=0))


@triton.jit
def _store(
    m,
    error,
    spare,
    own_left,
    own_right,
    mean_left,
    mean_right,
    finite,
    limit,
    rows,
    columns,
    rank,
    between,
    left_batch,
    left_row,
    left_column,
    ONE_LEFT: tl.constexpr,
    narrow: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
):
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, r = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64), tl.arange(0, RANK).to(tl.int64)
    of_m = m + batch * between + row[:, None] * columns
    of_error = (batch * rows + row)[:, None] * columns
    of_left = batch * left_batch + row[:, None] * left_row + r[None, :] * left_column
    of_right = batch * rank * columns + r[:, None] * columns
    known = (row < rows)[:, None] & (r < rank)[None, :]
    left = tl.load(own_left + of_left, mask=known, other=0.0)
    other = left if ONE_LEFT else tl.load(mean_left + of_left, mask=known, other=0.0)
    bad = tl.load(finite + tl.zeros((1, 1), tl.int32)) == 0
    for begin in range(0, columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        there = (r < rank)[:, None] & (column < columns)[None, :]
        x = tl.load(of_m + column[None, :], mask=inside, other=0.0)
        right = tl.load(own_right + of_right + column[None, :], mask=there, other=0.0)
        kept = x - tl.dot(left, right, input_precision=_PRECISION)
        right = tl.load(mean_right + of_right + column[None, :], mask=there, other=0.0)
        result = tl.dot(other, right, input_precision=_PRECISION)
        if narrow is not None:
            kept += result
            result = tl.where(result > limit, limit, tl.where(result < -limit, -limit, result))
            result = _to_bfloat16(result) if narrow == tl.bfloat16 else result.to(narrow).to(tl.float32)
            kept -= result
        old = tl.load(error + of_error + column[None, :], mask=inside & bad, other=0.0).to(tl.float32)
        kept = tl.where(bad, old, kept)
        if spare.dtype.element_ty == tl.bfloat16:
            kept = _to_bfloat16(kept)
        tl.store(spare + of_error + column[None, :], kept.to(spare.dtype.element_ty), mask=inside)
        tl.store(of_m + column[None, :], result, mask=inside)


def load(m: Tensor, error: Tensor | None, right: Tensor | None, left: Tensor, height: int | None = None) -> Tensor:
    """``m``, G, becomes M = G + E and, if there is a Q, ``left`` becomes P = M Q.

    Args:
        m: [B, m, n], fp32, matrices without gaps at any distance.
        error: [B, m, n], E, contiguous, of any type.
        right: [B, r, n], Q^T, fp32, contiguous.
        left: [B, m, r], fp32, any strides.
        height: one of :data:`HEIGHTS`, in place of what follows from the batch alone, as the bits do.

    Returns:
        ||G||^2 and ||M||^2, [2, B], fp64.
    """
    count, rows, _ = m.shape
    height = height or _height(m)
    tiles = -(-rows // height)
    sums = m.new_empty((1 if error is None else 2, count, tiles), dtype=torch.float64)
    _launch(
        _load,
        m,
        height,
        (m if error is None else error, m if right is None else right, left, sums),
        (1 if right is None else left.shape[2], m.stride(0), *left.stride()),
        OWES=error is not None,
        FACTORS=right is not None,
    )
    return sums.sum(-1).expand(2, -1)


def store(
    m: Tensor,
    error: Tensor,
    spare: Tensor,
    own: tuple[Tensor, Tensor],
    mean: tuple[Tensor, Tensor],
    finite: Tensor,
    dtype: torch.dtype,
    height: int | None = None,
) -> None:
    """``spare`` becomes E = M - the product of ``own``, and ``m`` that of ``mean``.

    Args:
        m, error, height: as for :func:`load`; ``spare`` is like ``error``.
        own, mean: left [B, m, r] and right [B, r, n]; left ones of equal strides, right ones contiguous.
        finite: 0-dim bool; if it is false ``spare`` becomes ``error``.
        dtype: of the gradients. What it cannot hold of the result goes to E.
    """
    left, limit = own[0], min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    height = HEIGHTS[0] if left.shape[2] > 64 else height or _height(m)  # more have no room in registers
    _launch(
        _store,
        m,
        height,
        (error, spare, *own, *mean, finite.view(torch.uint8), limit),
        (left.shape[2], m.stride(0), *left.stride()),
        ONE_LEFT=own[0] is mean[0],
        narrow=_NARROW[dtype],
    )


def _height(m: Tensor) -> int:
    low, high = HEIGHTS
    return high if len(m) * -(-m.shape[1] // high) >= _ENOUGH else low


def _launch(
    kernel: Any, m: Tensor, height: int, tensors: tuple[object, ...], sizes: tuple[int, ...], **constants: Any
) -> None:
    count, rows, columns = m.shape
    rank = max(16, triton.next_power_of_2(sizes[0]))
    constants |= {"ROWS": height, "COLUMNS": 32, "RANK": rank, "num_warps": 8 if rank == 128 else 4}
    with torch.cuda.device_of(m):
        kernel[(-(-rows // height), count)](m, *tensors, rows, columns, *sizes, **constants)
