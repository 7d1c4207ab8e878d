"""Random entries of every matrix, the same on all workers, with error feedback."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from edgc.compressors.channel import Channel
from edgc.compressors.feedback import Feedback, Flat, Result
from edgc.compressors.topk import chosen


class RandomK(Feedback):
    """k entries of every matrix, drawn anew at every step; only their values are sent, and can be all-reduced.

    The draw depends on the seed, the parameter's name and how often it was reduced, so that every worker draws the
    same entries (with the same version of torch). k as in :class:`~edgc.compressors.topk.TopK`.

    Args:
        density: share of the entries that is sent, above 0 and at most 1.
        min_elements, error_feedback, seed: see :class:`~edgc.compressors.feedback.Feedback`.
    """

    draws_at_random = True

    def __init__(
        self,
        density: float = 0.01,
        *,
        min_elements: int = 1024,
        error_feedback: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(min_elements=min_elements, error_feedback=error_feedback, seed=seed)
        self.density = density

    def _average(self, flat: Flat, channel: Channel) -> Generator[None, None, Result]:
        drawn = [
            draw(shape.numel(), chosen(shape.numel(), self.density), self._generator(name)).add_(offset)
            for name, shape, offset in zip(flat.names, flat.shapes, flat.offsets, strict=True)
        ]
        places = torch.cat(drawn).to(flat.work.device)
        values = flat.work[places]
        # An entry that is not finite and was not drawn must be heard of too: 0, or NaN if there is one.
        low, high = torch.aminmax(flat.work)
        values.add_((low - low) + (high - high))
        flat.work.index_fill_(0, places, 0)
        channel.mean_(values)
        yield

        def write(out: Tensor) -> None:
            out.zero_()
            out[places] = values

        return values.isfinite().all(), write


def draw(entries: int, k: int, generator: torch.Generator) -> Tensor:
    """k different whole numbers below ``entries``, ascending, every set of k equally likely."""
    if k == entries:
        return torch.arange(entries)
    if 2 * k > entries:
        return torch.randperm(entries, generator=generator)[:k].sort().values
    found = torch.empty(0, dtype=torch.int64)
    while len(found) < k:
        more = torch.randint(entries, (k + k // 2 + 8,), generator=generator)
        found = torch.unique(torch.cat([found, more]))
    return found[torch.randperm(len(found), generator=generator)[:k]].sort().values
