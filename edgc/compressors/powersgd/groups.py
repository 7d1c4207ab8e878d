"""Matrices of one shape that PowerSGD factors together (:class:`Group`), with their factors.

Factors are left [B, m, r] and right [B, r, n], for B matrices [m, n] of one shape; all products then run along rows.
B is 1 on a CPU, where batches gain nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from edgc.compressors.base import Gradient, square_sums
from edgc.runtime.device import HostCopy

LEFT, RIGHT = 0, 1

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
