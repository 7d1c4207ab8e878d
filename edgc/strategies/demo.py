"""DeMo: the largest frequencies of each replica's momentum are exchanged, and the sign of their mean is the step.

Source: Peng, Quesnelle, Kingma, "Decoupled Momentum Optimization" (arXiv 2411.19870); defaults and details of its
code, bloc97/DeMo at 0e48145, ``demo.py``. At rate eta, with an orthonormal two-dimensional DCT-II of every block::

    u <- decay u + eta g                                  # u and g are each replica's own
    kept <- the topk coefficients of largest magnitude in every block of DCT(u);  u <- u - IDCT(kept)
    weights <- weights - eta sign(IDCT(mean of kept, of each coefficient over the replicas that sent it))

The code's blocks have the largest divisor of a side up to 64: 1 of a prime vocabulary. Here a side is cut in the fewest
equal blocks of at most ``chunk``, the last padded with zeros: the same where 64 divides it.
A coefficient is sent as an fp32 value and a 16-bit index, 6 bytes (the code's int64 indices make it 12). What a replica
sends grows with W: 1.2 % of an fp32 all-reduce at W = 2 and 150 % at W = 256, of matrices whose sides 64 divides.
Messages are added in the order of ranks, so that replicas stay equal; they are assumed to have the same kind of GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgc.checks import number, require
from edgc.lazy import Tensor, torch
from edgc.strategies.base import Asked, Replica, StrategyConfig, StrategyExample, all_finite
from edgc.strategies.chunks import Chunks, mean_of_senders, wide
from edgc.strategies.momentum import MomentumStrategy, poison


def _sent(shapes: Sequence[Sequence[int]], world: int) -> float:
    """Bytes a step of the default settings."""
    cuts = [Chunks(shape, 64, 64) for shape in shapes]
    return (world - 1) * 6 * sum(each.count * min(32, each.entries) for each in cuts)


@dataclass(frozen=True, kw_only=True)
class DeMoConfig(StrategyConfig):
    """Settings of DeMo; weight decay is the optimizer's (code: 0).

    Attributes:
        decay: of the momentum a step. Code: 0.999 (its port to OLMo: 0.99).
        chunk: side of a block, at most; in entries. Code: 64.
        topk: coefficients of a block that are sent. Code: 32.
    """

    name = "demo"
    equal = "step"
    directs = True
    examples = {"demo": StrategyExample(_sent)}

    decay: float = 0.999
    chunk: int = 64
    topk: int = 32

    def _check(self) -> None:
        number("decay", self.decay, 0, 1)
        self._whole("chunk", 1)
        self._whole("topk", 1)
        require(self.chunk <= 128, "chunk", self.chunk, "use at most 128: more entries have no 16-bit index")

    def build(self, replica: Replica) -> DeMo:
        return DeMo(self, replica)


class DeMo(MomentumStrategy):
    """Momenta of which the largest frequencies are exchanged."""

    def __init__(self, config: DeMoConfig, replica: Replica) -> None:
        super().__init__(config.name, replica)
        self.config = config
        self.own["momentum"] = self.zeros()
        self.blocks = {name: Blocks(p, config.chunk, config.topk) for name, p in self.parameters.items()}

    def before_step(self, gradients: Mapping[str, Tensor]) -> Asked:
        rates = self.replica.rates()
        values, places, momenta = [], [], {}
        for name, blocks in self.blocks.items():
            old = self.own["momentum"][name]
            momenta[name] = old.mul(self.config.decay).add_(gradients[name], alpha=rates[name])
            coefficients = blocks.transform(momenta[name])
            places.append(coefficients.abs().topk(blocks.k, sorted=False).indices)
            values.append(coefficients.gather(1, places[-1]))
        sent, indices = torch.cat([v.view(-1) for v in values]), torch.cat([i.view(-1) for i in places])
        indices, channel = indices.to(torch.int16).view(torch.uint8), self.replica.channel()
        poison(sent, gradients)
        received, gathered = (each.new_empty((channel.world, len(each))) for each in (sent, indices))
        channel.all_gather(received, sent[None])
        channel.all_gather(gathered, indices[None])  # as bytes: NCCL has no 16-bit integers
        yield
        channel.finish()
        if not all_finite({"": received}):
            return False
        sizes, gathered = [each.numel() for each in values], gathered.view(torch.int16).long()
        arrived = zip(received.split(sizes, 1), gathered.split(sizes, 1), strict=True)
        for (name, blocks), own, at, (v, i) in zip(self.blocks.items(), values, places, arrived, strict=True):
            kept = own.new_zeros((blocks.count, blocks.entries)).scatter_(1, at, own)
            self.own["momentum"][name].copy_(momenta[name].sub_(blocks.inverse(kept)))
            v, i = (each.view(channel.world, *own.shape) for each in (v, i))
            mean = mean_of_senders(v, i, blocks.entries)
            gradients[name].copy_(blocks.inverse(mean).sign_())
        return True


class Blocks(Chunks):
    """Cut of a parameter in blocks, of each of which ``k`` coefficients are sent; a vector is one row."""

    def __init__(self, parameter: Tensor, chunk: int, topk: int) -> None:
        super().__init__(parameter.shape, chunk, chunk)
        self.k = min(topk, self.entries)
        self.left, self.right = (cosines(size, parameter) for size in self.sizes)

    def transform(self, tensor: Tensor) -> Tensor:
        """Coefficients [count, entries]."""
        return (self.left @ self.of(tensor).view(-1, *self.sizes) @ self.right.T).view(self.count, self.entries)

    def inverse(self, coefficients: Tensor) -> Tensor:
        """The parameter's shape again; what lies in the appended zeros is cut off."""
        return self.whole(self.left.T @ coefficients.view(-1, *self.sizes) @ self.right)


def cosines(size: int, like: Tensor) -> Tensor:
    """Matrix of the orthonormal DCT-II of so many entries; its rows are frequencies."""
    at = torch.arange(size, dtype=torch.float64, device=like.device)
    waves = torch.cos(math.pi / size * at[:, None] * (at + 0.5)) * math.sqrt(2 / size)
    waves[0] /= math.sqrt(2)
    return waves.to(wide(like))
