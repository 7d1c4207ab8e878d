"""Passes over whole gradients, as few as there can be; those of a GPU are in :mod:`edgc.compressors.batched`.

On a CPU the time goes where memory does. So a pass of PowerSGD walks over blocks of rows that stay in the last-level
cache while everything is done with them, and nothing is written to memory of its own: M = G + E takes the place of G in
the gradient's buffer where that is fp32 without gaps. E stays as it was until :meth:`RowBlocks.store`, so a reduction
can be given up at any time before.

Factors are left [B, m, r] and right [B, r, n], for B matrices [m, n] of one shape; all products then run along rows.
B is 1 on a CPU, where batches gain nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from edgc.compressors.base import Gradient, square_sum, square_sums_on_cpu, within
from edgc.lazy import Tensor, torch
from edgc.runtime.device import reduced_products

# Entries of a block: 4 MiB of fp32, measured best of 0.5 to 8 MiB. At least so many rows: for fewer, packing the right
# factor anew for every block takes longer than the product.
_BLOCK, _ROWS = 1 << 20, 32
# Share of ||M||^2 below which ||M||^2 - ||Q||^2 would be made of rounding, and ||E||^2 is added up instead.
_CANCELLED = 1e-3
# A factor of at most this squared norm counts as zero: what would scale it to one is not finite in fp32. The error
# feedback of a parameter that gets no more gradients falls there.
TINY_SQ = 2.0**-252

Factors = tuple[Tensor, Tensor]  # left, right
Members = Sequence[Sequence[Gradient]]  # gradients of every group
Optionals = Sequence["Tensor | None"]


def product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """``out``, fp32, becomes the product of two fp32 matrices on a CPU, rounded to no less than that."""
    if reduced_products():
        return out.copy_(left.double() @ right.double())
    return torch.mm(left, right, out=out)


class Matrices:
    """Matrices of one shape that are factored together in one call.

    Attributes:
        names, shape, rank: of the parameters; m x n; r <= min(m, n).
        error: [B, m, n], E in its own type; None without error feedback.
        spare: like ``error`` and takes the new E, so that the old one stays; None to overwrite it.
        gradients: of this call, one a name.
        needed: for each, the rows whose mean this rank needs.
        m: [B, m, n], fp32, G and then M; ``in_place`` if that is the gradients' own memory.
        gradient_sq, input_sq: squared norms of G and M, [B], fp64.
    """

    def __init__(self, names: Sequence[str], shape: tuple[int, int], rank: int, error: Tensor | None) -> None:
        self.names, self.shape, self.rank, self.error = tuple(names), shape, rank, error
        self.spare: Tensor | None = None
        self.gradients: Sequence[Tensor] = ()
        self.needed: Sequence[tuple[int, int]] = ()
        self.m = torch.empty(0, dtype=torch.float32, device="cpu")
        self.in_place = False
        self.gradient_sq = self.input_sq = torch.empty(0, dtype=torch.float64, device="cpu")
        self._memory: Tensor | None = None

    @property
    def next_error(self) -> Tensor | None:
        """Where the new E goes."""
        return self.error if self.spare is None else self.spare

    def bind(self, gradients: Sequence[Gradient]) -> None:
        """Take the gradients of a call."""
        self.gradients = [gradient.tensor for gradient in gradients]
        rows, columns = self.shape
        self.needed = [
            (0, rows) if g.needed is None else (g.needed[0] // columns, -(-g.needed[1] // columns)) for g in gradients
        ]
        batch = batch_view(self.gradients)
        self.in_place = batch is not None
        if batch is None:
            if self._memory is None:
                size = (len(gradients), *self.shape)
                self._memory = torch.empty(size, dtype=torch.float32, device=self.gradients[0].device)
            batch = self._memory
        self.m = batch


def batch_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """fp32 matrices of one shape that lie in one storage at equal distances, as one [B, m, n]; None if they do not."""
    first = tensors[0]
    place = first.untyped_storage().data_ptr()
    steps = {b.storage_offset() - a.storage_offset() for a, b in pairwise(tensors)} or {first.numel()}
    if (
        any(t.dtype != torch.float32 or not t.is_contiguous() for t in tensors)
        or any(t.untyped_storage().data_ptr() != place for t in tensors)
        or len(steps) > 1
        or min(steps) < first.numel()
    ):
        return None
    return first.as_strided((len(tensors), *first.shape), (*steps, first.shape[1], 1), first.storage_offset())


class RowBlocks:
    """The three passes of PowerSGD over matrices on a CPU, block by block, one after another."""

    def __init__(self) -> None:
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")

    @staticmethod
    def square_sums(batches: Sequence[Tensor]) -> list[Tensor]:
        """:func:`~edgc.compressors.base.square_sums` of every batch."""
        return [square_sums_on_cpu(batch) for batch in batches]

    def load(self, xs: Sequence[Matrices], gradients: Members, rights: Optionals, lefts: Optionals) -> None:
        """M = G + E and the norms, for the gradients of every x; where factors are given, left = M right^T."""
        for x, g, right, left in zip(xs, gradients, rights, lefts, strict=True):
            self._load(x, g, right, left)

    def _load(self, x: Matrices, g: Sequence[Gradient], right: Tensor | None, left: Tensor | None) -> None:
        x.bind(g)
        gradient_sq, input_sq = [0.0] * len(x.names), [0.0] * len(x.names)
        for i, rows in _blocks(x):
            block = x.m[i, rows]
            if not x.in_place:
                block.copy_(x.gradients[i][rows])
            norm = square_sum(block.view(-1))
            gradient_sq[i] += norm
            if x.error is not None:
                block.add_(self._fp32(x.error[i, rows]))
                norm = square_sum(block.view(-1))
            input_sq[i] += norm
            if right is not None and left is not None:
                product(block, right[i].mT, left[i, rows])
        x.gradient_sq, x.input_sq = _fp64(gradient_sq), _fp64(input_sq)

    def right_factor(self, x: Matrices, left: Tensor, out: Tensor) -> None:
        """out = left^T M."""
        for matrix, basis, factor in zip(x.m, left, out, strict=True):
            product(basis.mT, matrix, factor)

    def store(
        self,
        xs: Sequence[Matrices],
        owns: Sequence[Factors],
        means: Sequence[Factors],
        errors_sq: Sequence[Tensor],
        finite: Tensor,
    ) -> Sequence[Tensor]:
        """E = M - product of its ``own`` and, in needed rows at least, G = product of its ``mean``, for every x; M is
        gone afterwards.

        What a gradient's type cannot hold of the product goes to E.

        Args:
            errors_sq: ||E||^2 as it follows from ||M||^2 - ||own||^2, [B] each.
            finite: whether the means are. On a CPU they must be; on a GPU, where nobody looks, E stays as it was if
                they are not, and G is whatever the product of the means is.

        Returns:
            ``errors_sq``; on a CPU exact also where that difference is small.
        """
        each = zip(xs, owns, means, errors_sq, strict=True)
        return [self._store(x, own, mean, error_sq, finite) for x, own, mean, error_sq in each]

    def _store(self, x: Matrices, own: Factors, mean: Factors, error_sq: Tensor, finite: Tensor) -> Tensor:
        cancelled = (error_sq < _CANCELLED * x.input_sq).tolist()
        measured = [0.0] * len(x.names)
        narrow = x.gradients[0].dtype != torch.float32
        kept = x.next_error
        for i, rows in _blocks(x):
            block, gradient = x.m[i, rows], x.gradients[i][rows]
            if x.error is not None or cancelled[i]:
                if reduced_products():
                    block.sub_(product(own[0][i, rows], own[1][i], self._room(block)))
                else:
                    block.addmm_(own[0][i, rows], own[1][i], alpha=-1)
                if cancelled[i]:
                    measured[i] += square_sum(block.view(-1))
            left, right = mean[0][i, rows], mean[1][i]
            if narrow:
                result = product(left, right, self._room(block))
                block.add_(result)
                gradient.copy_(within(result, gradient.dtype))
                block.sub_(result.copy_(gradient))
            if kept is not None:
                kept[i, rows].copy_(block)
            if not narrow and rows.start < x.needed[i][1] and rows.stop > x.needed[i][0]:
                product(left, right, block)
                if not x.in_place:
                    gradient.copy_(block)
        known = zip(error_sq.tolist(), cancelled, measured, strict=True)
        return _fp64([exact if small else error for error, small, exact in known])

    @staticmethod
    def keep(means: Sequence[Tensor], factors: Sequence[Tensor], finite: Tensor) -> list[Tensor]:
        """Every factor becomes its mean, both [B, ., .], scaled by a power of two to a norm of about one each.

        So no scale of the gradients underflows in M Q, and no bit changes. A matrix that is zero, or as good as that
        (:data:`TINY_SQ`), leaves the old factor: from zero it could never recover; and so does, on a GPU, one that is
        not finite.

        Returns:
            Of every factor which of its matrices were replaced, [B] bool; on a GPU nobody has looked at it.
        """
        replaced = []
        for mean, factor, norms in zip(means, factors, RowBlocks.square_sums(means), strict=True):
            for new, old, norm in zip(mean, factor, norms.tolist(), strict=True):
                if norm > TINY_SQ:
                    torch.mul(new, 2.0 ** -math.frexp(math.sqrt(norm))[1], out=old)
            replaced.append(norms > TINY_SQ)
        return replaced

    def _fp32(self, block: Tensor) -> Tensor:
        return block if block.dtype == torch.float32 else self._room(block).copy_(block)

    def _room(self, block: Tensor) -> Tensor:
        if self._scratch.numel() < block.numel():
            self._scratch = torch.empty(max(_BLOCK, block.numel()), dtype=torch.float32, device="cpu")
        return self._scratch[: block.numel()].view(block.shape)


def _fp64(norms: Sequence[float]) -> Tensor:
    return torch.tensor(norms, dtype=torch.float64, device="cpu")


def _blocks(x: Matrices) -> Iterator[tuple[int, slice]]:
    """Every matrix by its index, in slices of rows."""
    rows, height = x.shape[0], max(_ROWS, _BLOCK // x.shape[1])
    return (
        (i, slice(start, min(start + height, rows))) for i in range(len(x.names)) for start in range(0, rows, height)
    )
