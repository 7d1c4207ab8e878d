"""Methods of averaging gradients, one file each; :mod:`edgc.compressors.base` holds their contract."""

from __future__ import annotations

from edgc.compressors.base import Compressor, Gradient, Statistics
from edgc.compressors.dense import BF16, NoCompression
from edgc.compressors.entrywise.quantize import Quantize
from edgc.compressors.entrywise.randomk import RandomK
from edgc.compressors.entrywise.sign import Sign
from edgc.compressors.entrywise.topk import TopK
from edgc.compressors.powersgd.algorithm import PowerSGD
from edgc.config import EDGCConfig
from edgc.runtime.channel import Channel

__all__ = [
    "BF16",
    "Channel",
    "Compressor",
    "Gradient",
    "NoCompression",
    "PowerSGD",
    "Quantize",
    "RandomK",
    "Sign",
    "Statistics",
    "TopK",
    "build",
]


def build(config: EDGCConfig) -> Compressor:
    """The compressor of ``config.method``; ``edgc`` is PowerSGD whose ranks come from the controller."""
    smallest, feedback = config.min_compression_elements, config.error_feedback
    match config.method:
        case "none":
            return NoCompression()
        case "bf16":
            return BF16()
        case "topk":
            return TopK(config.density, min_elements=smallest, error_feedback=feedback)
        case "randomk":
            return RandomK(config.density, min_elements=smallest, error_feedback=feedback, seed=config.seed)
        case "quantize":
            return Quantize(
                config.bits,
                config.rounding,
                min_elements=smallest,
                error_feedback=feedback,
                seed=config.seed,
            )
        case "sign":
            return Sign(min_elements=smallest, error_feedback=feedback)
    return PowerSGD(
        min_elements=smallest,
        error_feedback=feedback,
        warm_start=config.warm_start,
        seed=config.seed,
        factor_dtype=config.factor_dtype,
        one_sided=config.one_sided,
        error_dtype=config.error_dtype,
    )
