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

import torch
from torch import Tensor

# Mean diagonal entry of the inverse of C, one for orthogonal columns: up to the first limit the basis is orthonormal
# to about 1e-6 after one pass, up to the second a second pass reaches that.
_ONE_PASS, _TWO_PASSES = 4.0, 1e3
# Squared norms of columns whose entries fp32 can square without loss.
_SMALLEST, _LARGEST = 1e-24, 1e24
_TINY, _NOISE, _SHIFT = 1e-300, 1e-7, 1e-11


class Orthonormal:
    """``orthonormal(x, out)``: bases of matrices, with small scratch that is kept from call to call."""

    def __init__(self) -> None:
        self._small: dict[int, _Small] = {}
        self._spare = torch.empty(0, dtype=torch.float32, device="cpu")
        self._random: dict[tuple[int, int, torch.device], Tensor] = {}

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """``out`` becomes a basis, with orthonormal columns, of a space that contains the columns of ``x``.

        Args:
            x: B x m x r, m >= r, fp32, finite, any strides.
            out: like ``x``, without overlap. NaN on a GPU if ``x`` is not finite.
        """
        for matrix, basis in zip(x, out, strict=True):
            if not self._cholesky(matrix, basis):
                basis.copy_(torch.linalg.qr(matrix).Q)

    def _cholesky(self, x: Tensor, out: Tensor) -> bool:
        """Cholesky-QR in one or two passes; False if that would not be accurate."""
        if _reduced_precision():
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

    def without_decisions(self, x: Tensor, out: Tensor) -> None:
        """The same in a fixed sequence of batched operations, as for a GPU."""
        basis = x.double()
        # Zero columns stay zero, what is not finite becomes NaN.
        basis = basis / torch.linalg.vector_norm(basis, dim=-2, keepdim=True).clamp(min=_TINY)
        basis = basis + _NOISE * self._fill(x)
        basis = basis / torch.linalg.vector_norm(basis, dim=-2, keepdim=True)
        eye = torch.eye(x.shape[-1], dtype=torch.float64, device=x.device)
        for shift in (_SHIFT, 0.0, 0.0):
            lower = torch.linalg.cholesky_ex(basis.mT @ basis + shift * eye).L
            basis = basis @ torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False).mT
        out.copy_(basis)

    def _fill(self, x: Tensor) -> Tensor:
        """Random columns of norm one, always the same."""
        rows, columns = x.shape[-2:]
        key = (rows, columns, x.device)
        if key not in self._random:
            generator = torch.Generator("cpu").manual_seed(0)
            draw = torch.randn(rows, columns, generator=generator, dtype=torch.float64, device="cpu")
            self._random[key] = (draw / draw.norm(dim=0)).to(x.device)
        return self._random[key]


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


def _reduced_precision() -> bool:
    """Whether the user lets matrix products on the CPU round fp32 to less."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    return getattr(matmul, "fp32_precision", "none") not in ("none", "ieee")
