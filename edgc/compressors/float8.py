"""Block quantisation to eight-bit floats, e4m3 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022)."""

from __future__ import annotations

from edgc.compressors.quantization import Blocks, Scratch
from edgc.lazy import Tensor, torch

LARGEST = 448
"""The largest number of e4m3: 4 bits of exponent, 3 of fraction, no infinity."""


class Float8(Blocks):
    """Quantiser as :class:`~edgc.compressors.quantization.Blocks` with the numbers of e4m3 in place of whole ones.

    A block's step is amax / 448. Beside int8 of the same bytes small entries of a block keep their leading bits, down
    to 2^-9 steps, and large ones have fewer: an error of at most 1/16 of an entry, and not of 1/254 of the largest.
    """

    has_kernels = False

    def __init__(self) -> None:
        super().__init__(8, levels=LARGEST)

    def _choose_levels(self, blocks: Tensor, scratch: Scratch, generator: torch.Generator | None) -> None:
        inverse = torch.reciprocal(scratch.step, out=scratch.inverse).nan_to_num_(0, 0, 0)
        levels = torch.mul(blocks, inverse[:, None], out=scratch.levels).clamp_(-LARGEST, LARGEST)
        levels.copy_(levels.to(torch.float8_e4m3fn))

    def _fold(self, codes: Tensor, scratch: Scratch) -> None:
        codes[:, 0].view(torch.float8_e4m3fn).copy_(scratch.levels)

    def _unfold(self, codes: Tensor, scratch: Scratch) -> None:
        scratch.levels.copy_(codes[:, 0].view(torch.float8_e4m3fn))
