"""No compression: one all-reduce of all gradients in one message."""

from __future__ import annotations

from collections.abc import Sequence

from edgc.compressors.base import Compressor, Gradient, Statistics, Steps, flat_view
from edgc.compressors.channel import Channel
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


class NoCompression(Compressor):
    """The baseline: the exact mean. Keeps no state; ``rank`` is ignored."""

    def steps(
        self, gradients: Sequence[Gradient], channel: Channel, rank: int | None, statistics: Statistics
    ) -> Steps:
        if channel.shards:
            yield from self.scattered(gradients, channel, statistics)
        else:
            yield from dense_steps([gradient.tensor for gradient in gradients], channel)
