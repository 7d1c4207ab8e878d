"""How PowerSGD's factors travel in fewer bits than fp32.

All buffers live as long as the object; nothing is allocated from call to call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgc.compressors.base import Steps
from edgc.compressors.powersgd import QUANTISED_BITS
from edgc.compressors.quantization import Blocks, QuantisedMean
from edgc.runtime.channel import Channel


def blocks_of(factor_dtype: str) -> Blocks | None:
    """The quantiser of a factor type, None for floating-point ones."""
    return Blocks(QUANTISED_BITS[factor_dtype]) if factor_dtype in QUANTISED_BITS else None


class Wire:
    """The mean of flat fp32 vectors of up to ``elements`` entries, sent in bf16 or, with ``blocks``, quantised.

    What a worker contributes is then its vector rounded to that type; the rounding goes to ``kept``. bf16 is
    all-reduced, and the reduction itself rounds too, its partial sums and the mean: by at most 2^-8 of each sum,
    unbiased and the same on all workers, known to nobody and therefore kept by nobody. It is lost once and does not
    pile up. Quantised factors are summed in fp32 and lose nothing: whoever owns a shard of the sum keeps what rounding
    the mean once more costs (:mod:`edgc.compressors.quantization`).

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
