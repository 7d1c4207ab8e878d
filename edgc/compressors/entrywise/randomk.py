"""Random entries of every matrix, the same on all workers, with error feedback."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from edgc.compressors.entrywise.feedback import Result
from edgc.compressors.entrywise.flat import Flat
from edgc.compressors.entrywise.sparse import WARMUP_DENSITY, Sparse, SparseConfig, chosen
from edgc.description import Example, Look
from edgc.lazy import Tensor, torch
from edgc.runtime.channel import Channel
from edgc.runtime.device import to_device


@dataclass(frozen=True, kw_only=True)
class RandomKConfig(SparseConfig):
    """Random entries of every matrix, the same on all workers, with error feedback (Stich et al., NeurIPS 2018)."""

    method: str = "randomk"

    look = Look("Random-k", "#882255", ">", ":")
    examples = {
        "randomk": Example(lambda m, n: 4 * chosen(m * n, 0.05), {"density": 0.05}),
        "randomk_dgc": Example(
            lambda m, n: 4 * chosen(m * n, WARMUP_DENSITY),
            {"density": 0.05, "momentum": 0.5, "density_warmup_steps": 3},
        ),
    }

    def build(self) -> RandomK:
        return RandomK(self)


class RandomK(Sparse):
    """k entries of every matrix, drawn anew at every step; only their values are sent, and can be all-reduced.

    The draw depends on the seed, the parameter's name and how often it was reduced, so that every worker draws the
    same entries (with the same version of torch).
    """

    config: RandomKConfig
    draws_at_random = True

    def _average(self, flat: Flat, channel: Channel) -> Generator[None, None, Result]:
        drawn = [
            draw(shape.numel(), k, self._generator(name)).add_(offset)
            for name, shape, offset, k in zip(flat.names, flat.shapes, flat.offsets, self._sizes(flat), strict=True)
        ]
        places = to_device(torch.cat(drawn), flat.work.device)
        values = flat.work[places]
        # An entry that is not finite and was not drawn must be heard of too: 0, or NaN if there is one.
        low, high = torch.aminmax(flat.work)
        values.add_((low - low) + (high - high))
        self._clear(flat, places)
        channel.mean_(values)
        yield

        def write(out: Tensor) -> None:
            out.zero_()
            out[places] = values

        return values.isfinite().all(), write


def draw(entries: int, k: int, generator: torch.Generator) -> Tensor:
    """k different whole numbers below ``entries``, ascending, every set of k equally likely; on the CPU.

    Args:
        generator: of the CPU, so that the draw is the same wherever the gradients are.
    """
    if k == entries:
        return torch.arange(entries, dtype=torch.int64, device="cpu")
    if 2 * k > entries:
        return _permutation(entries, generator)[:k].sort().values
    found = torch.empty(0, dtype=torch.int64, device="cpu")
    while len(found) < k:
        size = (k + k // 2 + 8,)
        more = torch.randint(entries, size, generator=generator, dtype=torch.int64, device="cpu")
        found = torch.unique(torch.cat([found, more]))
    return found[_permutation(len(found), generator)[:k]].sort().values


def _permutation(entries: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(entries, generator=generator, dtype=torch.int64, device="cpu")
