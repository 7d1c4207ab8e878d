"""The entropy of a rank's gradients, iteration by iteration (GDS): what the controller's windows are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgc.compressors import Gradient
from edgc.compressors.sizes import compressible
from edgc.config import EDGCConfig
from edgc.entropy.estimators import combine, estimate
from edgc.entropy.sampler import Sampler
from edgc.runtime.channel import mark, seconds_between


@dataclass(frozen=True)
class Measured:
    """One iteration on this rank: entropies in nats, nan if not measured, and what the sampled one took."""

    sampled: float
    full: float
    seconds: float


class EntropyMeter:
    """Entropy of the compressible gradients, sampled and, for studies, of all entries.

    Attributes:
        scale: what the gradients come multiplied by, a loss scale; entropies are of the gradients without it.
    """

    def __init__(self, config: EDGCConfig) -> None:
        self.config = config
        self.sampler = Sampler(config.entropy)
        self.scale = 1.0
        self._start()

    def _start(self) -> None:
        self._sampled: list[tuple[float, int]] = []
        self._full: list[tuple[float, int]] = []
        self._seconds = 0.0

    def add(self, iteration: int, gradients: Sequence[Gradient]) -> None:
        """Measure what is to be measured of ``gradients`` at ``iteration``."""
        sampled = self.config.method == "edgc" and self.sampler.measures(iteration)
        if not (sampled or self.config.record_full_entropy):
            return
        for gradient in gradients:
            if not compressible(gradient.tensor.shape, self.config.min_compression_elements):
                continue
            size = gradient.tensor.numel()
            if self.config.record_full_entropy:
                self._full.append((self._entropy(gradient.tensor.reshape(-1)), size))
            if sampled:
                started = mark(gradient.tensor.device)
                entries = self.sampler.take(gradient.tensor, iteration, gradient.name)
                self._sampled.append((self._entropy(entries), size))
                self._seconds += seconds_between(started, mark(gradient.tensor.device))

    def _entropy(self, entries: Tensor) -> float:
        if self.scale != 1:
            # Divided beforehand, not subtracted as a logarithm: a power of two then changes no bit of the estimate.
            wide = entries.float() if entries.dtype == torch.float16 else entries
            entries = wide / self.scale
        return estimate(entries, self.config.entropy.estimator)

    def close(self) -> Measured:
        """What this iteration has measured; the next one begins."""
        measured = Measured(_combined(self._sampled), _combined(self._full), self._seconds)
        self._start()
        return measured


def _combined(entropies: Sequence[tuple[float, int]]) -> float:
    return combine([value for value, _ in entropies], [size for _, size in entropies])
