"""SparseLoCo: of what a round moved, the largest entries of every chunk, in 2 bits, with error feedback that decays.

Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo" (arXiv 2508.15706), after the code of
the run of Covenant-72B, templar at 142666f, and its hparams/hparams.json; the algorithm's own code was not to be had.
A round, with D what a replica moved::

    e <- decay e + D
    q <- the k largest of e in every chunk, in 2 bits (Code) ;  e <- e - q                 # own
    q <- q min(1, median of the replicas' |q| / |q|)                                       # of every tensor
    anchor <- anchor - lr (mean of each entry over the replicas that sent it)              # no momentum: e has one

Messages are all-gathered: what a replica sends grows with W. Mean over senders makes steps larger where few agree; so
does the code. The lower of two medians is taken, as torch does.

Here, other than there: chunks are cut as DeMo's are here, in the fewest equal parts, where the code takes the largest
divisor of a side up to 64 (1 of a prime vocabulary); vectors are cut in chunks of 64 x 64 entries, where the code sends
all of them with their indices; k shrinks with a chunk. An entry of a chunk that is zero is not sent: its place repeats
the chunk's largest, for 2 bits have no zero. A void round leaves error feedback as it was; the code clears it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgc.checks import number, require
from edgc.compressors.bits import pack_numbers, unpack_numbers
from edgc.lazy import Tensor, torch
from edgc.strategies.base import Asked, Replica, StrategyExample, all_finite, restore
from edgc.strategies.chunks import Chunks, mean_of_senders, quantised, wide
from edgc.strategies.local_updates import LocalUpdates, LocalUpdatesConfig


def _sent(shapes: Sequence[Sequence[int]], world: int) -> float:
    """Bytes a step of the example: 12 bits a place and 2 a code of all entries, four fp32 levels a tensor."""
    config = SparseLoCoConfig()
    entries = sum(chunks.count * config.kept(chunks) for chunks in map(config.chunks, shapes))
    return (world - 1) * (-(-12 * entries // 8) + -(-2 * entries // 8) + 16 * len(shapes)) / 5


@dataclass(frozen=True, kw_only=True)
class SparseLoCoConfig(LocalUpdatesConfig):
    """Settings of SparseLoCo; defaults are the code's.

    Attributes:
        every: H, inner steps a round.
        lr: of the outer step.
        decay: of error feedback, a round.
        k: entries that are sent of a whole chunk.
        chunk: side of a chunk of a matrix; of a vector it has as many entries.
        bits: of a code.
    """

    name = "sparseloco"
    examples = {"sparseloco": StrategyExample(_sent, {"every": 5})}

    lr: float = 0.4
    decay: float = 0.95
    k: int = 64
    chunk: int = 64
    bits: int = 2

    def _check(self) -> None:
        super()._check()
        number("lr", self.lr, 0, open_low=True)
        number("decay", self.decay, 0, 1)
        for key in ("k", "chunk", "bits"):
            self._whole(key, 1)
        require(self.bits <= 8, "bits", self.bits, "use at most 8")
        require(self.k <= self.chunk**2, "k", self.k, f"use at most chunk squared: {self.chunk**2}")

    def chunks(self, shape: Sequence[int]) -> Chunks:
        """Chunks of a parameter of this shape."""
        return Chunks(shape, self.chunk, self.chunk if len(shape) > 1 else self.chunk**2)

    def kept(self, chunks: Chunks) -> int:
        """Number of entries that are sent of such a chunk."""
        return max(1, round(self.k * chunks.entries / self.chunk**2))

    def build(self, replica: Replica) -> SparseLoCo:
        return SparseLoCo(self, replica)


class SparseLoCo(LocalUpdates):
    """Rounds whose deltas are sent in part.

    Attributes:
        errors: e, this replica's own.
    """

    config: SparseLoCoConfig

    def __init__(self, config: SparseLoCoConfig, replica: Replica) -> None:
        super().__init__(config, replica)
        replica.refuse_compression(config.name)
        self.errors = {name: torch.zeros_like(weight, dtype=wide(weight)) for name, weight in self.anchor.items()}
        self.chunks = {name: config.chunks(weight.shape) for name, weight in self.anchor.items()}

    def end_round(self, deltas: dict[str, Tensor]) -> Asked:
        owed, places, codes, levels = {}, [], [], []
        for name, error in self.errors.items():
            owed[name] = deltas[name].to(error.dtype).add_(error, alpha=self.config.decay)
            chunks = self.chunks[name].of(owed[name])
            place = chunks.abs().topk(self.config.kept(self.chunks[name])).indices
            place = torch.where(chunks.gather(1, place) == 0, place[:, :1], place)
            code, level = quantised(chunks.gather(1, place), 1 << self.config.bits)
            places.append(place)
            codes.append(code)
            levels.append(level)
        # Levels first, for a view of other types must begin at a multiple of their bytes.
        width = (self.config.chunk**2 - 1).bit_length()
        packed = [pack_numbers(places, width), pack_numbers(codes, self.config.bits)]
        parts = [*(level.view(torch.uint8) for level in levels), *packed]
        channel, message = self.replica.channel(), torch.cat(parts)
        received = message.new_empty((channel.world, len(message)))
        channel.all_gather(received, message)
        yield
        channel.finish()
        *heads, at, coded = received.split([len(part) for part in parts], 1)
        books = [torch.cat([*h]).view(v.dtype).view(len(h), -1) for h, v in zip(heads, levels, strict=True)]
        if not all_finite({str(index): book for index, book in enumerate(books)}):
            return False
        sizes = [place.numel() for place in places]
        all_places = unpack_numbers(at, width, sum(sizes)).split(sizes, 1)
        all_codes = unpack_numbers(coded, self.config.bits, sum(sizes)).split(sizes, 1)
        for name, book, place, code in zip(owed, books, all_places, all_codes, strict=True):
            cut = self.chunks[name]
            values = book.gather(1, code).view(channel.world, cut.count, self.config.kept(cut))
            place = place.view_as(values)
            mean = mean_of_senders(clipped(values, place), place, cut.entries)
            own = mean_of_senders(values[channel.rank, None], place[channel.rank, None], cut.entries)
            self.errors[name].copy_(owed[name] - cut.whole(own))
            self.anchor[name].sub_(cut.whole(mean), alpha=self.config.lr)
        return True

    def own_state(self) -> dict[str, Any]:
        return {"errors": self.errors}

    def load_state(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        super().load_state(shared, own)
        if own is not None:
            restore(self.errors, own, "own", "errors")
            return
        for error in self.errors.values():
            error.zero_()


def clipped(values: Tensor, places: Tensor) -> Tensor:
    """Messages [W, count, k] of a tensor, each scaled down to the median of their norms; 0 / 0 is 1."""
    repeated = torch.nn.functional.pad(places[..., 1:] == places[..., :1], (1, 0))
    norms = torch.linalg.vector_norm(values.masked_fill(repeated, 0), dim=(1, 2))
    return values * (norms.median() / norms).nan_to_num(1).clamp(max=1)[:, None, None]
