"""The largest entries of every matrix, with error feedback."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

from edgc.compressors.entrywise.feedback import Result
from edgc.compressors.entrywise.flat import Flat
from edgc.compressors.entrywise.sparse import WARMUP_DENSITY, Sparse, SparseConfig, chosen
from edgc.description import Example, Look
from edgc.lazy import Tensor, torch
from edgc.runtime.channel import Channel
from edgc.runtime.device import host_decides

# One entry in this many is looked at to guess a bound below the k-th largest; prime, to meet every column.
_SAMPLING = 61


@dataclass(frozen=True, kw_only=True)
class TopKConfig(SparseConfig):
    """The largest entries of every matrix, with error feedback (Stich et al., NeurIPS 2018).

    With ``momentum`` and ``density_warmup_steps`` it is Deep Gradient Compression (Lin et al., ICLR 2018).
    """

    method: str = "topk"

    look = Look("Top-k", "#56B4E9", "<", "-.")
    examples = {
        "topk": Example(lambda m, n: 8 * chosen(m * n, 0.05), {"density": 0.05}),
        "topk_dgc": Example(
            lambda m, n: 8 * chosen(m * n, WARMUP_DENSITY),
            {"density": 0.05, "momentum": 0.5, "density_warmup_steps": 3},
        ),
    }

    def build(self) -> TopK:
        return TopK(self)


class TopK(Sparse):
    """Each worker sends its k entries of largest magnitude of every matrix; the result is the mean of what was sent.

    Exact: of equal magnitudes the first in memory order goes first. An entry costs 8 bytes, fp32 and its index in the
    matrix, and goes to all other workers (all-gather).
    """

    config: TopKConfig

    def _average(self, flat: Flat, channel: Channel) -> Generator[None, None, Result]:
        sizes = self._sizes(flat)
        if flat.buffers.get("sizes") != sizes:
            self._make_room(flat, sizes, channel.world)
        sent, received, offsets = (flat.buffers[key] for key in ("sent", "received", "offsets"))
        values, indices = sent[0, 0].view(torch.float32), sent[0, 1]
        for part, index in zip(flat.parts(flat.work), indices.split(sizes), strict=True):
            index.copy_(largest(part, len(index)))
        places = indices + offsets
        torch.index_select(flat.work, 0, places, out=values)
        self._clear(flat, places)
        channel.all_gather(received, sent)
        yield

        def write(out: Tensor) -> None:
            # Rank after rank, so that every worker adds in the same order.
            out.zero_()
            for message in received:
                out.index_add_(0, message[1] + offsets, message[0].view(torch.float32), alpha=1 / channel.world)

        return received[:, 0].view(torch.float32).isfinite().all(), write

    @staticmethod
    def _make_room(flat: Flat, sizes: list[int], world: int) -> None:
        """Messages of ``sizes`` entries of the gradients, and where each gradient begins in ``flat.work``."""
        total, device = sum(sizes), flat.work.device
        for key in ("offsets", "sent", "received"):  # given back before more is asked for
            flat.buffers.pop(key, None)
        offsets = torch.empty(total, dtype=torch.int64, device=device)
        for part, offset in zip(offsets.split(sizes), flat.offsets, strict=True):
            part.fill_(offset)
        flat.buffers.update(
            sizes=sizes,
            offsets=offsets,
            sent=torch.empty((1, 2, total), dtype=torch.int32, device=device),
            received=torch.empty((world, 2, total), dtype=torch.int32, device=device),
        )


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
