"""Entropies of gradients on the device against the CPU's."""

from __future__ import annotations

import pytest
import torch

from edgc.compressors import Gradient
from edgc.config import EDGCConfig
from edgc.entropy.meter import Entropies, EntropyMeter
from edgc.runtime.device import masked_path
from edgc.sections import ESTIMATORS, EntropyConfig

pytestmark = pytest.mark.gpu

SHAPES = {"words": (1000, 64), "a": (64, 128), "b": (64, 128), "c": (32, 48), "bias": (64,), "d": (3, 5)}


def measured(device: torch.device, dtype: torch.dtype, scale: float = 1.0, **entropy: str) -> Entropies:
    settings = EntropyConfig(**{"iteration_rate": 1.0, **entropy})  # type: ignore[arg-type]
    meter = EntropyMeter(EDGCConfig(method="edgc", r_max=8, entropy=settings, record_full_entropy=True), ["words"])
    meter.scale = scale
    generator = torch.Generator().manual_seed(0)
    given = []
    for name, shape in SHAPES.items():
        x = torch.randn(shape, generator=generator) ** 3
        if name == "words":
            x[torch.rand(shape[0], generator=generator) < 0.7] = 0
        given.append(Gradient(name, x.to(device, dtype)))
    meter.add(1, given[:3])
    meter.add(1, given[3:])
    return meter.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sampling", ["diagonal", "strided"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_entropies_are_the_cpus(estimator: str, sampling: str, dtype: torch.dtype, device: torch.device) -> None:
    scale = 1.0 if sampling == "diagonal" else 1024.0
    mine = measured(device, dtype, scale, estimator=estimator, sampling=sampling)
    with masked_path(False):
        reference = measured(torch.device("cpu"), dtype, scale, estimator=estimator, sampling=sampling)
    assert mine.embedding_share == reference.embedding_share > 0 and mine.seconds > 0
    for name in ("sampled", "full", "layers", "embeddings"):
        # An entry on the edge of a bin may fall to either side of it.
        assert getattr(mine, name) == pytest.approx(getattr(reference, name), abs=1e-5), name


def test_samples_drawn_on_the_device_are_as_good(device: torch.device) -> None:
    """Random ones come from its own generator."""
    mine = measured(device, torch.float32, sampling="random")
    with masked_path(False):
        reference = measured(torch.device("cpu"), torch.float32, sampling="random")
    assert mine.full == pytest.approx(reference.full, abs=1e-5)
    assert mine.sampled == pytest.approx(reference.sampled, abs=0.2)
