"""Report of a rehearsal: what was sent, what it did to the gradients, and what memory it needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Memory = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Report:
    """Measurements of the steps so far, of one replica where it is not said otherwise.

    Attributes:
        replicas, steps, skipped: how many there were; a step or round with a gradient that is not finite is skipped.
        bytes: sent a step, by kind of collective.
        dense_bytes: of a step without compression: gradients as they are, all-reduced.
        rank: of the last step in which something was measured; None where nothing is of low rank.
        entropy: the last that was measured, in nats; nan where none was.
        mean_error: what the mean of the replicas' gradients lacked in the last window, relative to it; nan if unknown.
        gap: largest distance of a replica's weights from the first one's, relative to them; 0 where they are equal.
        memory: bytes of all replicas here, and of one replica by itself, by what they hold; without activations and
            scratch.
    """

    replicas: int
    steps: int
    skipped: int
    bytes: Mapping[str, float]
    dense_bytes: float
    rank: int | None
    entropy: float
    mean_error: float
    gap: float
    memory: Memory

    @property
    def sent(self) -> float:
        """Bytes a step, of all collectives."""
        return sum(self.bytes.values())

    @property
    def share(self) -> float:
        """Bytes sent, as a share of a dense all-reduce at every step."""
        return self.sent / self.dense_bytes if self.dense_bytes else math.nan

    def __str__(self) -> str:
        lines = [f"{self.replicas} replicas, {self.steps} steps, {self.skipped} skipped"]
        lines.append(f"sent a step by each: {self.sent:,.0f} bytes, {self.share:.2%} of a dense all-reduce")
        lines += [f"  {kind.replace('_', '-')}: {count:,.0f}" for kind, count in sorted(self.bytes.items())]
        if self.rank is not None:
            lines.append(f"rank {self.rank}")
        for name, value, unit in (("entropy", self.entropy, " nats"), ("error of the mean", self.mean_error, "")):
            if math.isfinite(value):
                lines.append(f"{name} {value:.3f}{unit}")
        lines.append(f"gap between replicas {self.gap:.2g}")
        here, each = (sum(pair[index] for pair in self.memory.values()) / 1e6 for index in (0, 1))
        lines.append(f"memory: {here:,.1f} MB here, {each:,.1f} MB on each of as many machines")
        lines += [f"  {what}: {a / 1e6:,.1f}, {b / 1e6:,.1f}" for what, (a, b) in self.memory.items() if a or b]
        return "\n".join(lines)


def size(things: Iterable[Any]) -> int:
    """Bytes of all tensors inside nested mappings and sequences, each once."""
    return sum({tensor.data_ptr(): tensor.nbytes for thing in things for tensor in _tensors(thing)}.values())


def _tensors(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from _tensors(value)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from _tensors(value)


def distance(one: Mapping[str, Tensor], others: Sequence[Mapping[str, Tensor]]) -> float:
    """Largest distance of other weights from ``one``, relative to it."""
    norm = _norm(one.values())
    gaps = [_norm(p.detach() - other[name].detach() for name, p in one.items()) for other in others]
    return max(gaps, default=0.0) / norm if norm else 0.0


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.detach().double().square().sum()) for tensor in tensors))
