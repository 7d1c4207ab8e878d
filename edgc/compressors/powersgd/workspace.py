"""Memory of one PowerSGD reduction: allocated at its first call, the same at every later one.

A workspace belongs to the gradients of a call, by name, shape and type, and to a rank. Several calls may be under way
at once; they share no names and so no workspace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from edgc.compressors.base import Gradient, square_sums
from edgc.compressors.batched import Batched
from edgc.compressors.dense import Dense
from edgc.compressors.passes import Matrices, RowBlocks, batch_view
from edgc.compressors.powersgd.orthogonal import Orthonormal
from edgc.compressors.powersgd.wire import Wire, blocks_of
from edgc.runtime.device import HostCopy

LEFT, RIGHT = 0, 1


class Way(NamedTuple):
    """How a device is worked on.

    On a CPU the host looks whether a message is finite, and ``decides``. On a GPU it would have to wait; there
    everything goes on, and writes are masked.
    """

    decides: bool
    passes: RowBlocks
    orthonormalise: Callable[[Sequence[Tensor], Sequence[Tensor]], None]


def ways() -> tuple[Way, Way]:
    """That of a CPU and that of a GPU, with scratch memory of their own."""
    orthonormal = Orthonormal()
    return Way(True, RowBlocks(), orthonormal), Way(False, Batched(), orthonormal.without_decisions)


class Spectrum(NamedTuple):
    """Of a matrix M: its shape, squared singular values of an approximation, and ||M||^2."""

    shape: tuple[int, int]
    singular_sq: list[float]
    input_sq: float


class Group(Matrices):
    """Matrices of one shape and their factors, left [B, m, r] or right [B, r, n].

    Attributes:
        left, right: the warm-started P, if one-sided, and Q; the latter transposed, as a right factor.
        drawn: names whose factor is random and new.
        start, summed, basis, own, mean: of the call under way, in the workspace's flat buffers: Q~; P before and
            after orthogonalisation; the factor that this worker sends; its mean.
    """

    start: Tensor
    summed: Tensor
    basis: Tensor
    own: Tensor
    mean: Tensor

    def __init__(
        self,
        names: Sequence[str],
        shape: tuple[int, int],
        rank: int,
        error: Tensor | None,
        left: Tensor | None,
        right: Tensor,
        side: int,
    ) -> None:
        super().__init__(names, shape, rank, error)
        self.left, self.right, self._side = left, right, side
        self._turns: HostCopy | None = None
        self.drawn: set[str] = set()

    def turn(self, flag: Tensor) -> None:
        """The next call begins with the other side, if ``flag``, a 0-dim bool tensor."""
        self._turns = HostCopy(flag)

    @property
    def side(self) -> int:
        """Of the factor that the next call begins with."""
        turns, self._turns = self._turns, None
        if turns is not None and turns.read():
            self._side = self.other
        return self._side

    @property
    def other(self) -> int:
        return LEFT if self.side == RIGHT else RIGHT

    def factor(self, side: int) -> Tensor:
        factor = self.right if side == RIGHT else self.left
        assert factor is not None
        return factor

    def spectrum(self, i: int) -> Spectrum:
        """Of the mean of the i-th matrix, after a reduction.

        The singular values are those of M^, from the averaged factor, the same on all workers. ``input_sq`` adds to
        their squares what this worker's own approximation leaves of its M_w: with error feedback it is for the caller
        to put what is missing of the mean in its place (:mod:`edgc.measurement.mean_error`), which is less.
        """
        mean = self.mean[i].double()
        gram = mean.mT @ mean if mean.shape[1] == self.rank else mean @ mean.mT
        values = torch.linalg.eigvalsh(gram).clamp(min=0).flip(0).tolist()
        left = float(self.input_sq[i] - square_sums(self.own[i : i + 1])[0])
        return Spectrum(self.shape, values, math.fsum(values) + max(0.0, left))


class Workspace:
    """Buffers of the reductions of the same gradients at the same rank.

    Args:
        gradients: of the first such call.
        groups: of the gradients that are sent as factors, in the order of their messages.
        factor_dtype, one_sided, orthonormal_q: options of the compressor.

    Attributes:
        device: of the gradients.
        key: what the workspace depends on.
        way: how its device is worked on.
        registered: whether the compressor's state refers to this workspace for good.
        together: which groups the passes are given at once: on a CPU one, which then is in the cache, on a GPU all.
        dense: messages of the gradients that are not factored, :attr:`plain` their positions; :attr:`factored` those of
            every group.
        wire: what factors are sent through; None where they are sent as they are, in fp32.
        first, second: flat messages of factors; only ``first`` if one-sided.
        basis, own: flat buffers laid out like the messages.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        groups: Sequence[Group],
        factor_dtype: str,
        one_sided: bool,
        way: Way,
        key: object,
        orthonormal_q: bool | None = None,
    ) -> None:
        self.groups, self.way, self.key = groups, way, key
        self.registered = False
        ends = range(len(groups) + 1) if way.decides else (0, len(groups))
        self.together = [slice(*pair) for pair in pairwise(ends)]
        at = {gradient.name: i for i, gradient in enumerate(gradients)}
        self.factored = [[at[name] for name in group.names] for group in groups]
        members = {i for places in self.factored for i in places}
        self.plain = [i for i in range(len(gradients)) if i not in members]
        device = self.device = gradients[0].tensor.device
        lefts, rights = self._sizes([LEFT] * len(groups)), self._sizes([RIGHT] * len(groups))
        # One-sided, every matrix may have either of its factors sent.
        largest = [max(pair) for pair in zip(lefts, rights, strict=True)]
        first, second = (sum(largest), 0) if one_sided else (sum(lefts), sum(rights))

        def flat(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.float32, device=device)

        in_message = factor_dtype == "fp32"
        self.dense = Dense([gradients[i].tensor for i in self.plain], first if in_message else 0, device)
        self.first = self.dense.room if in_message and groups else flat(first)
        self.second, self.basis, self.own = flat(second), flat(first), flat(first if one_sided else second)
        blocks = blocks_of(factor_dtype)
        # Blocks of a quantiser run down the columns of a factor.
        self._by_columns = blocks is not None
        self.wire = None if in_message else Wire(max(first, second), device, blocks)
        if one_sided:
            return
        apart = blocks is not None if orthonormal_q is None else orthonormal_q
        start = flat(second if apart else 0)
        for side, name, buffer in (
            (LEFT, "summed", self.first),
            (LEFT, "basis", self.basis),
            (RIGHT, "own", self.own),
            (RIGHT, "mean", self.second),
        ):
            self._carve(name, buffer, [side] * len(groups))
        if apart:
            self._carve("start", start, [RIGHT] * len(groups))
        else:
            for group in groups:
                group.start = group.right

    def lay_out_one_sided(self) -> tuple[Tensor, Tensor]:
        """Place bases, own factors and means for the sides that are next; returns the flat means and own factors."""
        sent = [group.other for group in self.groups]
        self._carve("basis", self.basis, [group.side for group in self.groups])
        self._carve("own", self.own, sent)
        self._carve("mean", self.first, sent)
        size = sum(self._sizes(sent))
        return self.first[:size], self.own[:size]

    def _sizes(self, sides: Sequence[int]) -> list[int]:
        return [len(g.names) * g.rank * g.shape[side] for g, side in zip(self.groups, sides, strict=True)]

    def _carve(self, name: str, flat: Tensor, sides: Sequence[int]) -> None:
        """Give every group its part of a flat buffer, one after another."""
        sizes = self._sizes(sides)
        for group, side, part in zip(self.groups, sides, flat[: sum(sizes)].split(sizes), strict=True):
            count, rank, length = len(group.names), group.rank, group.shape[side]
            if side == RIGHT:
                view = part.view(count, rank, length)
            elif self._by_columns:
                view = part.view(count, rank, length).mT
            else:
                view = part.view(count, length, rank)
            setattr(group, name, view)


def grouped(gradients: Sequence[Gradient], batches: bool, side: Callable[[str], int]) -> list[list[Gradient]]:
    """Gradients ordered by shape; with ``batches`` neighbours of one shape, rank and side together if they are one
    tensor."""
    groups: list[list[Gradient]] = []
    for gradient in sorted(gradients, key=lambda g: tuple(g.tensor.shape)):
        last = groups[-1] if groups and batches else []
        if (
            last
            and (last[0].tensor.shape, last[0].rank) == (gradient.tensor.shape, gradient.rank)
            and side(last[0].name) == side(gradient.name)
            and batch_view([g.tensor for g in [*last, gradient]]) is not None
        ):
            last.append(gradient)
        else:
            groups.append([gradient])
    return groups
