"""Entropy of a rank's gradients, iteration by iteration (GDS), which the controller's windows are made of."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edgc.compressors import Gradient
from edgc.compressors.base import compressible
from edgc.config import EDGCConfig
from edgc.entropy import on_device
from edgc.entropy.estimators import combine, estimate
from edgc.entropy.sampler import Sampler
from edgc.runtime.channel import Stopwatch, mark
from edgc.runtime.device import HostCopy, StreamTensor, host_decides

Kind = tuple[bool, int]
"""A gradient: whether it is of an embedding, and its size."""


@dataclass(frozen=True)
class Entropies:
    """One iteration on this rank: entropies in nats, nan if not measured, and the time of the sampled one.

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


class _Entropies:
    """Entropies of the gradients of an iteration.

    Those of a GPU are measured together, as soon as there is enough to be worth the launch of so many small operations,
    and are read late. At most :data:`edgc.entropy.on_device.MOST` entries and those of one gradient wait.
    """

    def __init__(self, estimator: str) -> None:
        self.estimator = estimator
        self._known: list[tuple[Kind, float]] = []
        self._waiting: dict[tuple[int, torch.dtype], list[tuple[Kind, StreamTensor]]] = defaultdict(list)
        self._coming: list[tuple[list[Kind], HostCopy]] = []

    def add(self, kind: Kind, entries: Tensor) -> None:
        """Measure ``entries`` [n] of a gradient; on a GPU a copy of them, later."""
        if host_decides(entries.device) or self.estimator not in on_device.ESTIMATES:
            self._known.append((kind, estimate(entries, self.estimator)))
            return
        self._waiting[entries.numel(), entries.dtype].append((kind, StreamTensor(entries.clone())))
        if sum(numel * len(members) for (numel, _), members in self._waiting.items()) >= on_device.MOST:
            self.measure()

    def measure(self) -> None:
        """Measure the gradients that have been waiting."""
        for (numel, _), members in self._waiting.items():
            size = max(1, on_device.MOST // numel)
            for batch in (members[start : start + size] for start in range(0, len(members), size)):
                rows = torch.stack([entries.use() for _, entries in batch])
                copy = HostCopy(on_device.estimate_rows(rows, self.estimator))
                self._coming.append(([kind for kind, _ in batch], copy))
        self._waiting.clear()

    def read(self) -> dict[bool, list[tuple[float, int]]]:
        """Entropy and size of each gradient; by whether it is of an embedding."""
        for kinds, later in self._coming:
            self._known += zip(kinds, later.read(), strict=True)
        self._coming.clear()
        by_kind: dict[bool, list[tuple[float, int]]] = {False: [], True: []}
        for (embedding, size), value in self._known:
            by_kind[embedding].append((value, size))
        return by_kind


class EntropyMeter:
    """Entropy of the compressible gradients, sampled and, for studies, of all entries.

    Args:
        embeddings: names of this rank's parameters that are embeddings.

    Attributes:
        scale: what the gradients come multiplied by, a loss scale; entropies are of the gradients without it.
    """

    def __init__(self, config: EDGCConfig, embeddings: Collection[str] = ()) -> None:
        self.config, self.embeddings = config, frozenset(embeddings)
        self.sampler = Sampler(config.entropy)
        self.scale = 1.0
        self._start()

    def _start(self) -> None:
        estimator = self.config.entropy.estimator
        self._sampled, self._full, self._seconds = _Entropies(estimator), _Entropies(estimator), Stopwatch()
        self._device: torch.device | None = None  # of what was sampled

    def add(self, iteration: int, gradients: Sequence[Gradient]) -> None:
        """Measure ``gradients`` at ``iteration``, if and as far as the settings ask for it."""
        sampled = self.config.method == "edgc" and self.sampler.measures(iteration)
        if not (sampled or self.config.record_full_entropy):
            return
        least = self.config.min_compression_elements
        gradients = [gradient for gradient in gradients if compressible(gradient.tensor.shape, least)]
        if not gradients:
            return
        for gradient in gradients if self.config.record_full_entropy else ():
            self._add(self._full, gradient, gradient.tensor.reshape(-1))
        self._full.measure()  # copies of all gradients are not kept
        if sampled:
            device = self._device = gradients[0].tensor.device
            started = mark(device)
            for gradient in gradients:
                self._add(self._sampled, gradient, self.sampler.take(gradient.tensor, iteration, gradient.name))
            self._seconds.add(started, mark(device))

    def _add(self, entropies: _Entropies, gradient: Gradient, entries: Tensor) -> None:
        if self.scale != 1:
            # Divided beforehand, not subtracted as a logarithm: a power of two then changes no bit of the estimate.
            entries = (entries.float() if entries.dtype == torch.float16 else entries) / self.scale
        entropies.add((gradient.name in self.embeddings, gradient.tensor.numel()), entries)

    def close(self) -> Entropies:
        """Measurements of this iteration; the next one begins."""
        if self._device is not None:
            started = mark(self._device)
            self._sampled.measure()
            self._seconds.add(started, mark(self._device))
        sampled = self._sampled.read()
        layers, embeddings = ([size for _, size in sampled[kind]] for kind in (False, True))
        entries = sum(layers) + sum(embeddings)
        measured = Entropies(
            sampled=self._counted(sampled),
            full=self._counted(self._full.read()),
            layers=_combined(sampled[False]),
            embeddings=_combined(sampled[True]),
            embedding_share=sum(embeddings) / entries if entries else math.nan,
            seconds=self._seconds.seconds,
        )
        self._start()
        return measured

    def _counted(self, entropies: dict[bool, list[tuple[float, int]]]) -> float:
        """Entropy of the parameters that count; where there are no layers, embeddings do."""
        if self.config.entropy.parameters == "layers" and entropies[False]:
            return _combined(entropies[False])
        return _combined(entropies[False] + entropies[True])


def _combined(entropies: Sequence[tuple[float, int]]) -> float:
    return combine([value for value, _ in entropies], [size for _, size in entropies])


def embeddings(module: nn.Module) -> set[nn.Parameter]:
    """Parameters of ``module`` that look tokens or positions up, or that turn hidden states into logits.

    They are the weights of ``nn.Embedding``, ``nn.EmbeddingBag`` and Megatron's embedding, whatever is tied to them,
    what Megatron marks as embedding or output, and what ``get_output_embeddings()`` gives (Hugging Face). An output
    layer that nothing of this names counts as a layer.
    """
    result: set[nn.Parameter] = set()
    for part in module.modules():  # Megatron's own embedding is no nn.Embedding
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) or type(part).__name__ == "VocabParallelEmbedding":
            result.update(part.parameters(recurse=False))
    result.update(part for part in module.parameters() if getattr(part, "is_embedding_or_output_parameter", False))
    output = getattr(module, "get_output_embeddings", lambda: None)()
    if isinstance(output, nn.Module):
        result.update(output.parameters(recurse=False))
    return result
