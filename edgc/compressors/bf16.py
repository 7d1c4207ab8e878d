"""An all-reduce in bfloat16: half the bytes of fp32, no state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgc.compressors.base import Compressor, Gradient, Statistics, Steps
from edgc.compressors.channel import Channel
from edgc.compressors.none import dense_steps
from edgc.config import ConstantConfig
from edgc.description import Example, Look
from edgc.lazy import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class BF16Config(ConstantConfig):
    """An all-reduce in bfloat16."""

    method: str = "bf16"

    look = Look("bf16 all-reduce", "#666666", "P", "--")
    examples = {"bf16": Example(lambda m, n: 2 * m * n, exact=False)}

    def build(self) -> BF16:
        return BF16()


class BF16(Compressor):
    """All gradients wider than two bytes in one bfloat16 message; narrower ones as they are.

    Every entry is rounded to 8 significant bits before it is sent, after each of the W - 1 additions, and after the
    division by W: a relative error of at most 2**-9 each. Nothing is kept, so the rounding is lost; the statistics
    do not cover it. Finite as long as the sum of the workers is in the range of bfloat16, which is that of fp32.
    """

    def __init__(self) -> None:
        self._messages: dict[tuple[str, ...], Tensor] = {}

    def steps(
        self, gradients: Sequence[Gradient], channel: Channel, rank: int | None, statistics: Statistics
    ) -> Steps:
        if channel.shards and rank is not None:
            yield from self._scattered_halves(channel)
            return
        wide = [gradient for gradient in gradients if gradient.tensor.element_size() > 2 and rank is not None]
        rest = [
            gradient.tensor for gradient in gradients if gradient.tensor.element_size() <= 2 or rank is None
        ]
        parts: list[Tensor] = []
        if wide:
            message = self._message(wide)
            parts = list(torch.split(message, [gradient.tensor.numel() for gradient in wide]))
            for gradient, part in zip(wide, parts, strict=True):
                part.view(gradient.tensor.shape).copy_(gradient.tensor)
            channel.mean_(message)
        yield from dense_steps(rest, channel)
        for gradient, part in zip(wide, parts, strict=True):
            gradient.tensor.copy_(part.view(gradient.tensor.shape))

    def _scattered_halves(self, channel: Channel) -> Steps:
        """The shards themselves, which hold all gradients, rounded and reduce-scattered."""
        wide = [buffer for buffer in channel.shards if buffer.element_size() > 2]
        halves = [buffer.to(torch.bfloat16) for buffer in wide]
        channel.scatter_means([*halves, *(b for b in channel.shards if b.element_size() <= 2)])
        yield
        for buffer, half in zip(wide, halves, strict=True):
            channel.own_part(buffer).copy_(channel.own_part(half))

    def _message(self, gradients: Sequence[Gradient]) -> Tensor:
        """The buffer of these gradients' message, the same memory at every step."""
        names = tuple(gradient.name for gradient in gradients)
        total = sum(gradient.tensor.numel() for gradient in gradients)
        message = self._messages.get(names)
        if message is None or message.numel() != total or message.device != gradients[0].tensor.device:
            self._messages = {key: old for key, old in self._messages.items() if set(names).isdisjoint(key)}
            message = torch.empty(total, dtype=torch.bfloat16, device=gradients[0].tensor.device)
            self._messages[names] = message
        return message
