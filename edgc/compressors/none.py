"""No compression: one all-reduce of all gradients in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgc.compressors.base import Channel, Compressor, Gradient, Statistics, now


def reduce_dense(tensors: Sequence[Tensor], channel: Channel) -> None:
    """Average ``tensors`` in place, in one message; a single tensor is sent without a copy."""
    if not tensors:
        return
    if len(tensors) == 1 and tensors[0].is_contiguous():
        channel.mean_(tensors[0])
        return
    message = torch.cat([tensor.reshape(-1) for tensor in tensors])
    channel.mean_(message)
    for tensor, part in zip(tensors, message.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


class NoCompression(Compressor):
    """The baseline: the exact mean. Keeps no state; ``rank`` is ignored."""

    def reduce(self, gradients: Sequence[Gradient], channel: Channel, rank: int | None) -> Statistics:
        if not gradients:
            return Statistics()
        sent, waited = channel.bytes, channel.seconds
        started = now(gradients[0].tensor)
        reduce_dense([gradient.tensor for gradient in gradients], channel)
        communicated = channel.seconds - waited
        return Statistics(
            bytes=channel.bytes - sent,
            seconds_compress=now(gradients[0].tensor) - started - communicated,
            seconds_communicate=communicated,
        )
