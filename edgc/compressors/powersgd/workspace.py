"""Memory of PowerSGD's reductions (:class:`Workspace`), and what its factors are sent through (:class:`Wire`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from edgc.compressors.base import Gradient, Steps
from edgc.compressors.dense import Dense
from edgc.compressors.powersgd import QUANTISED_BITS, LowRankConfig
from edgc.compressors.powersgd.groups import LEFT, RIGHT, Group
from edgc.compressors.powersgd.passes import RowBlocks
from edgc.compressors.quantised_mean import QuantisedMean
from edgc.compressors.quantization import Blocks
from edgc.runtime.channel import Channel


class Workspace:
    """Memory of the reductions of the same gradients at the same rank: allocated at the first, the same at later ones.

    Several reductions may be under way at once; they share no names and so no workspace.

    Args:
        gradients: of the first such call.
        groups: of the gradients that are sent as factors, in the order of their messages.
        key: what the workspace depends on: names, shapes, types and ranks.

    Attributes:
        registered: whether the compressor's state refers to this workspace for good.
        together: which groups the passes are given at once: on a CPU one, which then is in the cache, on a GPU all.
        dense: messages of the gradients that are not factored, :attr:`plain` their positions; :attr:`factored` those of
            every group.
        wire: what factors are sent through; None where they are sent as they are, in fp32.
        first, second: flat messages of factors; one-sided the same one.
        basis, own: flat buffers of bases, and of this worker's part of the second message, laid out like it.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        groups: Sequence[Group],
        config: LowRankConfig,
        passes: RowBlocks,
        key: object,
    ) -> None:
        self.groups, self.passes, self.key = groups, passes, key
        self.registered = False
        ends = range(len(groups) + 1) if passes.decides else (0, len(groups))
        self.together = [slice(*pair) for pair in pairwise(ends)]
        places = {gradient.name: i for i, gradient in enumerate(gradients)}
        self.factored = [[places[name] for name in group.names] for group in groups]
        members = {i for group in self.factored for i in group}
        self.plain = [i for i in range(len(gradients)) if i not in members]
        device = self.device = gradients[0].tensor.device
        lefts, rights = [LEFT] * len(groups), [RIGHT] * len(groups)
        sizes = self._sizes(lefts), self._sizes(rights)
        # One-sided, every matrix may have either of its factors sent.
        first, second = [sum(map(max, *sizes))] * 2 if config.one_sided else map(sum, sizes)

        def flat(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.float32, device=device)

        in_message = config.factor_dtype == "fp32"
        self.dense = Dense([gradients[i].tensor for i in self.plain], first if in_message else 0, device)
        self.first = self.dense.room if in_message and groups else flat(first)
        self.second = self.first if config.one_sided else flat(second)
        self.basis, self.own = flat(first), flat(second)
        bits = QUANTISED_BITS.get(config.factor_dtype)
        # Blocks of a quantiser run down the columns of a factor.
        self._by_columns = bits is not None
        self.wire = None if in_message else Wire(max(first, second), device, Blocks(bits) if bits else None)
        if config.one_sided:
            return
        self._carve("summed", self.first, lefts)
        self._carve("basis", self.basis, lefts)
        self._carve("own", self.own, rights)
        self._carve("mean", self.second, rights)
        if bits if config.orthonormal_q is None else config.orthonormal_q:
            self._carve("start", flat(second), rights)
        else:
            for group in groups:
                group.start = group.right

    def lay_out_one_sided(self) -> int:
        """Place what the sides that are next need; returns the size of the message."""
        sent = [group.sent for group in self.groups]
        self._carve("basis", self.basis, [group.side for group in self.groups])
        self._carve("own", self.own, sent)
        self._carve("mean", self.first, sent)
        for group in self.groups:
            group.start, group.summed = group.basis, group.own
        return sum(self._sizes(sent))

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


class Wire:
    """The mean of flat fp32 vectors of up to ``elements`` entries, sent in bf16 or, with ``blocks``, quantised.

    What a worker contributes is then its vector rounded to that type; the rounding goes to ``kept``. bf16 is
    all-reduced, and the reduction itself rounds too, its partial sums and the mean: by at most 2^-8 of each sum,
    unbiased and the same on all workers, known to nobody and therefore kept by nobody. It is lost once and does not
    pile up. Quantised factors are summed in fp32 and lose nothing: whoever owns a shard of the sum keeps what rounding
    the mean once more costs (:mod:`edgc.compressors.quantised_mean`).

    All buffers live as long as the object.

    Attributes:
        kept: what this worker's vector had and did not get across, after :meth:`mean`.
    """

    def __init__(self, elements: int, device: torch.device, blocks: Blocks | None) -> None:
        self.blocks = blocks
        self.kept = torch.empty(elements, dtype=torch.float32, device=device)
        self._half = torch.empty(elements if blocks is None else 0, dtype=torch.bfloat16, device=device)
        self._means: dict[tuple[int, int], QuantisedMean] = {}

    def mean(self, vector: Tensor, channel: Channel) -> Steps:
        """``vector``, contiguous fp32, becomes the mean over the ranks of what they contribute.

        Quantised, with one rank, nothing is sent and so nothing is rounded.
        """
        kept = self.kept[: vector.numel()]
        if self.blocks is None:
            half = self._half[: vector.numel()]
            half.copy_(vector)
            torch.sub(vector, kept.copy_(half), out=kept)
            channel.mean_(half)
            yield
            vector.copy_(half)
            return
        if channel.world == 1:
            kept.zero_()
            return
        key = (vector.numel(), channel.world)
        if key not in self._means:
            self._means[key] = QuantisedMean(*key, self.blocks, vector.device)
        yield from self._means[key].steps(vector, channel, kept)
        self._means[key].unpack(vector)

    def kept_of(self, view: Tensor) -> Tensor:
        """The part of ``kept`` that lies as ``view`` does in the vector of the last :meth:`mean`."""
        return self.kept.as_strided(view.shape, view.stride(), view.storage_offset())
