"""What methods ask of gradients: which are compressed, whether all is finite, what fits a narrower type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgc.lazy import Tensor, torch


def compressible(shape: Sequence[int], min_elements: int) -> bool:
    """Whether a parameter of this shape is compressed at all: a matrix with at least ``min_elements`` entries."""
    return len(shape) == 2 and min(shape) > 1 and shape[0] * shape[1] >= min_elements


def finite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether every entry is finite, a 0-dim tensor; the same on every worker for messages that were averaged."""
    flags = [
        low.isfinite() & high.isfinite() for low, high in (torch.aminmax(t) for t in tensors if t.numel())
    ]
    return torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool, device="cpu")


def within(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 ``x``, clamped in place to the largest values of ``dtype``."""
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return x.clamp_(-limit, limit)
