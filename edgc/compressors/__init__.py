"""Methods of averaging gradients, one file each; :mod:`edgc.compressors.base` holds their contract."""

from __future__ import annotations

from edgc.compressors.base import Compressor, Gradient, Statistics
from edgc.compressors.channel import Channel
from edgc.compressors.none import NoCompression
from edgc.compressors.powersgd import PowerSGD
from edgc.config import EDGCConfig

__all__ = ["Channel", "Compressor", "Gradient", "NoCompression", "PowerSGD", "Statistics", "build"]


def build(config: EDGCConfig) -> Compressor:
    """The compressor of ``config.method``; ``edgc`` is PowerSGD whose ranks come from the controller."""
    if config.method == "none":
        return NoCompression()
    return PowerSGD(
        min_elements=config.min_compression_elements,
        error_feedback=config.error_feedback,
        warm_start=config.warm_start,
        seed=config.seed,
    )
