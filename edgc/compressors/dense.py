"""Gradients that are sent entry by entry as they are, in their own type or in bfloat16; no state.

Every other method sends what it does not compress through :class:`Dense`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgc.compressors.base import Compressor, Gradient, Statistics, Steps
from edgc.config import ConstantConfig, EDGCConfig, Example, Look
from edgc.lazy import Tensor, torch
from edgc.runtime.channel import Channel


def flat_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """One flat view of tensors that follow each other without a gap in one storage; None if they do not."""
    first = tensors[0]
    position = first.storage_offset()
    for tensor in tensors:
        same = tensor.dtype == first.dtype and tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and tensor.is_contiguous() and tensor.storage_offset() == position):
            return None
        position += tensor.numel()
    return torch.as_strided(first, (position - first.storage_offset(),), (1,), first.storage_offset())


class Dense:
    """Tensors that are averaged as they are, one message per type, with room for fp32 factors in the same message.

    Without factors, tensors that follow each other in memory are sent where they lie; all others through buffers that
    live as long as the object, for calls with tensors of the same shapes and types.

    Args:
        tensors: any with the shapes and types to be sent.
        room: fp32 entries to be sent along.
        device: of all of them.

    Attributes:
        messages: what is or was on the way.
    """

    def __init__(self, tensors: Sequence[Tensor], room: int, device: torch.device) -> None:
        self.messages: list[Tensor] = []
        self._device, self._room = device, room
        self._sizes: dict[torch.dtype, int] = {}
        for tensor in tensors:
            self._sizes[tensor.dtype] = self._sizes.get(tensor.dtype, 0) + tensor.numel()
        self._memory: dict[torch.dtype, Tensor] = {}
        self._copied: list[tuple[list[Tensor], list[Tensor]]] = []

    @property
    def room(self) -> Tensor:
        """The flat fp32 room for factors."""
        return self._buffer(torch.float32)[self._sizes.get(torch.float32, 0) :]

    def start(self, tensors: Sequence[Tensor], channel: Channel, used: int = 0) -> None:
        """Start to average ``tensors`` and the first ``used`` entries of the room."""
        self.messages, self._copied = [], []
        by_type: dict[torch.dtype, list[Tensor]] = {torch.float32: []} if used else {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor)
        for dtype, group in by_type.items():
            extra = used if dtype == torch.float32 else 0
            message = flat_view(group) if group and not extra else None
            if message is None:
                size = self._sizes.get(dtype, 0)
                message = self._buffer(dtype)[: size + extra]
                parts = message[:size].split([t.numel() for t in group])
                places = [part.view(tensor.shape) for tensor, part in zip(group, parts, strict=True)]
                if group:
                    torch._foreach_copy_(places, group)
                    self._copied.append((group, places))
            channel.mean_(message)
            self.messages.append(message)

    def unpack(self) -> None:
        """Write the means to where the tensors came from."""
        for tensors, places in self._copied:
            torch._foreach_copy_(tensors, places)
        # Not longer than needed: these are the caller's.
        self.messages, self._copied = [], []

    def _buffer(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._memory:
            size = self._sizes.get(dtype, 0) + (self._room if dtype == torch.float32 else 0)
            self._memory[dtype] = torch.empty(size, dtype=dtype, device=self._device)
        return self._memory[dtype]


def dense_steps(tensors: Sequence[Tensor], channel: Channel) -> Steps:
    """Average ``tensors`` in place, without memory between calls."""
    if not tensors:
        yield
        return
    dense = Dense(tensors, 0, tensors[0].device)
    dense.start(tensors, channel)
    yield
    dense.unpack()


@dataclass(frozen=True, kw_only=True)
class NoCompressionConfig(EDGCConfig):
    """Uncompressed averaging."""

    method: str = "none"

    look = Look("no compression", "#000000", "o")
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

    def steps(self, gradients: Sequence[Gradient], channel: Channel, rank: int | None, statistics: Statistics) -> Steps:
        if channel.shards:
            return self.scattered(gradients, channel, statistics)
        return dense_steps([gradient.tensor for gradient in gradients], channel)


@dataclass(frozen=True, kw_only=True)
class BF16Config(ConstantConfig):
    """An all-reduce in bfloat16."""

    method: str = "bf16"

    look = Look("bf16 all-reduce", "#666666", "P", "--")
    examples = {"bf16": Example(lambda m, n: 2 * m * n, exact=False)}

    def build(self) -> BF16:
        return BF16()


class BF16(Compressor):
    """Send gradients of fp32 in one bfloat16 message, half their bytes; others as they are.

    Every entry is rounded to 8 significant bits before it is sent, after each of the W - 1 additions, and after the
    division by W: a relative error of at most 2**-9 each. Nothing is kept, so the rounding is lost; the statistics
    do not cover it. Finite up to the largest bfloat16, which is 0.4 % below the largest fp32.
    """

    def __init__(self) -> None:
        self._messages: dict[tuple[str, ...], Tensor] = {}

    def steps(self, gradients: Sequence[Gradient], channel: Channel, rank: int | None, statistics: Statistics) -> Steps:
        if channel.shards and rank is not None:
            yield from self._scattered_halves(channel)
            return
        wide = [gradient.tensor for gradient in gradients if gradient.tensor.element_size() == 4 and rank is not None]
        rest = [gradient.tensor for gradient in gradients if gradient.tensor.element_size() != 4 or rank is None]
        halves: list[Tensor] = []
        if wide:
            message = self._message(tuple(gradient.name for gradient in gradients), wide)
            parts = message.split([tensor.numel() for tensor in wide])
            halves = [part.view(tensor.shape) for part, tensor in zip(parts, wide, strict=True)]
            torch._foreach_copy_(halves, wide)
            channel.mean_(message)
        yield from dense_steps(rest, channel)
        if wide:
            torch._foreach_copy_(wide, halves)

    def _scattered_halves(self, channel: Channel) -> Steps:
        """The shards themselves, which hold all gradients, rounded and reduce-scattered."""
        wide = [buffer for buffer in channel.shards if buffer.element_size() == 4]
        halves = [buffer.to(torch.bfloat16) for buffer in wide]
        channel.scatter_means([*halves, *(b for b in channel.shards if b.element_size() != 4)])
        yield
        for buffer, half in zip(wide, halves, strict=True):
            channel.own_part(buffer).copy_(channel.own_part(half))

    def _message(self, names: tuple[str, ...], tensors: Sequence[Tensor]) -> Tensor:
        """Message of these gradients, the same memory at every step; of buckets that are gone it is given back."""
        total, device = sum(tensor.numel() for tensor in tensors), tensors[0].device
        message = self._messages.get(names)
        if message is None or message.numel() != total or message.device != device:
            self._messages = {key: old for key, old in self._messages.items() if set(names).isdisjoint(key)}
            message = self._messages[names] = torch.empty(total, dtype=torch.bfloat16, device=device)
        return message
