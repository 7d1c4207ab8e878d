"""The mean of quantised vectors (:class:`QuantisedMean`).

Like a ring all-reduce it moves every entry twice, (W-1)/W of a vector each way, but in the bits of the quantiser:
quantise, all-to-all, average, quantise again, all-gather.
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

from edgc.compressors.base import Steps
from edgc.lazy import Tensor, torch
from edgc.runtime.channel import Channel


class Quantiser(Protocol):
    """Maker of messages from flat fp32 vectors, by entries or blocks of them.

    Its methods are those of :class:`~edgc.compressors.quantization.Blocks`.

    Attributes:
        group: entries that cannot be cut: messages are of whole groups.
        align: entries that share something, which no two matrices are to share.
        stochastic: whether it draws: on each worker on its own.
    """

    group: int
    align: int
    stochastic: bool

    def kernels(self, device: torch.device) -> ModuleType | None: ...

    def bytes(self, elements: int) -> int: ...

    def pack(
        self, x: Tensor, out: Tensor, *, residual: Tensor | None = None, generator: torch.Generator | None = None
    ) -> None: ...

    def unpack(self, message: Tensor, out: Tensor, *, weight: float = 1.0, add: bool = False) -> None: ...

    def finite(self, message: Tensor) -> Tensor: ...


class QuantisedMean:
    """Buffers of one mean of quantised vectors; reuse them for vectors of the same length, one mean at a time.

    Args:
        elements: length of the vectors.
        world: number of ranks.
        blocks: used for both roundings.
    """

    def __init__(self, elements: int, world: int, blocks: Quantiser, device: torch.device) -> None:
        self.elements, self.world, self.blocks = elements, world, blocks
        self.shard = -(-elements // (world * blocks.group)) * blocks.group
        self._sent, self._received = (
            torch.empty((world, blocks.bytes(self.shard)), dtype=torch.uint8, device=device) for _ in range(2)
        )
        self._sum = torch.empty(self.shard, dtype=torch.float32, device=device)

    def steps(
        self, vector: Tensor, channel: Channel, residual: Tensor | None, generator: torch.Generator | None = None
    ) -> Steps:
        """Quantise, exchange shards, average them, quantise the mean, gather it; then :meth:`unpack` has it.

        Args:
            vector: this rank's, flat, contiguous, fp32; at least one entry; read at the start only.
            channel: with the ``world`` given above, of at least two ranks.
            residual: becomes what this rank did not get across; may be ``vector`` itself. Every entry has one rank
                that owns it: it rounds the mean once more and keeps that error times ``world``, so that the mean
                of (result + residual) is the mean of the vectors.
            generator: of stochastic rounding, this rank's own.
        """
        if kernels := self.blocks.kernels(vector.device):
            kernels.pack(self.blocks, vector, self._sent, residual)
        for rank, message in enumerate(() if kernels else self._sent):
            kept = None if residual is None else self._piece(residual, rank)
            self.blocks.pack(self._piece(vector, rank), message, residual=kept, generator=generator)
        channel.all_to_all(self._received, self._sent)
        yield
        mine = self._piece(vector if residual is None else residual, channel.rank)
        mean = self._sum[: mine.numel()]
        if kernels and mean.numel():
            kernels.unpack(self.blocks, self._received, mean, weight=1 / self.world, summed=True)
        for rank, message in enumerate(() if kernels else self._received):
            # Weighted before they are added: the sum of the ranks could overflow.
            self.blocks.unpack(message, mean, weight=1 / self.world, add=rank > 0)
        message = self._sent[:1]
        self.blocks.pack(mean, message[0], residual=mean, generator=generator)
        if residual is not None:
            mine.add_(mean, alpha=self.world)
        channel.all_gather(self._received, message)
        yield

    def finite(self) -> Tensor:
        """True, a 0-dim tensor, if the result is finite; the same on every rank."""
        return torch.stack([self.blocks.finite(message) for message in self._received]).all()

    def unpack(self, out: Tensor) -> None:
        """``out``, flat fp32, becomes the result, the same bits on every rank."""
        if kernels := self.blocks.kernels(out.device):
            kernels.unpack(self.blocks, self._received, out)
        for rank, message in enumerate(() if kernels else self._received):
            self.blocks.unpack(message, self._piece(out, rank))

    def _piece(self, vector: Tensor, rank: int) -> Tensor:
        return vector[rank * self.shard : (rank + 1) * self.shard]
