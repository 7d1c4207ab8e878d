"""One bit an entry: its sign, times the mean magnitude of its block, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass

from edgc.compressors.entrywise.feedback import EntrywiseConfig
from edgc.compressors.entrywise.quantize import Quantised
from edgc.compressors.quantization.blocks import Blocks
from edgc.description import Example, Look


@dataclass(frozen=True, kw_only=True)
class SignConfig(EntrywiseConfig):
    """One bit an entry with error feedback, as 1-bit Adam (Tang et al., ICML 2021) averages its momentum."""

    method: str = "sign"

    look = Look("Sign", "#8C510A", "h", ":")
    examples = {"sign": Example(lambda m, n: m * n * (1 / 8 + 2 / 64))}

    def build(self) -> Sign:
        return Sign(self, Blocks(1))


class Sign(Quantised):
    """Signs of blocks of 64, averaged like other quantised vectors: 1.25 bits an entry.

    The mean of the workers is rounded to signs once more by the worker that owns the shard, which keeps what that
    loses, as 1-bit Adam's server does.
    """
