"""Some entries of every matrix with error feedback: the largest (topk) or random ones (randomk).

Both have a share of entries that may be larger at first, and momentum correction (:class:`SparseConfig`).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgc.checks import number, require
from edgc.compressors.base import Compressor
from edgc.compressors.entrywise.feedback import EntrywiseConfig, Feedback, Flat, Result
from edgc.config import Example, Look
from edgc.lazy import Tensor, torch
from edgc.runtime.channel import Channel
from edgc.runtime.device import host_decides, to_device

WARMUP_DENSITY = 0.25
"""Density that the warm-up begins with: the paper's first sparsity is 75 % (Lin et al., section 3.3)."""
# One entry in this many is looked at to guess a bound below the k-th largest; prime, to meet every column.
_SAMPLING = 61


@dataclass(frozen=True, kw_only=True)
class SparseConfig(EntrywiseConfig):
    """Settings of the methods that send some of the entries.

    ``momentum`` and ``density_warmup_steps`` are those of Deep Gradient Compression (Lin et al., ICLR 2018), off unless
    they are given. Its clipping of every worker's own gradient (section 3.2) is not here: the optimizer clips the mean.

    Attributes:
        density: share of the entries that a worker sends (ours).
        momentum: m of momentum correction, at least 0 and below 1; 0 is off. Every worker keeps a velocity
            u <- m u + (1 - m) G, which takes the gradient's place (section 3.2), and clears u where an entry is sent
            (momentum factor masking, section 3.3), unless all are. The paper's u lacks the factor 1 - m: with it
            gradients keep their scale, for clipping among others. What goes dense has its velocity, too, never cleared.
            **The optimizer must have no first moment of its own**: SGD without momentum, Adam with beta1 = 0. A
            velocity takes 4 bytes a parameter, twice, since a step may be given up.
        density_warmup_steps: reductions of a parameter over which its density falls exponentially from 0.25 to
            ``density`` (section 3.3; there epoch by epoch, here step by step); 0 is off. A number of steps and not a
            share of the run, because a compressor does not know the length of the run: it counts reductions, which are
            in its saved state. Messages and their buffers are as large as the density of the step asks; among W workers
            topk sends more than an uncompressed all-reduce while its density is above 1/W. A cost gate judges by
            ``density`` from the start.
    """

    density: float = 0.01
    density_warmup_steps: int = 0

    def _check(self) -> None:
        super()._check()
        number("density", self.density, 0, 1, open_low=True)
        self._whole("density_warmup_steps", 0)
        if self.density_warmup_steps:
            fix = f"set density below {WARMUP_DENSITY}, where the warm-up begins"
            require(self.density < WARMUP_DENSITY, "density_warmup_steps", self.density_warmup_steps, fix)

    @classmethod
    def idle(cls, values: Mapping[str, Any]) -> dict[str, str]:
        fix = super().idle(values)
        return {key: how for key, how in fix.items() if key != "momentum" or not values["error_feedback"]}

    def build_to_time(self) -> Compressor:
        return replace(self, density_warmup_steps=0).build()

    def density_after(self, reductions: int) -> float:
        """The density of a parameter's next reduction."""
        if reductions >= self.density_warmup_steps:
            return self.density
        return WARMUP_DENSITY * (self.density / WARMUP_DENSITY) ** (reductions / self.density_warmup_steps)


class Sparse(Feedback):
    """A method that sends k entries of every matrix: its density times the number of entries, rounded, at least 1."""

    config: SparseConfig

    def __init__(self, config: SparseConfig) -> None:
        super().__init__(config, 0 if config.ef21 else config.momentum)
        self.counts_reductions |= config.density_warmup_steps > 0

    def _sizes(self, flat: Flat) -> list[int]:
        """Number of entries of each gradient that are sent this time; the same on every rank, as the counts are."""
        densities = (self.config.density_after(self.counts.get(name, 0)) for name in flat.names)
        return [chosen(shape.numel(), density) for shape, density in zip(flat.shapes, densities, strict=True)]

    def _clear(self, flat: Flat, places: Tensor) -> None:
        """Zeros for what is sent: in ``flat.work`` and, unless everything is sent, in the velocity."""
        flat.work.index_fill_(0, places, 0)
        if flat.velocity is not None and self.config.density < 1:
            flat.velocity.index_fill_(0, places, 0)


def chosen(entries: int, density: float) -> int:
    """Number of entries sent of so many: the rounded share, at least 1."""
    return min(entries, max(1, round(density * entries)))


def _examples(method: str, size: int) -> dict[str, Example]:
    """Examples for entries of so many bytes: with one density, and with that which a warm-up begins with."""
    dgc = {"density": 0.05, "momentum": 0.5, "density_warmup_steps": 3}
    return {
        method: Example(lambda m, n: size * chosen(m * n, 0.05), {"density": 0.05}),
        f"{method}_dgc": Example(lambda m, n: size * chosen(m * n, WARMUP_DENSITY), dgc),
    }


@dataclass(frozen=True, kw_only=True)
class TopKConfig(SparseConfig):
    """The largest entries of every matrix, with error feedback (Stich et al., NeurIPS 2018).

    With ``momentum`` and ``density_warmup_steps`` it is Deep Gradient Compression (Lin et al., ICLR 2018).
    """

    method: str = "topk"

    look = Look("Top-k", "#56B4E9", "<", "-.")
    examples = {
        **_examples("topk", 8),
        "topk_ef21": Example(lambda m, n: 8 * chosen(m * n, 0.05), {"density": 0.05, "ef21": True, "momentum": 0.5}),
    }

    def build(self) -> Compressor:
        return self.around(TopK(self))


class TopK(Sparse):
    """Each worker sends its k entries of largest magnitude of every matrix; the result is the mean of what was sent.

    Exact: of equal magnitudes the first in memory order goes first. An entry costs 8 bytes, fp32 and its index in the
    matrix, and goes to all other workers (all-gather).
    """

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


@dataclass(frozen=True, kw_only=True)
class RandomKConfig(SparseConfig):
    """Random entries of every matrix, the same on all workers, with error feedback (Stich et al., NeurIPS 2018)."""

    method: str = "randomk"

    look = Look("Random-k", "#882255", ">", ":")
    examples = _examples("randomk", 4)

    def build(self) -> Compressor:
        return self.around(RandomK(self))


class RandomK(Sparse):
    """k entries of every matrix, drawn anew at every step; only their values are sent, and can be all-reduced.

    The draw depends on the seed, the parameter's name and how often it was reduced, so that every worker draws the
    same entries (with the same version of torch).
    """

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
