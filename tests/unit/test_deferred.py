"""Steps beside the contract of all methods (``test_contract.py``): entropies under a loss scale."""

from __future__ import annotations

import math

import pytest
import torch

from edgc import EDGCConfig
from edgc.compressors import Gradient
from edgc.entropy.meter import EntropyMeter
from edgc.sections import EntropyConfig

SHAPES = {"a": (48, 40), "b": (40,), "c": (33, 64), "d": (48, 40)}


def gradients(seed: int, scale: float = 1.0) -> list[Gradient]:
    generator = torch.Generator().manual_seed(seed)
    return [Gradient(name, scale * torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


@pytest.mark.parametrize("estimator", ["gaussian", "histogram", "vasicek", "released"])
def test_entropy_is_that_of_the_gradient_without_its_loss_scale(estimator: str) -> None:
    def measured(scale: float) -> float:
        entropy = EntropyConfig(estimator=estimator, iteration_rate=1.0, entry_rate=1.0)
        meter = EntropyMeter(EDGCConfig(method="edgc", r_max=8, entropy=entropy))
        meter.scale = scale
        meter.add(1, gradients(3, scale))
        return meter.close().sampled

    assert measured(2.0**12) == pytest.approx(measured(1.0), abs=1e-4)
    assert math.isfinite(measured(1.0))
