"""Bits in bytes, eight in each, the first one lowest."""

from __future__ import annotations

from edgc.lazy import Tensor, torch


def pack_bits(bits: Tensor) -> Tensor:
    """Bytes (uint8, [n / 8]) of flat booleans [n], n a multiple of 8."""
    return (bits.view(-1, 8) << _places(bits)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """Flat booleans [8 n] of bytes of any shape, n of them: the inverse of :func:`pack_bits`."""
    return (packed.view(-1, 1) >> _places(packed)).bitwise_and_(1).bool().view(-1)


def _places(tensor: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=tensor.device)
