"""Bits in bytes, eight in each, the first one lowest; and whole numbers of a few bits each."""

from __future__ import annotations

from collections.abc import Sequence

from edgc.lazy import Tensor, torch


def pack_bits(bits: Tensor) -> Tensor:
    """Bytes (uint8, [n / 8]) of flat booleans [n], n a multiple of 8."""
    return (bits.view(-1, 8).to(torch.uint8) << _places(bits)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """Flat booleans [8 n] of bytes of any shape, n of them: the inverse of :func:`pack_bits`."""
    return (packed.view(-1, 1) >> _places(packed)).bitwise_and_(1).bool().view(-1)


def pack_numbers(numbers: Sequence[Tensor], width: int) -> Tensor:
    """Bytes of whole numbers of so many bits, lowest bit first, filled up with zeros."""
    flat = torch.cat([each.reshape(-1) for each in numbers]).to(torch.int32)
    bits = (flat[:, None] >> torch.arange(width, device=flat.device)).bitwise_and_(1).bool().view(-1)
    return pack_bits(torch.nn.functional.pad(bits, (0, -len(bits) % 8)))


def unpack_numbers(packed: Tensor, width: int, count: int) -> Tensor:
    """Whole numbers [W, count] of packed rows [W, bytes]: the inverse of :func:`pack_numbers`."""
    bits = unpack_bits(packed.contiguous()).view(len(packed), -1)[:, : count * width].view(len(packed), count, width)
    return (bits.long() << torch.arange(width, device=packed.device)).sum(2)


def fold_quarters(codes: Tensor, bytes_of: Tensor) -> Tensor:
    """Whole numbers of 2, 4 or 8 bits, the four quarters of a block [..., 4, n], as [..., 4, n] of which the first
    1, 2 or 4 count: ``bytes_of`` [...]."""
    a, b, c, d = codes.unbind(-2)
    one, two = (bytes_of[..., None] == width for width in (1, 2))
    first = torch.where(one, a | b << 2 | c << 4 | d << 6, torch.where(two, a | c << 4, a))
    return torch.stack([first, torch.where(two, b | d << 4, b), c, d], -2)


def unfold_quarters(folded: Tensor, bytes_of: Tensor) -> Tensor:
    """The inverse of :func:`fold_quarters`."""
    a, b, *_ = folded.unbind(-2)
    one, two = (bytes_of[..., None, None] == width for width in (1, 2))
    half = torch.stack([a & 15, b & 15, a >> 4, b >> 4], -2)
    quarter = torch.stack([a & 3, a >> 2 & 3, a >> 4 & 3, a >> 6], -2)
    return torch.where(one, quarter, torch.where(two, half, folded))


def _places(tensor: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=tensor.device)
