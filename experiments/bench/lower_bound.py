"""The least time that one step of the algorithm can take on a machine.

The algorithm is two-sided PowerSGD with error feedback of its own on every worker
(:mod:`edgc.compressors.powersgd.algorithm`). What passes through memory, for matrices that do not fit into a cache
together, is at least::

    read G, read E, write M       M = G + E, and P = M Q while a block of M is in a cache
    read M, write E               Q = M^T P^ and E = M - P^ Q^T while a block of M is in a cache
    write G                       G = P^ Q^T

six passes, two over G and four over fp32 buffers; the factors are small and are not counted. Four products of 2 m n r
floating-point operations each (P, Q, and P^ Q^T twice: the worker's own for E, the mean for G) and one
orthogonalisation of P come on top::

    floor = bytes / bandwidth + operations / rate + orthogonalisation

Bandwidth is that of a copy of the gradients (which reads and writes each byte once), rate that of the same products
on operands that stay in a cache, in the block size and form that are fastest; orthogonalisation the faster of
Householder QR and one pass of Cholesky-QR, which is enough where the warm start has made the columns of P nearly
orthogonal. All three are measured between the engines, round by round.

It is a floor for doing one after the other: a processor that hides all memory traffic behind arithmetic could get below
it, and so could an engine that keeps factors instead of E and forms E again when it reads M (five passes).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.bench.engines import Shape, entries
from experiments.bench.kernels import timed

FULL = 4  # bytes of an fp32 entry
BLOCK_BYTES = (1 << 19, 1 << 20, 1 << 21, 1 << 22)
PROBES = 3
Call = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """Work that one step cannot avoid.

    Attributes:
        bytes: that pass through memory.
        operations: of the products, floating-point.
        copied: bytes that a copy of the gradients reads and writes.
    """

    bytes: int
    operations: int
    copied: int


def work(shapes: Sequence[Shape], rank: int, gradient_bytes: int = FULL) -> Work:
    """Work of one step on ``shapes``; ``gradient_bytes`` is the size of an entry of G."""
    size = entries(shapes)
    operations = sum(4 * 2 * rows * columns * min(rank, rows, columns) for rows, columns in shapes)
    moved = size * (2 * gradient_bytes + 4 * FULL)
    return Work(bytes=moved, operations=operations, copied=2 * size * gradient_bytes)


def seconds(need: Work, bandwidth: Any, rate: Any, orthogonalisation: Any) -> Any:
    """The floor, from bytes per second, operations per second and seconds: numbers or columns of them."""
    return need.bytes / bandwidth + need.operations / rate + orthogonalisation


def products(shapes: Sequence[Shape], rank: int, device: torch.device) -> list[Call]:
    """The four products of every matrix, block by block, on operands that stay in a cache."""
    fastest = {shape: _fastest(shape, min(rank, *shape), device) for shape in dict.fromkeys(shapes)}
    return [call for shape in shapes for call in fastest[shape]]


def _fastest(shape: Shape, rank: int, device: torch.device) -> list[Call]:
    """Each product of a matrix in the block size and form that is fastest here."""
    whole = shape[0] * shape[1] * FULL
    # A GPU has a cache that holds such a matrix, and wants large products.
    sizes = [whole] if device.type == "cuda" else [size for size in BLOCK_BYTES if size < whole] or [whole]
    by_product: dict[str, list[Call]] = {}
    for size in sizes:
        for product, call in _products(shape, rank, size, device):
            by_product.setdefault(product, []).append(call)
    return [min(calls, key=lambda call: _probe(call, device)) for calls in by_product.values()]


def _products(shape: Shape, rank: int, size: int, device: torch.device) -> Iterator[tuple[str, Call]]:
    """The products of one matrix in blocks of about ``size`` bytes, and the forms that each can take."""
    rows, columns = shape
    high, wide = max(min(size // (columns * FULL), rows), 1), max(min(size // (rows * FULL), columns), 1)

    def normal(*of: int) -> Tensor:
        return torch.randn(of, device=device)

    left, right, turned = normal(rows, rank), normal(rank, columns), normal(columns, rank)
    strip, tall = normal(high, columns), normal(high, rank)  # rows of M and of P
    stripe = normal(rows, wide)  # columns of M
    tall_out, flat_out, strip_out = torch.empty_like(tall), left.new_empty(rank, wide), torch.zeros_like(strip)
    for product, total, block, form in (
        ("P", rows, high, lambda n: torch.mm(strip[:n], right.mT, out=tall_out[:n])),
        ("P", rows, high, lambda n: torch.mm(strip[:n], turned, out=tall_out[:n])),
        ("Q", columns, wide, lambda n: torch.mm(left.mT, stripe[:, :n], out=flat_out[:, :n])),
        ("E", rows, high, lambda n: torch.addmm(strip_out[:n], tall[:n], right, alpha=-1, out=strip_out[:n])),
        ("G", rows, high, lambda n: torch.mm(tall[:n], right, out=strip_out[:n])),
    ):
        yield product, functools.partial(_repeat, total, block, form)


def _repeat(total: int, block: int, product: Callable[[int], Tensor]) -> None:
    for start in range(0, total, block):
        product(min(block, total - start))


def orthogonalisation(shapes: Sequence[Shape], rank: int, device: torch.device) -> list[Call]:
    """One orthonormal basis for the P of every matrix, by the faster of two methods."""
    fastest: dict[Shape, Call] = {}
    for shape in dict.fromkeys(shapes):
        factor = torch.randn(shape[0], min(rank, *shape), device=device)
        calls = [functools.partial(method, factor) for method in (_householder, _cholesky)]
        fastest[shape] = min(calls, key=lambda call: _probe(call, device))
    return [fastest[shape] for shape in shapes]


def _householder(factor: Tensor) -> Tensor:
    return torch.linalg.qr(factor).Q


def _cholesky(factor: Tensor) -> Tensor:
    triangle = torch.linalg.cholesky_ex(factor.mT @ factor).L
    eye = torch.eye(len(triangle), device=factor.device)
    return factor @ torch.linalg.solve_triangular(triangle, eye, upper=False).mT


def _probe(call: Call, device: torch.device) -> float:
    """The shortest of a few runs after one that warms up: processor time where it tells, else wall time."""
    call()
    runs = [timed(call, device) for _ in range(PROBES)]
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return min(run["cpu" if alone else "wall"] for run in runs)
