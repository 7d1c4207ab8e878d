"""Which gradients are compressed at all, and which factors are smaller than their matrix: plain counting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

QUANTISED_BITS = {f"int{bits}": bits for bits in (8, 7, 6, 5, 4)}
"""Of an entry of a factor of these types, without the scales."""
FACTOR_BITS = {"fp32": 32.0, "bf16": 16.0} | {name: bits + 0.25 for name, bits in QUANTISED_BITS.items()}
"""Of an entry of a factor as it is sent, with its share, 16 / 64, of the scale of its block."""


def compressible(shape: Sequence[int], min_elements: int) -> bool:
    """Whether a parameter of this shape is compressed at all: a matrix with at least ``min_elements`` entries."""
    return len(shape) == 2 and min(shape) > 1 and shape[0] * shape[1] >= min_elements


def mean_bits(matrices: Iterable[tuple[Sequence[int], int]]) -> float:
    """Mean bits of an entry of matrices of these shapes and bits; 32 without any."""
    entries = bits = 0
    for (rows, columns), each in matrices:
        entries, bits = entries + rows * columns, bits + rows * columns * each
    return bits / entries if entries else 32


def saves_bytes(shape: Sequence[int], rank: int, factor_dtype: str = "fp32", gradient_bits: float = 32) -> bool:
    """Whether the two factors of this rank, scales included, are smaller than the matrix in its own type."""
    factors = min(rank, *shape) * (shape[0] + shape[1]) * FACTOR_BITS[factor_dtype]
    return factors < shape[0] * shape[1] * gradient_bits
