"""Chunks of a parameter, codes of some of their entries, and the mean over replicas that each chose their own."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgc.lazy import Tensor, torch


def cut(side: int, limit: int) -> tuple[int, int]:
    """The fewest equal parts of at most ``limit`` entries that cover a side: their number, and the entries of each."""
    count = math.ceil(side / limit)
    return count, math.ceil(side / count) if count else 1


class Chunks:
    """Cut of a tensor in equal chunks, with zeros appended where they do not come out even.

    Args:
        shape: of the tensor; of more than two dimensions the first by the rest, of one a row.
        rows, columns: of a chunk, at most.

    Attributes:
        count: number of chunks.
        entries: of a chunk.
    """

    def __init__(self, shape: Sequence[int], rows: int, columns: int) -> None:
        self.shape = tuple(shape)
        self.sides = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        self.counts, self.sizes = zip(cut(self.sides[0], rows), cut(self.sides[1], columns), strict=True)
        self.count, self.entries = math.prod(self.counts), math.prod(self.sizes)

    def of(self, tensor: Tensor) -> Tensor:
        """Chunks [count, entries] of a tensor of the shape."""
        (down, across), (high, wide) = self.counts, self.sizes
        padding = (0, across * wide - self.sides[1], 0, down * high - self.sides[0])
        padded = torch.nn.functional.pad(tensor.reshape(self.sides), padding)
        return padded.view(down, high, across, wide).transpose(1, 2).reshape(self.count, self.entries)

    def whole(self, chunks: Tensor) -> Tensor:
        """Tensor of the shape again, the inverse of :meth:`of`."""
        (down, across), (high, wide) = self.counts, self.sizes
        whole = chunks.view(*self.counts, *self.sizes).transpose(1, 2).reshape(down * high, across * wide)
        return whole[: self.sides[0], : self.sides[1]].reshape(self.shape)


def wide(tensor: Tensor) -> torch.dtype:
    """Type of what is kept and sent of a tensor: its own, or fp32 where that has more bits."""
    return torch.promote_types(tensor.dtype, torch.float32)


def quantised(values: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Codes of values, and their levels [bins]: equal bins in 6 deviations around the mean, each with the mean of what
    is in it (hivemind/compression/quantization.py, 4bd43b7). Levels are finite if and only if the values are."""
    off = values - values.mean()
    deviation = off.square().sum().div(max(1, off.numel() - 1)).sqrt()
    codes = (off * (bins / 6) / deviation).nan_to_num(0).round().add_(bins / 2).clamp_(0, bins - 1).to(torch.uint8)
    inside = [codes == code for code in range(bins)]
    levels = torch.stack([torch.where(each, values, 0).sum() / each.sum().clamp(min=1) for each in inside])
    return codes, levels


def mean_of_senders(values: Tensor, places: Tensor, entries: int) -> Tensor:
    """Mean of each entry [count, entries] over the replicas that sent it, the same bits on all of them: 0 if none did.

    Args:
        values: [W, count, k]; of a place that comes twice in a chunk, twice the same.
        places: in their chunks, of the same shape.
    """
    total = values.new_zeros((values.shape[1], entries))
    senders = torch.zeros_like(total)
    # Replica after replica, and written instead of added, for a GPU adds in any order.
    for value, place in zip(values, places, strict=True):
        total.scatter_(1, place, total.gather(1, place) + value)
        senders.scatter_(1, place, senders.gather(1, place) + 1)
    return total.div_(senders.clamp_(min=1))
