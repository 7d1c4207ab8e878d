"""The entropy of a rank's gradients, iteration by iteration (GDS): what the controller's windows are made of."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from edgc.compressors import Gradient
from edgc.compressors.base import compressible
from edgc.config import EDGCConfig
from edgc.entropy import on_device
from edgc.entropy.estimators import combine, estimate
from edgc.entropy.sampler import Sampler
from edgc.runtime.channel import Stopwatch, mark
from edgc.runtime.device import HostCopy, StreamTensor, host_decides


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


Of: TypeAlias = tuple[bool, int]
"""A gradient: whether it is of an embedding, and its size."""


class _Entropies:
    """Entropies of the gradients of an iteration.

    Those of a GPU are measured together, as soon as there is enough to be worth the launch of so many small operations,
    and are read late. What waits is at most :data:`edgc.entropy.on_device.MOST` entries and those of one gradient.
    """

    def __init__(self, estimator: str) -> None:
        self.estimator = estimator
        self._known: list[tuple[bool, int, float]] = []
        self._waiting: dict[tuple[int, torch.dtype], list[tuple[Of, StreamTensor]]] = defaultdict(list)
        self._held = 0
        self._coming: list[tuple[list[Of], HostCopy]] = []

    def add(self, of: Of, entries: Tensor) -> None:
        """Measure ``entries`` [n] of a gradient; on a GPU a copy of them, later."""
        if host_decides(entries.device) or self.estimator not in on_device.ESTIMATES:
            self._known.append((*of, estimate(entries, self.estimator)))
            return
        self._waiting[entries.numel(), entries.dtype].append((of, StreamTensor(entries.clone())))
        self._held += entries.numel()
        if self._held >= on_device.MOST:
            self.measure()

    def measure(self) -> None:
        """Measure what has been waiting."""
        for (numel, _), members in self._waiting.items():
            size = max(1, on_device.MOST // numel)
            for some in (members[start : start + size] for start in range(0, len(members), size)):
                rows = torch.stack([made.use() for _, made in some])
                self._coming.append(([of for of, _ in some], HostCopy(on_device.estimate_rows(rows, self.estimator))))
        self._waiting.clear()
        self._held = 0

    def read(self) -> dict[bool, list[tuple[float, int]]]:
        """Entropy and size of each gradient; by whether it is of an embedding."""
        for of, values in self._coming:
            self._known += [(*one, value) for one, value in zip(of, values.read(), strict=True)]
        self._coming.clear()
        found: dict[bool, list[tuple[float, int]]] = {False: [], True: []}
        for embedding, size, value in self._known:
            found[embedding].append((value, size))
        return found


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
        estimator = self.config.entropy.estimator
        self._sampled, self._full, self._seconds = _Entropies(estimator), _Entropies(estimator), Stopwatch()
        self._device: torch.device | None = None  # of what was sampled

    def follow(self, warm_up: bool) -> None:
        """Sample at the rate of warm-up, or of what comes after it, from this iteration on."""
        self.sampler = self._warm_up if warm_up else self._later

    def add(self, iteration: int, gradients: Sequence[Gradient]) -> None:
        """Measure what is to be measured of ``gradients`` at ``iteration``."""
        sampled = self.config.method == "edgc" and self.sampler.measures(iteration)
        if not (sampled or self.config.record_full_entropy):
            return
        least = self.config.min_compression_elements
        gradients = [gradient for gradient in gradients if compressible(gradient.tensor.shape, least)]
        if not gradients:
            return
        for gradient in gradients if self.config.record_full_entropy else ():
            self._full.add(self._of(gradient), self._unscaled(gradient.tensor.reshape(-1)))
        self._full.measure()  # copies of all gradients are not kept
        if sampled:
            device = self._device = gradients[0].tensor.device
            started = mark(device)
            for gradient in gradients:
                entries = self.sampler.take(gradient.tensor, iteration, gradient.name)
                self._sampled.add(self._of(gradient), self._unscaled(entries))
            self._seconds.add(started, mark(device))

    def _of(self, gradient: Gradient) -> Of:
        return gradient.name in self.embeddings, gradient.tensor.numel()

    def _unscaled(self, entries: Tensor) -> Tensor:
        if self.scale == 1:
            return entries
        # Divided beforehand, not subtracted as a logarithm: a power of two then changes no bit of the estimate.
        wide = entries.float() if entries.dtype == torch.float16 else entries
        return wide / self.scale

    def close(self) -> Measured:
        """What this iteration has measured; the next one begins."""
        if self._device is not None:
            started = mark(self._device)
            self._sampled.measure()
            self._seconds.add(started, mark(self._device))
        found = self._sampled.read()
        layers, embeddings = found[False], found[True]
        sizes = [sum(size for _, size in kind) for kind in (layers, embeddings)]
        share = sizes[1] / sum(sizes) if sum(sizes) else math.nan
        counted, full = self._counted(found), self._counted(self._full.read())
        measured = Measured(counted, full, _combined(layers), _combined(embeddings), share, self._seconds.seconds)
        self._start()
        return measured

    def _counted(self, entropies: dict[bool, list[tuple[float, int]]]) -> float:
        """Entropy of the parameters that count; where there are no layers, embeddings do."""
        if self.config.entropy.parameters == "layers" and entropies[False]:
            return _combined(entropies[False])
        return _combined(entropies[False] + entropies[True])


def _combined(entropies: Sequence[tuple[float, int]]) -> float:
    return combine([value for value, _ in entropies], [size for _, size in entropies])
