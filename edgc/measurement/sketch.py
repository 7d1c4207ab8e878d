"""Linear sketches of matrices: short vectors whose squared norm is that of the matrix in the mean, and which add up.

A map follows from a key alone, so that all replicas draw the same one. Those of several matrices are drawn together:
on a GPU what one of them takes is mostly the launch of small operations.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from edgc.runtime.device import to_device

BUCKETS = 512
"""Length of a sketch; with it the norm is off by 3 %."""
PROJECTIONS = 8
_MANY = 1 << 20  # entries that are converted to another type at a time
_WORD = (1 << 32) - 1


def sketches(matrices: Sequence[Tensor], keys: Sequence[str]) -> Tensor:
    """Map every matrix linearly to ``BUCKETS`` numbers, [matrices, BUCKETS] in fp64, keeping the norm in the mean over
    keys.

    Of a matrix E (m x n), T = U E / sqrt(K) with random signs U (K x m), one product and one pass over E; the K n
    entries of T are then added into S buckets, each with a random sign and every row of T turned by a random number of
    places. The squared norm is unbiased; its relative variance is about 2/S + 2/(K r) for E of stable rank r.

    The map follows from key and shape alone, bit for bit on every device.

    Args:
        matrices: at least one, all on one device.
    """
    shapes = [tuple(matrix.shape) for matrix in matrices]
    order = sorted(range(len(matrices)), key=shapes.__getitem__)
    words = torch.tensor([_words(keys[i]) for i in order], dtype=torch.int64, device="cpu")
    rows_seeds, columns_seeds, turns = to_device(words, matrices[0].device).split([2, 2, PROJECTIONS], 1)
    result: list[Tensor] = []
    for (rows, columns), alike in groupby(order, shapes.__getitem__):
        members = [matrices[i] for i in alike]
        part = slice(len(result), len(result) + len(members))
        signs = _signs(rows, rows_seeds[part]).float()
        product = torch.stack([_product(row, matrix) for row, matrix in zip(signs, members, strict=True)])
        signed = product.double() * _signs(columns, columns_seeds[part])
        padded = torch.nn.functional.pad(signed, (0, -columns % BUCKETS))
        folded = padded.view(len(members), PROJECTIONS, -1, BUCKETS).sum(2)
        places = torch.arange(BUCKETS, dtype=torch.int64, device=folded.device)
        result += folded.gather(2, (places - turns[part, :, None]) % BUCKETS).sum(1).div_(math.sqrt(PROJECTIONS))
    return torch.stack([result[order.index(i)] for i in range(len(order))])


def _words(key: str) -> list[int]:
    """Random numbers of a map: two seeds of two words, and how far each projection is turned."""
    digest = hashlib.sha256(key.encode()).digest()
    seeds = [int.from_bytes(digest[at : at + 4], "little") for at in range(0, 16, 4)]
    return seeds + [int.from_bytes(digest[at : at + 2], "little") for at in range(16, 16 + 2 * PROJECTIONS, 2)]


def _product(signs: Tensor, matrix: Tensor) -> Tensor:
    if matrix.dtype == torch.float32:
        return signs @ matrix
    step = max(1, _MANY // matrix.shape[1])
    parts = zip(signs.split(step, dim=1), matrix.split(step), strict=True)
    return torch.stack([part @ block.float() for part, block in parts]).sum(0)


def _signs(count: int, seeds: Tensor) -> Tensor:
    """Random signs, ``PROJECTIONS`` x ``count`` for each of ``seeds`` [B, 2]: bits of a hash of the place, which no
    device computes otherwise."""
    x = torch.arange(count, dtype=torch.int64, device=seeds.device)
    for part in seeds.split(1, 1):
        x = x ^ part
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _WORD  # factors below 2^31: nothing overflows
        x = ((x ^ (x >> 15)) * 0x735A2D97) & _WORD
        x = x ^ (x >> 15)
    places = torch.arange(PROJECTIONS, dtype=torch.int64, device=seeds.device)[:, None]
    return ((x[:, None] >> places) & 1) * 2 - 1
