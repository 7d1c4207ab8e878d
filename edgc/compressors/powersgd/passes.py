"""PowerSGD's linear algebra, once for a device that the host reads (:class:`RowBlocks`) and once for a GPU
(:class:`Batched`).

On a CPU the time goes where memory does. So a pass walks over blocks of rows that stay in the last-level cache while
everything is done with them, and nothing is written to memory of its own: M = G + E takes the place of G in the
gradient's buffer where that is fp32 without gaps. E stays as it was until :meth:`RowBlocks.store`, so a reduction can
be given up at any time before.

On a GPU the host waits for nothing and launches little: a bucket is a few matrices of several shapes, each too small to
keep a GPU busy for as long as launching takes, so entry by entry the matrices of all shapes are worked on at once.

Factors are left [B, m, r] and right [B, r, n], for B matrices [m, n] of one shape; all products then run along rows.
B is 1 on a CPU, where batches gain nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from edgc.compressors.base import Gradient, square_sum, square_sums, within
from edgc.compressors.kernels import matrix_kernels_for
from edgc.runtime.device import HostCopy, reduced_products

LEFT, RIGHT = 0, 1
# Entries of a block: 4 MiB of fp32, measured best of 0.5 to 8 MiB. At least so many rows: for fewer, packing the right
# factor anew for every block takes longer than the product.
_BLOCK, _ROWS = 1 << 20, 32
# Share of ||M||^2 below which ||M||^2 - ||Q||^2 would be made of rounding, and ||E||^2 is added up instead.
_CANCELLED = 1e-3
# A factor of at most this squared norm counts as zero: what would scale it to one is not finite in fp32. The error
# feedback of a parameter that gets no more gradients falls there.
TINY_SQ = 2.0**-252
# Cholesky-QR: up to these mean diagonal entries of the inverse of C (1: orthogonal columns) one pass, or two, give a
# basis orthonormal to about 1e-6; squared norms of columns whose entries fp32 can square without loss.
_ONE_PASS, _TWO_PASSES = 4.0, 1e3
_SMALLEST, _LARGEST = 1e-24, 1e24
_TINY, _NOISE, _SHIFT = 1e-300, 1e-7, 1e-11
_SMALL_BATCH = 1 << 22  # entries: 32 MiB in fp64

Members = Sequence[Sequence[Gradient]]  # gradients of every group


class Spectrum(NamedTuple):
    """Shape of a matrix M, squared singular values of an approximation, and ||M||^2."""

    shape: tuple[int, int]
    singular_sq: list[float]
    input_sq: float


@dataclass(eq=False, repr=False)
class Group:
    """B matrices of one shape that are factored together, with their factors.

    Attributes:
        names, shape, rank: of the parameters; m x n; r <= min(m, n).
        error: [B, m, n], E in its own type; None without error feedback.
        spare: like ``error``, and takes the new E, so that the old one stays until the step is settled.
        right, left: [B, r, n], [B, m, r]: the warm-started Q and, if one-sided, P.
        drawn: names whose factor is random and new.
        gradients: of this call, one a name.
        m: [B, m, n], fp32, G and then M; ``in_place`` if that is the gradients' own memory.
        gradient_sq, input_sq: squared norms of G and M, [B], fp64.
        start, summed, basis, own, mean: of the call under way, in the workspace's flat buffers: Q~; P before and
            after orthogonalisation; the factor that this worker sends; its mean. One-sided, the basis is that of the
            known factor, and P is what this worker sends in every other call.
    """

    names: Sequence[str]
    shape: tuple[int, int]
    rank: int
    error: Tensor | None
    spare: Tensor | None
    right: Tensor
    left: Tensor | None = None
    _side: int = RIGHT
    drawn: set[str] = field(default_factory=set)
    gradients: Sequence[Tensor] = ()
    in_place: bool = False
    m: Tensor = field(init=False)
    gradient_sq: Tensor = field(init=False)
    input_sq: Tensor = field(init=False)
    start: Tensor = field(init=False)
    summed: Tensor = field(init=False)
    basis: Tensor = field(init=False)
    own: Tensor = field(init=False)
    mean: Tensor = field(init=False)
    _turns: HostCopy | None = None
    _memory: Tensor | None = None

    def turn(self, flag: Tensor) -> None:
        """The next call begins with the other side, if ``flag``, a 0-dim bool tensor."""
        self._turns = HostCopy(flag)

    @property
    def side(self) -> int:
        """Side of the factor that the next call begins with; on a GPU the host may wait here."""
        turns, self._turns = self._turns, None
        if turns is not None and turns.read():
            self._side = LEFT if self._side == RIGHT else RIGHT
        return self._side

    @property
    def sent(self) -> int:
        """Side of the factor whose mean ends a call: the right one or, one-sided, the other than it begins with."""
        return LEFT if self.left is not None and self.side == RIGHT else RIGHT

    def factor(self, side: int) -> Tensor:
        factor = self.right if side == RIGHT else self.left
        assert factor is not None
        return factor

    def pair(self, factor: Tensor) -> tuple[Tensor, Tensor]:
        """Left and right factor of the product of the basis and ``factor``."""
        return (factor, self.basis) if self.sent == LEFT else (self.basis, factor)

    def bind(self, gradients: Sequence[Gradient]) -> None:
        """Take the gradients of a call."""
        self.gradients = [gradient.tensor for gradient in gradients]
        batch = batch_view(self.gradients)
        self.in_place = batch is not None
        if batch is None:
            if self._memory is None:
                size = (len(gradients), *self.shape)
                self._memory = torch.empty(size, dtype=torch.float32, device=self.gradients[0].device)
            batch = self._memory
        self.m = batch

    def let_go(self) -> None:
        """Give back what was copied, until the next call."""
        self._memory = None
        del self.m

    def spectrum(self, i: int) -> Spectrum:
        """Spectrum of the mean of the i-th matrix, after a reduction.

        The singular values are those of M^, from the averaged factor, the same on all workers. ``input_sq`` adds to
        their squares what this worker's own approximation leaves of its M_w: with error feedback it is for the caller
        to put what is missing of the mean in its place (:mod:`edgc.measurement.mean_error`), which is less.
        """
        mean = self.mean[i].double()
        # r x r either way; which one a square factor takes decides the last bits of kept runs.
        gram = mean.mT @ mean if mean.shape[1] == self.rank else mean @ mean.mT
        values = torch.linalg.eigvalsh(gram).clamp(min=0).flip(0).tolist()
        rest = float(self.input_sq[i] - square_sums([self.own[i : i + 1]])[0][0])
        return Spectrum(self.shape, values, math.fsum(values) + max(0.0, rest))


def batch_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """fp32 matrices [m, n] that lie in one storage at equal distances, as one [B, m, n]; None if they do not."""
    first = tensors[0]
    storage = first.untyped_storage()._cdata  # not its address, which is 0 for all that have no entries
    steps = {b.storage_offset() - a.storage_offset() for a, b in pairwise(tensors)} or {first.numel()}
    if (
        any(t.dtype != torch.float32 or not t.is_contiguous() for t in tensors)
        or any(t.untyped_storage()._cdata != storage for t in tensors)
        or len(steps) > 1
        or min(steps) < first.numel()
    ):
        return None
    return first.as_strided((len(tensors), *first.shape), (*steps, first.shape[1], 1), first.storage_offset())


def product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """``out``, fp32, becomes the product of two fp32 matrices on a CPU, rounded to no less than that."""
    if reduced_products():
        return out.copy_(left.double() @ right.double())
    return torch.mm(left, right, out=out)


class RowBlocks:
    """Passes on a CPU, block by block, one matrix after another.

    Attributes:
        decides: whether the host looks if a message is finite; where it does not, writes are masked.
    """

    decides = True

    def __init__(self) -> None:
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")

    def load(self, xs: Sequence[Group], gradients: Members) -> None:
        """M = G + E, the norms and, but where P is the known factor, this worker's part M Q~ of P, for every x."""
        for x, g in zip(xs, gradients, strict=True):
            x.bind(g)
            gradient_sq, input_sq = [0.0] * len(x.names), [0.0] * len(x.names)
            for i, rows in _blocks(x):
                block = x.m[i, rows]
                if not x.in_place:
                    block.copy_(x.gradients[i][rows])
                norm = square_sum(block.view(-1))
                gradient_sq[i] += norm
                if x.error is not None:
                    error = x.error[i, rows]
                    block.add_(error if error.dtype == torch.float32 else self._room(error).copy_(error))
                    norm = square_sum(block.view(-1))
                input_sq[i] += norm
                if x.side == RIGHT:
                    product(block, x.start[i].mT, x.summed[i, rows])
            x.gradient_sq, x.input_sq = _fp64(gradient_sq), _fp64(input_sq)

    def right_factor(self, x: Group) -> None:
        """Q_w = P^^T M, which this worker sends."""
        for matrix, basis, factor in zip(x.m, x.basis, x.own, strict=True):
            product(basis.mT, matrix, factor)

    def store(self, xs: Sequence[Group], errors_sq: Sequence[Tensor], finite: Tensor) -> Sequence[Tensor]:
        """E = M - P^ Q_w^T and G = P^ Q^T (one-sided: or P_w Q^^T, P Q^^T), for every x; M is gone afterwards.

        What a gradient's type cannot hold of the product goes to E.

        Args:
            errors_sq: ||E||^2 as it follows from ||M||^2 and the norm of what this worker sends, [B] each.
            finite: whether the means are. On a CPU they must be; on a GPU, where nobody looks, E stays as it was if
                they are not, and G is whatever the product of the means is.

        Returns:
            ``errors_sq``; on a CPU exact also where that difference is small.
        """
        return [self._store(x, error_sq, finite) for x, error_sq in zip(xs, errors_sq, strict=True)]

    def _store(self, x: Group, error_sq: Tensor, finite: Tensor) -> Tensor:
        cancelled = (error_sq < _CANCELLED * x.input_sq).tolist()
        measured = [0.0] * len(x.names)
        narrow = x.gradients[0].dtype != torch.float32
        (own_left, own_right), (mean_left, mean_right) = x.pair(x.own), x.pair(x.mean)
        for i, rows in _blocks(x):
            block, gradient = x.m[i, rows], x.gradients[i][rows]
            if x.error is not None or cancelled[i]:
                if reduced_products():
                    block.sub_(product(own_left[i, rows], own_right[i], self._room(block)))
                else:
                    block.addmm_(own_left[i, rows], own_right[i], alpha=-1)
                if cancelled[i]:
                    measured[i] += square_sum(block.view(-1))
            left, right = mean_left[i, rows], mean_right[i]
            if narrow:
                result = product(left, right, self._room(block))
                block.add_(result)
                gradient.copy_(within(result, gradient.dtype))
                block.sub_(result.copy_(gradient))
            if x.spare is not None:
                x.spare[i, rows].copy_(block)
            if not narrow:
                product(left, right, block)
                if not x.in_place:
                    gradient.copy_(block)
        known = zip(error_sq.tolist(), cancelled, measured, strict=True)
        return _fp64([exact if small else error for error, small, exact in known])

    def keep(self, means: Sequence[Tensor], factors: Sequence[Tensor], finite: Tensor) -> list[Tensor]:
        """Every factor becomes its mean, both [B, ., .], scaled by a power of two to a norm of about one each.

        So no scale of the gradients underflows in M Q, and no bit changes. A matrix that is zero, or as good as that
        (:data:`TINY_SQ`), leaves the old factor: from zero it could never recover; and so does, on a GPU, one that is
        not finite.

        Returns:
            Of every factor which of its matrices were replaced, [B] bool; on a GPU nobody has looked at it.
        """
        replaced = []
        for mean, factor, norms in zip(means, factors, square_sums(means), strict=True):
            for new, old, norm in zip(mean, factor, norms.tolist(), strict=True):
                if norm > TINY_SQ:
                    torch.mul(new, 2.0 ** -math.frexp(math.sqrt(norm))[1], out=old)
            replaced.append(norms > TINY_SQ)
        return replaced

    def orthonormalise(self, xs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Every out becomes a basis, with orthonormal columns, of a space that contains the columns of its x.

        Equal bits give equal bits. Cholesky-QR first: C = X^T X with its diagonal scaled to one, C = L L^T in fp64,
        basis X L^-T. It loses orthogonality as the condition number of X with scaled columns grows, which the mean
        diagonal entry of C^-1 bounds from below; where that is large a second pass repairs it, and where it is too
        large for that, or norms are outside what fp32 can square, LAPACK's Householder QR takes over. The columns of a
        warm-started P are nearly orthogonal, so one pass is the rule.

        Args:
            xs: [B, m, r], m >= r, fp32, finite, any strides.
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
        transform, inverse = _cholesky_factor(x)
        if not inverse <= _TWO_PASSES:
            return False
        torch.mm(x, transform, out=out)
        if inverse > _ONE_PASS:
            transform, inverse = _cholesky_factor(out)
            if not inverse <= _ONE_PASS:
                return False
            out.copy_(torch.mm(out, transform, out=self._room(x)))
        return True

    def _room(self, block: Tensor) -> Tensor:
        """Scratch in fp32 of the shape of ``block``."""
        if self._scratch.numel() < block.numel():
            self._scratch = torch.empty(max(_BLOCK, block.numel()), dtype=torch.float32, device="cpu")
        return self._scratch[: block.numel()].view(block.shape)


def _fp64(norms: Sequence[float]) -> Tensor:
    return torch.tensor(norms, dtype=torch.float64, device="cpu")


def _blocks(x: Group) -> Iterator[tuple[int, slice]]:
    """Every matrix by its index, in slices of rows."""
    rows, height = x.shape[0], max(_ROWS, _BLOCK // x.shape[1])
    return ((i, slice(at, min(at + height, rows))) for i in range(len(x.names)) for at in range(0, rows, height))


def _cholesky_factor(x: Tensor) -> tuple[Tensor, float]:
    """T, r x r, for which ``x @ T`` is orthonormal, and the mean diagonal entry of the inverse of the scaled C; nan if
    there is none, or for norms out of range."""
    gram = torch.mm(x.t(), x).double()
    low, high = gram.diagonal().aminmax()
    if not (float(low) > _SMALLEST and float(high) < _LARGEST):
        return gram, math.nan
    scale = gram.diagonal().rsqrt()
    lower, failed = torch.linalg.cholesky_ex(gram.mul_(scale).mul_(scale[:, None]))
    if failed:
        return gram, math.nan
    eye = torch.eye(len(scale), dtype=torch.float64, device="cpu")
    transform = torch.linalg.solve_triangular(lower, eye, upper=False).t()
    flat = transform.reshape(-1)
    mean = float(torch.dot(flat, flat)) / len(scale)
    return (transform * scale[:, None]).float(), mean


class Batched(RowBlocks):
    """Passes on a GPU: whole matrices, those of one shape in one product."""

    decides = False

    def __init__(self) -> None:
        super().__init__()
        self._random: dict[tuple[int, int, torch.device], Tensor] = {}
        self._eyes: dict[tuple[int, torch.device], Tensor] = {}

    def load(self, xs: Sequence[Group], gradients: Members) -> None:
        for x, g in zip(xs, gradients, strict=True):
            x.bind(g)
            if not x.in_place:
                torch._foreach_copy_(list(x.m), list(x.gradients))
        others = []
        for x in xs:
            if (kernels := self._kernels(x)) is None:
                others.append(x)
            else:
                right = x.start if x.side == RIGHT else None
                x.gradient_sq, x.input_sq = kernels.load(x.m, x.error, right, x.summed)
        if others:
            self._load_by_torch(others)

    def _kernels(self, x: Group) -> ModuleType | None:
        """Kernels that make the passes over matrices in place of torch's operations, if any."""
        usual = x.gradients[0].dtype.itemsize > 1 and (x.error is None or x.error.is_contiguous())
        return matrix_kernels_for(x.rank, x.m.device) if usual else None

    def _load_by_torch(self, xs: Sequence[Group]) -> None:
        for x, sums in zip(xs, square_sums([x.m for x in xs]), strict=True):
            x.gradient_sq = x.input_sq = sums
        owing = [(x, x.error) for x in xs if x.error is not None]
        if owing:
            torch._foreach_add_([m for x, _ in owing for m in x.m], [e for _, errors in owing for e in errors])
            for (x, _), sums in zip(owing, square_sums([x.m for x, _ in owing]), strict=True):
                x.input_sq = sums
        for x in xs:
            if x.side == RIGHT:
                torch.bmm(x.m, x.start.mT, out=x.summed)

    def right_factor(self, x: Group) -> None:
        torch.bmm(x.basis.mT, x.m, out=x.own)

    def _store(self, x: Group, error_sq: Tensor, finite: Tensor) -> Tensor:
        if x.error is not None and x.spare is not None and (kernels := self._kernels(x)) is not None:
            kernels.store(x.m, x.error, x.spare, x.pair(x.own), x.pair(x.mean), finite, x.gradients[0].dtype)
            if not x.in_place:
                torch._foreach_copy_(list(x.gradients), list(x.m))
        else:
            self._store_by_torch(x, finite)
        if not x.in_place:
            x.let_go()
        return error_sq

    def _store_by_torch(self, x: Group, finite: Tensor) -> None:
        if x.error is not None:
            x.m.baddbmm_(*x.pair(x.own), alpha=-1)
        left, right = x.pair(x.mean)
        narrow = x.gradients[0].dtype != torch.float32
        if narrow:
            for i, gradient in enumerate(x.gradients):
                result = left[i] @ right[i]
                x.m[i].add_(result)
                gradient.copy_(within(result, gradient.dtype))
                x.m[i].sub_(gradient)
        if x.error is not None and x.spare is not None:
            # Another type than fp32 comes through fp32 as it was.
            out = x.spare if x.spare.dtype == torch.float32 else x.m
            torch.where(finite, x.m, x.error, out=out)
            if out is not x.spare:
                x.spare.copy_(out)
        if not narrow:
            torch.bmm(left, right, out=x.m)
            if not x.in_place:
                torch._foreach_copy_(list(x.gradients), list(x.m))

    def keep(self, means: Sequence[Tensor], factors: Sequence[Tensor], finite: Tensor) -> list[Tensor]:
        counts = [len(mean) for mean in means]
        norms = torch.cat(square_sums(means))
        # The exponents of norms that are not finite or too small do not matter.
        scales = torch.exp2(-norms.log2().mul(0.5).ceil()).float()[:, None, None].split(counts)
        replaced = (norms > TINY_SQ).logical_and_(finite)
        masks = replaced[:, None, None].split(counts)
        for mean, factor, scale, mask in zip(means, factors, scales, masks, strict=True):
            torch.where(mask, mean * scale, factor, out=factor)
        return list(replaced.split(counts))

    def orthonormalise(self, xs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Make orthonormal as :meth:`RowBlocks.orthonormalise`, in a fixed sequence of operations: three passes in
        fp64, the first with a shifted diagonal (shifted Cholesky-QR3: Fukaya et al., SIAM J. Sci. Comput. 42, 2020).

        That needs a condition number below some 1e10, also where columns depend on each other or are zero: therefore
        fixed random columns are added first, of 1e-7 of the norm of every column, which is what fp32 rounds off anyway.
        """
        for places in _together([x.shape for x in xs]):
            self._orthonormalise([xs[i] for i in places], [outs[i] for i in places])

    def _orthonormalise(self, xs: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Matrices with as many columns; rows of zeros below the shorter ones change neither products nor bases."""
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
        if (rank, basis.device) not in self._eyes:
            # Copied from the CPU, for which the host waits: later it may be read on another stream.
            self._eyes[rank, basis.device] = torch.eye(rank, dtype=torch.float64, device="cpu").to(basis.device)
        eye = self._eyes[rank, basis.device]
        for shift in (_SHIFT, 0.0, 0.0):
            gram = basis.mT @ basis
            if shift:
                gram.diagonal(dim1=-2, dim2=-1).add_(shift)
            lower = torch.linalg.cholesky_ex(gram).L
            basis = basis @ torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False).mT
        for part, x, out in zip(basis.split(counts), xs, outs, strict=True):
            out.copy_(part[:, : x.shape[-2]])

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
    """Positions of the matrices that are to be one batch, padded to the rows of the tallest: of as many columns, while
    the batch is so small that launching what is done with it takes longer than doing it."""
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
