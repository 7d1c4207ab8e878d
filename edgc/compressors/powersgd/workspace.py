"""Memory of one PowerSGD reduction: allocated at its first call, the same at every later one.

A workspace belongs to the gradients of a call, by name, shape and type, and to a rank. Several calls may be under way
at once; they share no names and so no workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from edgc.compressors.base import Gradient, Steps
from edgc.compressors.channel import Channel
from edgc.compressors.norms import square_sums
from edgc.compressors.powersgd.matrices import Matrices, batch_view
from edgc.compressors.powersgd.messages import Dense, Wire, blocks_of
from edgc.compressors.tensors import finite
from edgc.runtime.device import Later

LEFT, RIGHT = 0, 1


class Group:
    """Matrices of one shape and their factors, left [B, m, r] or right [B, r, n].

    Attributes:
        x: the matrices.
        factors: the warm-started P, if one-sided, and Q; the latter transposed, as a right factor.
        drawn: names whose factor is random and new.
        start, summed, basis, own, mean: of the call under way, in the workspace's flat buffers: Q~; P before and
            after orthogonalisation; the factor that this worker sends; its mean.
    """

    start: Tensor
    summed: Tensor
    basis: Tensor
    own: Tensor
    mean: Tensor

    def __init__(self, x: Matrices, factors: tuple[Tensor | None, Tensor], side: int) -> None:
        self.x, self.factors, self._side = x, factors, side
        self._turns: Later | None = None
        self.drawn: set[str] = set()

    def turn(self, flag: Tensor) -> None:
        """The next call begins with the other side, if ``flag``, a 0-dim bool tensor."""
        self._turns = Later(flag)

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
        factor = self.factors[side]
        assert factor is not None
        return factor


class Workspace:
    """Buffers of the reductions with one :func:`signature`.

    Args:
        gradients, rank: of the first such call.
        groups: of the gradients that are sent as factors, in the order of their messages.
        factor_dtype, one_sided: options of the compressor.

    Attributes:
        registered: whether the compressor's state refers to this workspace.
        dense: messages of the gradients that are not factored, :attr:`plain` their positions.
        first, second: flat messages of factors; only ``first`` if one-sided.
        basis, own: flat buffers laid out like the messages.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        rank: int | None,
        groups: Sequence[Group],
        factor_dtype: str,
        one_sided: bool,
    ) -> None:
        self.signature = signature(gradients, rank)
        self.groups, self.one_sided = groups, one_sided
        self.registered = False
        self._at = {gradient.name: i for i, gradient in enumerate(gradients)}
        factored = {name for group in groups for name in group.x.names}
        self.plain = [i for i, gradient in enumerate(gradients) if gradient.name not in factored]
        device = gradients[0].tensor.device
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
        self.wire = Wire(factor_dtype, max(first, second), device, blocks)
        if one_sided:
            return
        start = flat(second if blocks is not None else 0)
        for side, name, buffer in (
            (LEFT, "summed", self.first),
            (LEFT, "basis", self.basis),
            (RIGHT, "own", self.own),
            (RIGHT, "mean", self.second),
        ):
            self._carve(name, buffer, [side] * len(groups))
        if blocks is not None:
            self._carve("start", start, [RIGHT] * len(groups))
        else:
            for group in groups:
                group.start = group.factor(RIGHT)

    def lay_out_one_sided(self) -> tuple[Tensor, Tensor]:
        """Place bases, own factors and means for the sides that are next; returns the flat means and own factors."""
        sent = [group.other for group in self.groups]
        self._carve("basis", self.basis, [group.side for group in self.groups])
        self._carve("own", self.own, sent)
        self._carve("mean", self.first, sent)
        size = sum(self._sizes(sent))
        return self.first[:size], self.own[:size]

    def send_first(self, dense: Sequence[Tensor], factors: Tensor, channel: Channel) -> Steps:
        """Average everything dense and, in the same message if they are sent in fp32, the first factors."""
        if self.wire.kept is None:
            self.dense.start(dense, channel, factors.numel())
            yield
        else:
            self.dense.start(dense, channel, 0)
            yield from self.wire.mean(factors, channel)

    def first_finite(self, factors: Tensor) -> Tensor:
        """Whether that was finite."""
        return finite([*self.dense.messages, *([] if self.wire.kept is None else [factors])])

    def subtract_kept(self, left_over: Sequence[Tensor]) -> None:
        """What rounding kept of this worker's factors was not sent: add its norms to ``left_over``, one a group."""
        if self.wire.kept is None:
            return
        for group, norms in zip(self.groups, left_over, strict=True):
            own = group.own
            kept = self.wire.kept.as_strided(own.shape, own.stride(), own.storage_offset())
            norms.add_(square_sums(kept))
            own.sub_(kept)

    def bind(self, gradients: Sequence[Gradient]) -> None:
        """Take the gradients of a call that has this workspace's signature."""
        for group in self.groups:
            mine = [gradients[self._at[name]] for name in group.x.names]
            group.x.bind([g.tensor for g in mine], [g.needed for g in mine])

    def _sizes(self, sides: Sequence[int]) -> list[int]:
        xs = [group.x for group in self.groups]
        return [len(x.names) * x.rank * x.shape[side] for x, side in zip(xs, sides, strict=True)]

    def _carve(self, name: str, flat: Tensor, sides: Sequence[int]) -> None:
        """Give every group its part of a flat buffer, one after another."""
        sizes = self._sizes(sides)
        for group, side, part in zip(self.groups, sides, flat[: sum(sizes)].split(sizes), strict=True):
            count, rank, length = len(group.x.names), group.x.rank, group.x.shape[side]
            if side == RIGHT:
                view = part.view(count, rank, length)
            elif self._by_columns:
                view = part.view(count, rank, length).mT
            else:
                view = part.view(count, length, rank)
            setattr(group, name, view)


def signature(gradients: Sequence[Gradient], rank: int | None) -> tuple[Any, ...]:
    """What a workspace depends on."""
    described = ((g.name, tuple(g.tensor.shape), g.tensor.dtype, g.tensor.device, g.rank) for g in gradients)
    return rank, *described


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
