"""How PowerSGD's messages travel: factors in one of several types, and everything that goes dense.

All buffers live as long as the object; nothing is allocated from call to call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgc.compressors.base import Steps, flat_view
from edgc.compressors.channel import Channel
from edgc.compressors.quantization.mean import Blocks, QuantisedMean, quantised_mean

_BITS = {"int8": 8, "int4": 4}


class Wire:
    """The mean of flat fp32 vectors of up to ``elements`` entries, sent as ``factor_dtype``.

    ``fp32`` and ``bf16`` are all-reduced. What a worker contributes is then its vector rounded to that type; the
    rounding goes to ``kept``. In bf16 the reduction itself rounds too, its partial sums and the mean: by at most 2^-8
    of each sum, unbiased and the same on all workers, known to nobody and therefore kept by nobody. It is lost once
    and does not pile up. ``int8`` and ``int4`` sum in fp32 and lose nothing: whoever owns a shard of the sum keeps
    what rounding the mean once more costs (:mod:`edgc.compressors.quantization.mean`).

    Attributes:
        kept: what this worker's vector had and did not get across, after :meth:`mean`; None for fp32.
    """

    def __init__(self, factor_dtype: str, elements: int, device: torch.device, blocks: Blocks | None) -> None:
        self.factor_dtype, self.blocks = factor_dtype, blocks
        lossy = factor_dtype != "fp32"
        self.kept = torch.empty(elements, dtype=torch.float32, device=device) if lossy else None
        half = factor_dtype == "bf16"
        self._half = torch.empty(elements, dtype=torch.bfloat16, device=device) if half else None
        self._means: dict[tuple[int, int], QuantisedMean] = {}

    def mean(self, vector: Tensor, channel: Channel) -> Steps:
        """``vector``, contiguous fp32, becomes the mean over the ranks of what they contribute."""
        if self.kept is None:
            channel.mean_(vector)
            yield
            return
        kept = self.kept[: vector.numel()]
        if self._half is not None:
            half = self._half[: vector.numel()]
            half.copy_(vector)
            torch.sub(vector, kept.copy_(half), out=kept)
            channel.mean_(half)
            yield
            vector.copy_(half)
            return
        assert self.blocks is not None
        key = (vector.numel(), channel.world)
        if channel.world > 1 and key not in self._means:
            self._means[key] = QuantisedMean(*key, self.blocks, vector.device)
        yield from quantised_mean(vector, channel, self.blocks, kept, self._means.get(key))


def blocks_of(factor_dtype: str) -> Blocks | None:
    """The quantiser of a factor type, None for floating-point ones."""
    return Blocks(_BITS[factor_dtype]) if factor_dtype in _BITS else None


class Dense:
    """Tensors that are sent as they are, one message per type, with room for fp32 factors in the same message.

    Without factors, tensors that follow each other in memory are sent where they lie.

    Args:
        tensors: any with the shapes and types to be sent.
        room: fp32 entries to be sent along.
        device: of all of them.
    """

    def __init__(self, tensors: Sequence[Tensor], room: int, device: torch.device) -> None:
        self.device = device
        self._sizes: dict[torch.dtype, int] = {}
        for tensor in tensors:
            self._sizes[tensor.dtype] = self._sizes.get(tensor.dtype, 0) + tensor.numel()
        self._memory: dict[torch.dtype, Tensor] = {}
        self._room = room
        self._messages: list[Tensor] = []
        self._copied: list[tuple[Tensor, Tensor]] = []
        if room:
            self._buffer(torch.float32)

    @property
    def room(self) -> Tensor:
        """The flat fp32 room for factors."""
        return self._buffer(torch.float32)[self._sizes.get(torch.float32, 0) :]

    def start(self, tensors: Sequence[Tensor], channel: Channel, used: int) -> None:
        """Start to average ``tensors`` and the first ``used`` entries of the room."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        if used:
            by_type[torch.float32] = []
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor)
        self._messages, self._copied = [], []
        for dtype, group in by_type.items():
            extra = used if dtype == torch.float32 else 0
            message = flat_view(group) if group and not extra else None
            if message is None:
                message = self._buffer(dtype)[: self._sizes.get(dtype, 0) + extra]
                parts = message[: self._sizes.get(dtype, 0)].split([t.numel() for t in group])
                pairs = [(t, part.view(t.shape)) for t, part in zip(group, parts, strict=True)]
                for tensor, part in pairs:
                    part.copy_(tensor)
                self._copied += pairs
            channel.mean_(message)
            self._messages.append(message)

    @property
    def messages(self) -> list[Tensor]:
        """What is or was on the way."""
        return self._messages

    def unpack(self) -> None:
        """Write the means to where the tensors came from."""
        for tensor, part in self._copied:
            tensor.copy_(part)
        # Not longer than needed: these are the caller's.
        self._messages, self._copied = [], []

    def _buffer(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._memory:
            size = self._sizes.get(dtype, 0) + (self._room if dtype == torch.float32 else 0)
            self._memory[dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return self._memory[dtype]
