"""Gradients at the entries of one mask for all replicas, chosen from the first moment one step before.

After SCAPE (arXiv 2607.01678), of which only the abstract is public: its mask comes from a first-moment statistic,
is made by the owner of each part alone, sent to all, and used one step later, so that its transfer overlaps with
compute; values then go by an ordinary all-reduce of a short dense buffer, without indices; the base is AdamS, whose
second moment needs nothing besides. The rest is ours: parts are equal cuts of all matrices laid end to end, as many as
replicas; an owner's statistic is ``|beta1 m + (1 - beta1) x|`` with the ``x`` of its own replica; what is not sent
stays in error feedback; moments off the mask stand still, for AdamS would move them at full speed while they decay; the
first mask is spread evenly; what is no matrix of ``min_compression_elements`` is averaged in full::

    x <- e + g;  y <- mean of x on the mask (all-reduce);  e <- x off the mask, 0 on it       # x and e each replica's
    on the mask:  direction <- m' / (sqrt(beta2 m^2 + (1 - beta2) y^2) + eps),  m' = beta1 m + (1 - beta1) y
    next mask <- the largest entries of every part by its owner's statistic (all-gather of one bit an entry)

Bytes: ``density`` of an fp32 all-reduce, and 1/64 of it for the mask over ``every``; neither grows with W.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgc.checks import number
from edgc.compressors.bits import pack_bits, unpack_bits
from edgc.lazy import Tensor, torch
from edgc.strategies.base import Asked, Replica, StrategyConfig, StrategyExample, all_finite, dense_bytes
from edgc.strategies.momentum import MomentumStrategy, poison


def _sent(every: int) -> StrategyExample:
    def sent(shapes: Sequence[Sequence[int]], world: int) -> float:
        rest = [shape for shape in shapes if len(shape) < 2]
        part = math.ceil(sum(math.prod(shape) for shape in shapes if len(shape) == 2) / (8 * world))
        values = [(world * math.ceil(8 * part / 10),)]
        return dense_bytes([*rest, *values], world) + (world - 1) * part / every

    return StrategyExample(sent, {"every": every})


@dataclass(frozen=True, kw_only=True)
class SharedMaskConfig(StrategyConfig):
    """Settings of a shared mask.

    Attributes:
        density: share of the matrices' entries that are sent. Abstract: 0.1 and 0.01.
        every: steps for which a mask is used; ours.
        beta1, beta2, eps: of AdamS; usual values, for the abstract names none.
    """

    name = "shared_mask"
    equal = "step"
    directs = True
    examples = {"shared_mask": _sent(1), "shared_mask_every": _sent(2)}

    density: float = 0.1
    every: int = 1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

    def _check(self) -> None:
        number("density", self.density, 0, 1, open_low=True)
        self._whole("every", 1)
        number("beta1", self.beta1, 0, 1, open_high=True)
        number("beta2", self.beta2, 0, 1, open_high=True)
        number("eps", self.eps, 0, open_low=True)

    def build(self, replica: Replica) -> SharedMask:
        return SharedMask(self, replica)


class SharedMask(MomentumStrategy):
    """AdamS on the entries of a mask; matrices lie end to end in one flat vector, which each replica owns a part of."""

    def __init__(self, config: SharedMaskConfig, replica: Replica) -> None:
        super().__init__(config.name, replica)
        self.config, least = config, replica.config.min_compression_elements
        self.matrices = [name for name, p in self.parameters.items() if p.dim() > 1 and p.numel() >= least]
        self.rest = [name for name in self.parameters if name not in self.matrices]
        momenta = self.zeros(self.matrices)
        # Where no matrix is large enough the vector is empty, on their device.
        nothing = next(iter(self.parameters.values())).detach().new_zeros(0, dtype=torch.float32)
        flat = torch.cat([nothing, *(each.view(-1) for each in momenta.values())])
        channel = replica.channel()
        self.part = 8 * math.ceil(len(flat) / (8 * channel.world))
        self.begin, self.end = (min(rank * self.part, len(flat)) for rank in (channel.rank, channel.rank + 1))
        self.own["errors"] = {"matrices": flat}
        self.shared["momentum"] = {"matrices": flat.clone(), **self.zeros(self.rest)}
        first = torch.zeros(channel.world * self.part, dtype=torch.bool, device=flat.device)
        for begin in range(0, len(flat), self.part or 1):
            size = min(self.part, len(flat) - begin)
            chosen = self._chosen(size)
            first[begin + torch.arange(chosen, device=flat.device) * size // chosen] = True
        self.shared["mask"] = {"bits": pack_bits(first)[: math.ceil(len(flat) / 8)]}

    def _chosen(self, size: int) -> int:
        """Entries of a part of this size that a mask lets through."""
        return min(size, math.ceil(self.config.density * self.part))

    def before_step(self, gradients: Mapping[str, Tensor]) -> Asked:
        momentum, mask = self.shared["momentum"], self.shared["mask"]["bits"]
        errors = x = self.own["errors"]["matrices"]
        if self.matrices:
            x = errors + torch.cat([gradients[name].reshape(-1) for name in self.matrices])
        places = unpack_bits(mask)[: len(x)].nonzero().view(-1)
        sent, rest = x[places], {name: gradients[name] for name in self.rest}
        poison(sent, gradients)
        channel = self.replica.channel()
        bits = mask.new_empty((channel.world, self.part // 8))
        due = len(x) > 0 and (self.step + 1) % self.config.every == 0
        if due:
            channel.all_gather(bits, self._next_bits(x, momentum["matrices"])[None])
        yield from self.averaged([sent, *rest.values()], channel)
        if not all_finite({"": sent, **rest}):
            return False
        for name, gradient in rest.items():
            gradient.copy_(self._direction(momentum[name], gradient))
        old, moved = momentum["matrices"][places], torch.zeros_like(x)
        moved[places] = self._direction(old, sent)
        momentum["matrices"][places] = old
        errors.copy_(x)[places] = 0
        for name, part in zip(self.matrices, moved.split([gradients[n].numel() for n in self.matrices]), strict=True):
            gradients[name].copy_(part.view(gradients[name].shape))
        if due:
            mask.copy_(bits.view(-1)[: len(mask)])
        return True

    def _next_bits(self, x: Tensor, momentum: Tensor) -> Tensor:
        """This owner's part of the next mask."""
        own = slice(self.begin, self.end)
        statistic = (self.config.beta1 * momentum[own]).add_(x[own], alpha=1 - self.config.beta1).abs_()
        bits = torch.zeros(self.part, dtype=torch.bool, device=x.device)
        bits[statistic.topk(self._chosen(len(statistic)), sorted=False).indices] = True
        return pack_bits(bits)

    def _direction(self, momentum: Tensor, mean: Tensor) -> Tensor:
        """AdamS's direction of entries, whose momentum advances."""
        beta1, beta2, eps = self.config.beta1, self.config.beta2, self.config.eps
        mean = mean.to(momentum.dtype)
        root = momentum.square().mul_(beta2).addcmul_(mean, mean, value=1 - beta2).sqrt_().add_(eps)
        return momentum.mul_(beta1).add_(mean, alpha=1 - beta1) / root
