"""Squared norms of fp32 matrices at any scale, without a copy in memory; on a GPU without waiting for them."""

from __future__ import annotations

from edgc.lazy import Tensor, torch
from edgc.runtime.device import host_decides

# Squares of so many entries are added in fp32, their sums in fp64: relative error below 1e-6.
_SUM = 1 << 19
# Outside this range squares may have left that of fp32.
_SMALLEST, _LARGEST = 1e-24, 1e36
# Entries that are converted to fp64 at a time.
_FEW = 4096
# The same, in products of two tensors.
_MANY = 1 << 20


def square_sum(vector: Tensor) -> float:
    """The squared norm of a flat fp32 tensor on a CPU."""
    total = 0.0
    for start in range(0, vector.numel(), _SUM):
        part = vector[start : start + _SUM]
        value = float(torch.dot(part, part))
        total += value if _SMALLEST < value < _LARGEST else _careful_sum(part)
    return total


def _careful_sum(vector: Tensor) -> float:
    low, high = torch.aminmax(vector)
    if not low and not high:
        return 0.0
    return sum(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in vector.split(_FEW))


def square_sums(batch: Tensor) -> Tensor:
    """The squared norm of every ``batch[i]``, fp64; each contiguous or the transpose of a contiguous matrix."""
    if not host_decides(batch.device):
        return torch.linalg.vector_norm(batch, dim=(-2, -1), dtype=torch.float64).square()
    flat = ((x if x.is_contiguous() else x.mT).reshape(-1) for x in batch)
    return torch.tensor([square_sum(x) for x in flat], dtype=torch.float64, device="cpu")


def products(x: Tensor, y: Tensor) -> Tensor:
    """The squared norm of ``x`` and its inner product with ``y``, of the same shape; fp64, on the device of ``y``."""
    total = torch.zeros(2, dtype=torch.float64, device=y.device)
    parts = zip(x.reshape(-1).split(_MANY), y.reshape(-1).split(_MANY), strict=True)
    for a, b in ((u.double(), v.double()) for u, v in parts):
        total += torch.stack([a @ a, a @ b])
    return total
