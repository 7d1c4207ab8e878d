"""Orthonormal bases of the columns of tall matrices, cheap, and stable down to rank zero.

Equal bits give equal bits: replicas that call this with the same matrix get the same basis.

On a CPU Cholesky-QR is tried first: C = X^T X, with its diagonal scaled to one, C = L L^T in fp64, basis X L^-T. Its
loss of orthogonality grows with the condition number of X after scaling its columns, which the mean diagonal entry of
C^-1 bounds from below; where that is large a second pass repairs it, and where it is too large for that, or norms are
outside what fp32 can square, LAPACK's Householder QR takes over. The columns of a warm-started P are nearly
orthogonal, so one pass is the rule.

On a GPU every one of these decisions would make the host wait, so there it is always three passes in fp64, the first
with a shifted diagonal (shifted Cholesky-QR3: Fukaya et al., SIAM J. Sci. Comput. 42, 2020). That needs a condition
number below some 1e10, also where columns depend on each other or are zero: therefore fixed random columns are added
first, of 1e-7 of the norm of every column, which is what fp32 rounds off anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgc.runtime.device import reduced_products

# Mean diagonal entry of the inverse of C, one for orthogonal columns: up to the first limit the basis is orthonormal
# to about 1e-6 after one pass, up to the second a second pass reaches that.
_ONE_PASS, _TWO_PASSES = 4.0, 1e3
# Squared norms of columns whose entries fp32 can square without loss.
_SMALLEST, _LARGEST = 1e-24, 1e24
_TINY, _NOISE, _SHIFT = 1e-300, 1e-7, 1e-11
_SMALL_BATCH = 1 << 22  # entries: 32 MiB in fp64


class Orthonormal:
    """``orthonormal(x, out)``: bases of matrices, with small scratch that is kept from call to call."""

    def __init__(self) -> None:
        self._small: dict[int, _Small] = {}
        self._spare = torch.empty(0, dtype=torch.float32, device="cpu")
        self._random: dict[tuple[int, int, torch.device], Tensor] = {}
        self._eyes: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, xs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Every out becomes a basis, with orthonormal columns, of a space that contains the columns of its x.

        Args:
            xs: B x m x r, m >= r, fp32, finite, any strides.
            outs: like ``xs``, without overlap. NaN on a GPU if x is not finite.
        """
        for x, out in zip(xs, outs, strict=True):
            for matrix, basis in zip(x, out, strict=True):
                if not self._cholesky(matrix, basis):
                    basis.copy_(torch.linalg.qr(matrix).Q)

    def _cholesky(self, x: Tensor, out: Tensor) -> bool:
        """Cholesky-QR in one or two passes; False if that would not be accurate."""
        if reduced_products():
            return False
        small = self._small.get(x.shape[1])
        if small is None:
            small = self._small[x.shape[1]] = _Small(x.shape[1])
        inverse = small.factor(x)
        if not inverse <= _TWO_PASSES:
            return False
        torch.mm(x, small.transform, out=out)
        if inverse > _ONE_PASS:
            if not small.factor(out) <= _ONE_PASS:
                return False
            if self._spare.numel() < x.numel():
                self._spare = torch.empty(x.numel(), dtype=torch.float32, device="cpu")
            out.copy_(torch.mm(out, small.transform, out=self._spare[: x.numel()].view(x.shape)))
        return True

    def without_decisions(self, xs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """The same in a fixed sequence of batched operations, as for a GPU."""
        for places in _together([x.shape for x in xs]):
            self._batched([xs[i] for i in places], [outs[i] for i in places])

    def _batched(self, xs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Of matrices with as many columns. Rows of zeros below the shorter ones change neither products nor bases."""
        counts, rank = [len(x) for x in xs], xs[0].shape[-1]
        rows = max(x.shape[-2] for x in xs)
        basis = torch.zeros((sum(counts), rows, rank), dtype=torch.float64, device=xs[0].device)
        parts = [part[:, : x.shape[-2]] for part, x in zip(basis.split(counts), xs, strict=True)]
        for part, x in zip(parts, xs, strict=True):
            part.copy_(x)
        # Zero columns stay zero, what is not finite becomes NaN.
        basis.div_(torch.linalg.vector_norm(basis, dim=-2, keepdim=True).clamp_(min=_TINY))
        for part, x in zip(parts, xs, strict=True):
            part.add_(self._fill(x), alpha=_NOISE)
        basis.div_(torch.linalg.vector_norm(basis, dim=-2, keepdim=True))
        eye = self._unit(rank, basis.device)
        for shift in (_SHIFT, 0.0, 0.0):
            gram = basis.mT @ basis
            if shift:
                gram.diagonal(dim1=-2, dim2=-1).add_(shift)
            lower = torch.linalg.cholesky_ex(gram).L
            basis = basis @ torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False).mT
        for part, x, out in zip(basis.split(counts), xs, outs, strict=True):
            out.copy_(part[:, : x.shape[-2]])

    def _unit(self, rank: int, device: torch.device) -> Tensor:
        if (rank, device) not in self._eyes:
            # Copied from the CPU, for which the host waits: later it may be read on another stream.
            self._eyes[rank, device] = torch.eye(rank, dtype=torch.float64, device="cpu").to(device)
        return self._eyes[rank, device]

    def _fill(self, x: Tensor) -> Tensor:
        """Random columns of norm one, always the same."""
        rows, columns = x.shape[-2:]
        key = (rows, columns, x.device)
        if key not in self._random:
            generator = torch.Generator("cpu").manual_seed(0)
            draw = torch.randn(rows, columns, generator=generator, dtype=torch.float64, device="cpu")
            self._random[key] = (draw / draw.norm(dim=0)).to(x.device)
        return self._random[key]


def _together(shapes: Sequence[torch.Size]) -> list[list[int]]:
    """Which matrices are to be one batch, padded to the rows of the tallest, by their positions: of as many columns,
    while the batch is so small that launching what is done with it takes longer than doing it."""
    batches: list[list[int]] = []
    for i in sorted(range(len(shapes)), key=lambda i: (shapes[i][2], -shapes[i][1])):
        last = batches[-1] if batches else [i]
        _, tallest, rank = shapes[last[0]]
        members = sum(shapes[j][0] for j in [*last, i])
        if batches and rank == shapes[i][2] and members * tallest * rank <= _SMALL_BATCH:
            last.append(i)
        else:
            batches.append([i])
    return batches


class _Small:
    """The r x r matrices of Cholesky-QR. LAPACK takes its matrices by columns, hence the transposes."""

    def __init__(self, rank: int) -> None:
        def buffer(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="cpu")

        self.gram, self.transform = (buffer(rank, rank, dtype=torch.float32) for _ in range(2))
        self.scaled, self.lower, self.inverse = (buffer(rank, rank).t() for _ in range(3))
        self.eye = torch.eye(rank, dtype=torch.float64, device="cpu")
        self.scale = buffer(rank)
        self.info = buffer(dtype=torch.int32)

    def factor(self, x: Tensor) -> float:
        """``transform`` becomes the T for which ``x @ T`` is orthonormal.

        Returns the mean diagonal entry of the inverse of the scaled C; nan if there is none, or for norms out of range.
        """
        torch.mm(x.t(), x, out=self.gram)
        self.scaled.copy_(self.gram)
        low, high = self.scaled.diagonal().aminmax()
        if not (float(low) > _SMALLEST and float(high) < _LARGEST):
            return float("nan")
        torch.rsqrt(self.scaled.diagonal(), out=self.scale)
        self.scaled.mul_(self.scale).mul_(self.scale[:, None])
        torch.linalg.cholesky_ex(self.scaled, out=(self.lower, self.info))
        if self.info:
            return float("nan")
        torch.linalg.solve_triangular(self.lower, self.eye, upper=False, out=self.inverse)
        flat = self.inverse.t().reshape(-1)
        mean = float(torch.dot(flat, flat)) / len(self.scale)
        self.transform.copy_(self.inverse.t().mul_(self.scale[:, None]))
        return mean
