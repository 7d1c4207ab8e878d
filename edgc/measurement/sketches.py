"""Random linear sketches of matrices: a few numbers whose squared norm is that of the matrix in the mean.

Of a matrix E (m x n), T = U E / sqrt(K) with random signs U (K x m), one product and one pass over E; the K n entries
of T are then added into S buckets, each with a random sign and every row of T turned by a random number of places. The
squared norm is unbiased; its relative variance is about 2/S + 2/(K r) for E of stable rank r.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

BUCKETS = 512
PROJECTIONS = 8
_CHUNK = 1 << 20  # entries that are converted to fp32 at a time
_WORD = (1 << 32) - 1


def sketch(matrix: Tensor, key: str) -> Tensor:
    """A linear map of ``matrix`` to ``BUCKETS`` fp64 numbers that keeps the norm in the mean over keys.

    The map follows from ``key`` and the shape alone, bit for bit on every device.
    """
    (rows, columns), device = matrix.shape, matrix.device
    digest = hashlib.sha256(key.encode()).digest()
    left = _signs(rows, digest[:8], device).float()
    if matrix.dtype == torch.float32:
        product = left @ matrix
    else:
        step = max(1, _CHUNK // columns)
        parts = zip(left.split(step, dim=1), matrix.split(step), strict=True)
        product = torch.stack([signs @ block.float() for signs, block in parts]).sum(0)
    signed = product.double() * _signs(columns, digest[8:16], device)
    padded = torch.nn.functional.pad(signed, (0, -columns % BUCKETS))
    folded = padded.view(PROJECTIONS, -1, BUCKETS).sum(1)
    turns = (int.from_bytes(digest[16 + 2 * k : 18 + 2 * k], "little") for k in range(PROJECTIONS))
    turned = [torch.roll(row, turn % BUCKETS) for row, turn in zip(folded, turns, strict=True)]
    return torch.stack(turned).sum(0) / math.sqrt(PROJECTIONS)


def _signs(count: int, seed: bytes, device: torch.device) -> Tensor:
    """``PROJECTIONS`` x ``count`` random signs: bits of a hash of the place, which no device computes otherwise."""
    x = torch.arange(count, dtype=torch.int64, device=device)
    for part in (seed[:4], seed[4:]):
        x = x ^ int.from_bytes(part, "little")
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _WORD  # factors below 2^31: nothing overflows
        x = ((x ^ (x >> 15)) * 0x735A2D97) & _WORD
        x = x ^ (x >> 15)
    places = torch.arange(PROJECTIONS, dtype=torch.int64, device=device)[:, None]
    return ((x >> places) & 1) * 2 - 1
