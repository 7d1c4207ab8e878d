"""The contract that every compressor keeps.

What comes in: the local gradients of one data-parallel replica, as views into the communication buffer.
What is in the buffer afterwards: the same approximation of their mean over the replicas, on every replica bit for bit.
What is kept: whatever was not sent, as error feedback, keyed by parameter name.
Bytes are counted where a collective is called (:class:`Channel`), never computed from shapes.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Gradient:
    """A named gradient of any shape; ``tensor`` is read and overwritten in place."""

    name: str
    tensor: Tensor


@dataclass
class Statistics:
    """Sums over the gradients of one reduction; ``+`` adds two of them.

    Squared norms are of this replica's own tensors and cover the compressed matrices only: ``gradient_sq`` of G,
    ``input_sq`` of M = G + E, ``error_sq`` of what this replica keeps. Seconds are wall time on this rank.
    """

    bytes: int = 0
    seconds_compress: float = 0.0
    seconds_communicate: float = 0.0
    seconds_decompress: float = 0.0
    gradient_sq: float = 0.0
    input_sq: float = 0.0
    error_sq: float = 0.0

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def relative_error(self) -> float | None:
        """The root of error_sq / input_sq, the share of M that was kept back; None if nothing was compressed."""
        return math.sqrt(self.error_sq / self.input_sq) if self.input_sq > 0 else None

    @property
    def error_feedback_ratio(self) -> float | None:
        """The norm of the kept error over that of the gradient; None if nothing was compressed."""
        return math.sqrt(self.error_sq / self.gradient_sq) if self.gradient_sq > 0 else None


class Channel:
    """Averages tensors over a process group, counting bytes and seconds at the collective.

    ``bytes`` is the payload this rank hands to collectives (elements times element size), independent of the
    algorithm; a ring all-reduce moves 2(W-1)/W of it over each link.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.world = dist.get_world_size(group) if dist.is_initialized() else 1
        self.bytes = 0
        self.seconds = 0.0

    def mean_(self, tensor: Tensor) -> Tensor:
        """All-reduce ``tensor`` in place to its mean over the group. With one rank nothing is sent."""
        if self.world == 1:
            return tensor
        started = now(tensor)
        dist.all_reduce(tensor, group=self.group)
        tensor.div_(self.world)
        self.seconds += now(tensor) - started
        self.bytes += tensor.numel() * tensor.element_size()
        return tensor


def now(tensor: Tensor) -> float:
    """Wall clock in seconds, after the device of ``tensor`` has finished its queue."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()


class Compressor(ABC):
    """One method of averaging gradients over data-parallel replicas."""

    @abstractmethod
    def reduce(self, gradients: Sequence[Gradient], channel: Channel, rank: int | None) -> Statistics:
        """Replace every gradient by (an approximation of) its mean over ``channel``.

        Args:
            gradients: the same names, shapes and order on every rank of the group.
            rank: of the low-rank approximation; None asks for an uncompressed reduction, error feedback included.

        Raises:
            ValueError: if ``rank`` is below 1.
        """

    def state_dict(self) -> dict[str, Any]:
        """What this replica must keep to go on exactly: error feedback, warm start."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of :meth:`state_dict`."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, got keys {sorted(state)}")
