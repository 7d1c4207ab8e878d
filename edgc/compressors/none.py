"""No compression: one all-reduce of all gradients in one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgc.compressors.base import Compressor, Gradient, Statistics, Steps, flat_view
from edgc.compressors.channel import Channel
from edgc.config import EDGCConfig
from edgc.description import Example, Look
from edgc.lazy import Tensor, torch


def dense_steps(tensors: Sequence[Tensor], channel: Channel) -> Steps:
    """Average ``tensors`` in place, one message per type; neighbours in memory are sent without a copy."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    messages = []
    for group in by_type.values():
        view = flat_view(group)
        message = torch.cat([tensor.reshape(-1) for tensor in group]) if view is None else view
        channel.mean_(message)
        messages.append(None if view is not None else message)
    yield
    for group, sent in zip(by_type.values(), messages, strict=True):
        if sent is not None:
            for tensor, part in zip(group, sent.split([tensor.numel() for tensor in group]), strict=True):
                tensor.copy_(part.view_as(tensor))


@dataclass(frozen=True, kw_only=True)
class NoCompressionConfig(EDGCConfig):
    """Uncompressed averaging."""

    method: str = "none"

    look = Look("Megatron, uncompressed", "#000000", "o")
    examples = {"none": Example(lambda m, n: 4 * m * n)}

    def build(self) -> NoCompression:
        return NoCompression()

    @classmethod
    def idle(cls, values: Mapping[str, Any]) -> dict[str, str]:
        if values["record_full_entropy"]:
            return {}
        return {"entropy": "set a method that compresses, or record_full_entropy: true"}


class NoCompression(Compressor):
    """The baseline: the exact mean. Keeps no state; ``rank`` is ignored."""

    def steps(
        self, gradients: Sequence[Gradient], channel: Channel, rank: int | None, statistics: Statistics
    ) -> Steps:
        if channel.shards:
            yield from self.scattered(gradients, channel, statistics)
        else:
            yield from dense_steps([gradient.tensor for gradient in gradients], channel)
