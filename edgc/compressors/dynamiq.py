"""Widths of 2, 4 or 8 bits, chosen block by block from norms that all workers share, after DynamiQ (arXiv 2602.08923).

Known here from published notes of the paper. Of every 256 consecutive entries (a super-group) the workers average the
mean, which is subtracted, and the norm. Squared norms of at least T have 8 bits, up to (17/512) T 2 bits, the rest 4,
with the smallest T that keeps a shard within its bytes: widths follow from what all know, and are not sent. An entry is
rounded at random to a multiple of its step, so that the result is the mean on average; the draws of the workers are
spread evenly over [0, 1), so that their errors cancel in part. The step is what the largest of 16 entries asks for, in
a byte times a bfloat16 of the super-group.

Not as there: mean and norm in fp32 (squares of gradients leave the range of fp16); levels at equal distances (their
epsilon is not known here); the sum by all-to-all and all-gather, with one more rounding, in place of a rounding a hop.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from edgc.checks import number
from edgc.compressors.base import Compressor
from edgc.compressors.bits import fold_quarters, unfold_quarters
from edgc.compressors.entrywise.feedback import EntrywiseConfig, Feedback, Flat, Result
from edgc.config import Example, Look
from edgc.lazy import Tensor, torch
from edgc.runtime.channel import Channel

SUPER, GROUP, UNIT = 256, 16, 64  # entries that share mean and width, and a step; bytes of a super-group's 2 bits
RATIO, BESIDE = 17 / 512, (2 * 32 + 16 + 8 * SUPER // GROUP) / SUPER  # bits of an entry for means, norms and steps


@dataclass(frozen=True, kw_only=True)
class DynamiQConfig(EntrywiseConfig):
    """Blocks of 2, 4 or 8 bits.

    Attributes:
        mean_bits: of an entry, with all that is sent beside it; from 3 to 8 (paper: 5).
        error_feedback: paper: none, the result is unbiased without. With it (ours) what one step loses is sent later.
    """

    method: str = "dynamiq"
    mean_bits: float = 5.0
    error_feedback: bool = False

    look = Look("DynamiQ's widths", "#DDCC77", "4", "--")
    # Less the mean an entry is at most twice the largest, and either rounding may miss it by as much.
    examples = {"dynamiq": Example(lambda m, n: m * n * 5 / 8, bound=4.2)}

    def _check(self) -> None:
        super()._check()
        number("mean_bits", self.mean_bits, 3, 8)

    def build(self) -> Compressor:
        return self.around(DynamiQ(self))


class DynamiQ(Feedback):
    """Every worker owns as many super-groups, those of all matrices together."""

    config: DynamiQConfig
    align = SUPER
    draws_at_random = True

    def waits(self, rank: int | None) -> int:
        return 1 if rank is None else 3

    def _average(self, flat: Flat, channel: Channel) -> Generator[None, None, Result]:
        work, world, me = flat.work, channel.world, slice(channel.rank, channel.rank + 1)
        count = -(-len(work) // (SUPER * world))
        x = torch.nn.functional.pad(work, (0, count * SUPER * world - len(work))).view(world, count, SUPER)
        shared = torch.stack([x.mul(1 / SUPER).sum(2), torch.linalg.vector_norm(x, dim=2, dtype=torch.float64).float()])
        channel.mean_(shared)
        yield
        budget = int(count * (self.config.mean_bits - BESIDE) / 2)
        middle, units = shared[0][..., None], chosen(shared[1].double(), budget)
        x = x - middle
        sent = pack(x, units, budget, self._draw(flat, x, channel.rank / world))
        received = torch.empty_like(sent)
        channel.all_to_all(received, sent)
        yield
        unsent = x - unpack(sent, units, budget)
        mean = (unpack(received, units[me].expand(world, -1), budget) / world).sum(0, keepdim=True)
        message = pack(mean, units[me], budget, self._draw(flat, mean, 0, "mean"))
        unsent[me] += world * (mean - unpack(message, units[me], budget))
        work.copy_(unsent.view(-1)[: len(work)])
        everything = torch.empty_like(sent)
        channel.all_gather(everything, message)
        yield
        result = unpack(everything, units, budget).add_(middle).view(-1)[: len(work)]
        return result.isfinite().all(), lambda out: out.copy_(result)

    def _draw(self, flat: Flat, x: Tensor, shift: float, *of: str) -> Tensor:
        """From [0, 1), of all workers the same but for ``shift``; a half where nothing is drawn."""
        if not self.draws_at_random:
            return torch.full_like(x, 0.5)
        generator = torch.Generator(x.device).manual_seed(self._generator(flat.names[0], *of).initial_seed())
        return torch.empty_like(x).uniform_(generator=generator).add_(shift).remainder_(1)


def chosen(norms: Tensor, budget: int) -> Tensor:
    """1, 2 or 4 units of every super-group [W, n] by its norm (fp64), of each row together at most ``budget``."""
    squares = norms.square().nan_to_num(0, 0, 0)
    high = squares.sort(1).values
    low = high / RATIO  # of 2 bits up to T
    thresholds = torch.cat([high, low, torch.full_like(high[:, :1], torch.inf)], 1).clamp_(min=1e-300).sort(1).values
    most, least = (torch.searchsorted(side, thresholds, right=right) for side, right in ((high, False), (low, True)))
    fits = 4 * (high.shape[1] - most) + 2 * (most - least) + least <= budget
    bound = thresholds.gather(1, fits.int().argmax(1, keepdim=True))
    return 1 + (squares / RATIO > bound).long() + 2 * (squares >= bound).long()


def places(units: Tensor, budget: int) -> Tensor:
    """Where the four units of every super-group [W, n] lie in the body, [W, 4 n, UNIT]; behind it those it has not."""
    own = torch.arange(4, device=units.device)
    found = torch.where(own < units[..., None], (units.cumsum(1) - units)[..., None] + own, budget)
    return found.view(len(units), -1, 1).expand(-1, -1, UNIT)


def pack(x: Tensor, units: Tensor, budget: int, draw: Tensor) -> Tensor:
    """Messages [W, bytes] of super-groups [W, n, SUPER]: steps in two parts, and the body of ``budget`` units."""
    top, levels = x.view(*units.shape, -1, GROUP).abs().amax(3), highest(units)
    coarse = (top.amax(2) * ((1 + 2**-7) / 255)).bfloat16()
    coarse += coarse - coarse  # NaN of what is not finite
    fine = (top / coarse.float()[..., None]).nan_to_num_(0, 0, 0).ceil_().clamp_(max=255).to(torch.uint8)
    scaled = (x / steps(coarse, fine, levels)).add_(draw).floor_().nan_to_num_(0, 0, 0)
    codes = scaled.clamp(-levels, levels).add_(levels)
    rows = fold_quarters(codes.to(torch.uint8).view(*units.shape, 4, UNIT), units).view(len(units), -1, UNIT)
    body = torch.zeros((len(units), budget + 1, UNIT), dtype=torch.uint8, device=x.device)
    body.scatter_(1, places(units, budget), rows)
    return torch.cat([part.reshape(len(units), -1) for part in (coarse.view(torch.uint8), fine, body[:, :budget])], 1)


def unpack(messages: Tensor, units: Tensor, budget: int) -> Tensor:
    """Super-groups [W, n, SUPER] of messages."""
    world, count = units.shape
    coarse, fine, body = messages.split([2 * count, count * SUPER // GROUP, budget * UNIT], 1)
    body = torch.nn.functional.pad(body.view(world, budget, UNIT), (0, 0, 0, 1))
    codes = unfold_quarters(body.gather(1, places(units, budget)).view(world, count, 4, UNIT), units)
    coarse, fine = coarse.contiguous().view(torch.bfloat16), fine.reshape(world, count, -1)
    return (codes.view(world, count, SUPER).float() - highest(units)) * steps(coarse, fine, highest(units))


def highest(units: Tensor) -> Tensor:
    """The highest level of every super-group, [W, n, 1]: 1, 7 or 127."""
    return (2 ** (2 * units - 1) - 1).to(torch.float32)[..., None]


def steps(coarse: Tensor, fine: Tensor, levels: Tensor) -> Tensor:
    """The step of every entry, [W, n, SUPER]."""
    step = coarse.float()[..., None] / levels * fine.float()
    return step[..., None].expand(*step.shape, GROUP).reshape(*step.shape[:2], SUPER)
