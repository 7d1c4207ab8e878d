"""PowerSGD by the settings that a test is about."""

from __future__ import annotations

from typing import Any

from edgc.compressors.powersgd import PowerSGDConfig
from edgc.compressors.powersgd.algorithm import PowerSGD


def power_sgd(*, min_elements: int = 1024, always_factor: bool = False, **settings: Any) -> PowerSGD:
    compressor = PowerSGD(PowerSGDConfig(rank=1, min_compression_elements=min_elements, **settings))
    compressor.always_factor = always_factor
    return compressor
