"""The entropy of a rank's gradients, iteration by iteration (GDS): what the controller's windows are made of."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

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
    """One iteration on this rank: entropies in nats, nan if not measured, and what the sampled one took.

    Attributes:
        sampled, full: of the parameters that count (:attr:`edgc.sections.EntropyConfig.parameters`), from samples and
            from all entries.
        layers, embeddings: the same samples by kind of parameters.
        embedding_share: of the entries of all compressible gradients, those of embeddings.
        seconds: of the samples.
    """

    sampled: float
    full: float
    layers: float
    embeddings: float
    embedding_share: float
    seconds: float


class EntropyMeter:
    """Entropy of the compressible gradients, sampled and, for studies, of all entries.

    Args:
        embeddings: names of this rank's parameters that are embeddings.

    Attributes:
        sampler: that of this phase of the run.
        scale: what the gradients come multiplied by, a loss scale; entropies are of the gradients without it.
    """

    def __init__(self, config: EDGCConfig, embeddings: Collection[str] = ()) -> None:
        self.config, self.embeddings = config, frozenset(embeddings)
        self.sampler = self._later = Sampler(config.entropy)
        rate = config.entropy.warmup_rate
        self._warm_up = Sampler(replace(config.entropy, iteration_rate=rate)) if rate is not None else self._later
        self.scale = 1.0
        self._start()

    def _start(self) -> None:
        # Entropy and size of each gradient; by whether it is of an embedding.
        self._sampled: dict[bool, list[tuple[float, int]]] = defaultdict(list)
        self._full: dict[bool, list[tuple[float, int]]] = defaultdict(list)
        self._seconds = 0.0

    def follow(self, warm_up: bool) -> None:
        """Sample at the rate of warm-up, or of what comes after it, from this iteration on."""
        self.sampler = self._warm_up if warm_up else self._later

    def add(self, iteration: int, gradients: Sequence[Gradient]) -> None:
        """Measure what is to be measured of ``gradients`` at ``iteration``."""
        sampled = self.config.method == "edgc" and self.sampler.measures(iteration)
        if not (sampled or self.config.record_full_entropy):
            return
        for gradient in gradients:
            if not compressible(gradient.tensor.shape, self.config.min_compression_elements):
                continue
            size, kind = gradient.tensor.numel(), gradient.name in self.embeddings
            if self.config.record_full_entropy:
                self._full[kind].append((self._entropy(gradient.tensor.reshape(-1)), size))
            if sampled:
                started = mark(gradient.tensor.device)
                entries = self.sampler.take(gradient.tensor, iteration, gradient.name)
                self._sampled[kind].append((self._entropy(entries), size))
                self._seconds += seconds_between(started, mark(gradient.tensor.device))

    def _entropy(self, entries: Tensor) -> float:
        if self.scale != 1:
            # Divided beforehand, not subtracted as a logarithm: a power of two then changes no bit of the estimate.
            wide = entries.float() if entries.dtype == torch.float16 else entries
            entries = wide / self.scale
        return estimate(entries, self.config.entropy.estimator)

    def close(self) -> Measured:
        """What this iteration has measured; the next one begins."""
        layers, embeddings = self._sampled[False], self._sampled[True]
        sizes = [sum(size for _, size in kind) for kind in (layers, embeddings)]
        share = sizes[1] / sum(sizes) if sum(sizes) else math.nan
        counted, full = self._counted(self._sampled), self._counted(self._full)
        measured = Measured(counted, full, _combined(layers), _combined(embeddings), share, self._seconds)
        self._start()
        return measured

    def _counted(self, entropies: dict[bool, list[tuple[float, int]]]) -> float:
        """Entropy of the parameters that count; where there are no layers, embeddings do."""
        if self.config.entropy.parameters == "layers" and entropies[False]:
            return _combined(entropies[False])
        return _combined(entropies[False] + entropies[True])


def _combined(entropies: Sequence[tuple[float, int]]) -> float:
    return combine([value for value, _ in entropies], [size for _, size in entropies])
