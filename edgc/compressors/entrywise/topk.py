"""The largest entries of every matrix, with error feedback."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

from edgc.checks import number
from edgc.compressors.entrywise.feedback import EntrywiseConfig, Feedback, Flat, Result
from edgc.description import Example, Look
from edgc.lazy import Tensor, torch
from edgc.runtime.channel import Channel
from edgc.runtime.device import host_decides

# One entry in this many is looked at to guess a bound below the k-th largest; prime, to meet every column.
_SAMPLING = 61


@dataclass(frozen=True, kw_only=True)
class SparseConfig(EntrywiseConfig):
    """What methods that send some of the entries have in common.

    Attributes:
        density: share of the entries that a worker sends (ours).
    """

    density: float = 0.01

    def _check(self) -> None:
        super()._check()
        number("density", self.density, 0, 1, open_low=True)


@dataclass(frozen=True, kw_only=True)
class TopKConfig(SparseConfig):
    """The largest entries of every matrix, with error feedback (Stich et al., NeurIPS 2018)."""

    method: str = "topk"

    look = Look("Top-k", "#56B4E9", "<", "-.")
    examples = {"topk": Example(lambda m, n: 8 * chosen(m * n, 0.05), {"density": 0.05})}

    def build(self) -> TopK:
        return TopK(self)


class TopK(Feedback):
    """Each worker sends its k entries of largest magnitude of every matrix; the result is the mean of what was sent.

    Exact: k = density times the number of entries, rounded, at least 1; of equal magnitudes the first in memory order
    goes first. An entry costs 8 bytes, fp32 and its index in the matrix, and goes to all other workers (all-gather).
    """

    config: TopKConfig

    def _average(self, flat: Flat, channel: Channel) -> Generator[None, None, Result]:
        counts = [chosen(shape.numel(), self.config.density) for shape in flat.shapes]
        total, device = sum(counts), flat.work.device
        if "sent" not in flat.buffers:
            offsets, repeats = (
                torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in (flat.offsets, counts)
            )
            flat.buffers["offsets"] = offsets.repeat_interleave(repeats, output_size=total)
            flat.buffers["sent"] = torch.empty((1, 2, total), dtype=torch.int32, device=device)
            flat.buffers["received"] = torch.empty((channel.world, 2, total), dtype=torch.int32, device=device)
        sent, received, offsets = (flat.buffers[key] for key in ("sent", "received", "offsets"))
        values, indices = sent[0, 0].view(torch.float32), sent[0, 1]
        for part, index in zip(flat.parts(flat.work), indices.split(counts), strict=True):
            index.copy_(largest(part, len(index)))
        places = indices + offsets
        torch.index_select(flat.work, 0, places, out=values)
        flat.work.index_fill_(0, places, 0)
        channel.all_gather(received, sent)
        yield

        def write(out: Tensor) -> None:
            # Rank after rank, so that every worker adds in the same order.
            out.zero_()
            for message in received:
                out.index_add_(0, message[1] + offsets, message[0].view(torch.float32), alpha=1 / channel.world)

        return received[:, 0].view(torch.float32).isfinite().all(), write


def chosen(entries: int, density: float) -> int:
    """Number of entries sent of so many: the rounded share, at least 1."""
    return min(entries, max(1, round(density * entries)))


def largest(vector: Tensor, k: int) -> Tensor:
    """Indices, ascending, of the k entries of largest magnitude; of equals the first. NaN is larger than anything.

    Args:
        vector: flat, fp32, contiguous, of at least k and fewer than 2**31 entries.
    """
    # Without its sign bit the bit pattern of a float is a whole number in the same order.
    keys = vector.view(torch.int32).bitwise_and(0x7FFFFFFF)
    if k == len(keys):
        return torch.arange(k, dtype=torch.int64, device=vector.device)
    if not host_decides(vector.device):
        return _largest_keys(keys, k)
    # A bound guessed from a sample nearly always leaves at least k and not many more to choose from.
    sample = keys[::_SAMPLING]
    likely = k / _SAMPLING + 4 * math.sqrt(k / _SAMPLING) + 4
    bound = sample.topk(min(len(sample), math.ceil(likely))).values.amin()
    places = (keys >= bound).nonzero().view(-1)
    if len(places) < k:
        places = torch.arange(len(keys), dtype=torch.int64, device=vector.device)
    elif len(places) < len(keys):
        keys = keys[places]
    last = keys.topk(k, sorted=False).values.amin()
    above = places[keys > last]
    return torch.cat([above, places[keys == last][: k - len(above)]]).sort().values


def _largest_keys(keys: Tensor, k: int) -> Tensor:
    """:func:`largest` without a number of candidates that the host would have to wait for.

    All keys are made different, each with its place in its low 32 bits, so that which k are the largest is not left to
    how a device breaks ties. While it works it takes 16 bytes an entry.
    """
    places = torch.arange(len(keys), dtype=torch.int64, device=keys.device)
    unique = keys.to(torch.int64).bitwise_left_shift_(32).sub_(places)
    del places
    chosen_keys = unique.topk(k, sorted=False).values
    return chosen_keys.neg_().bitwise_and_(0xFFFFFFFF).sort().values
