"""The gradients of a call as one vector: what the entrywise methods work on, in the same memory at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from edgc.compressors.base import Gradient
from edgc.lazy import Tensor, torch


@dataclass
class Flat:
    """The gradients of a call end to end in flat fp32 vectors, each at a multiple of ``align``.

    Attributes:
        buffers: whatever else a method wants to keep from call to call.
        work: M; what is kept, afterwards.
        spare: the errors of last time, free once M is known to get across; then the result.
        velocity: under momentum correction, the velocities of this step; None without.
        last_velocity: those of the step before.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    buffers: dict[str, Any]
    work: Tensor
    spare: Tensor
    velocity: Tensor | None = None
    last_velocity: Tensor | None = None

    @classmethod
    def of(cls, gradients: Sequence[Gradient], align: int, momentum: bool) -> Flat:
        sizes = [-(-g.tensor.numel() // align) * align for g in gradients]
        *offsets, total = accumulate(sizes, initial=0)
        shapes = tuple(g.tensor.shape for g in gradients)
        device = gradients[0].tensor.device
        room = [torch.empty(total, dtype=torch.float32, device=device) for _ in range(4 if momentum else 2)]
        return cls(tuple(g.name for g in gradients), shapes, tuple(offsets), {}, *room)

    def parts(self, vector: Tensor) -> list[Tensor]:
        """Flat views of the gradients' own parts of ``work``, ``spare`` or a vector like them."""
        return [
            vector[offset : offset + shape.numel()] for offset, shape in zip(self.offsets, self.shapes, strict=True)
        ]

    @property
    def velocities(self) -> dict[str, Tensor]:
        """The parts of ``velocity`` by name, in the gradients' shapes; empty without momentum."""
        parts = [] if self.velocity is None else self.parts(self.velocity)
        named = zip(self.names, self.shapes, parts, strict=False)
        return {name: part.view(shape) for name, shape, part in named}

    def swap(self) -> None:
        """What is left in ``work`` is kept until the next call has brought what follows from it."""
        self.work, self.spare = self.spare, self.work
        self.velocity, self.last_velocity = self.last_velocity, self.velocity

    def clear_gaps(self) -> None:
        """Zeros between the gradients of ``work``."""
        ends = [*self.offsets[1:], len(self.work)]
        for offset, shape, end in zip(self.offsets, self.shapes, ends, strict=True):
            self.work[offset + shape.numel() : end].zero_()
