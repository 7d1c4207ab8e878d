"""NoLoCo: pairs of replicas exchange what they moved and where they are, and no collective waits for all.

Source: Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large Models" (arXiv
2506.10911) and its code, a1b4a42 (sparse_optimizer_c.py:31-63; of its configurations those named ``*_mean_*``, the
others all-reduce). A round of replica i, whose partner is drawn anew in each, with both means over the pair::

    d <- mean of (theta - anchor) ;  r <- mean of anchor
    u_i <- m u_i + lr d + lr (r - anchor_i) ;  anchor_i <- anchor_i + u_i ;  theta_i <- anchor_i

Nothing makes replicas equal: the mean of their weights is what is evaluated, beside the mean of their losses. Of an odd
number of replicas one is its own partner. A round with a parameter that is not finite is void for its pair alone, for
nobody else hears of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgc.checks import number
from edgc.compressors.base import seeded
from edgc.lazy import Tensor, torch
from edgc.strategies.base import Asked, Replica, Strategy, StrategyExample, all_finite, restore
from edgc.strategies.local_updates import LocalUpdates, LocalUpdatesConfig, copy_all


@dataclass(frozen=True, kw_only=True)
class NoLoCoConfig(LocalUpdatesConfig):
    """Settings of NoLoCo; defaults are those of configs/no_reduce_exp/C4/c4_noloco_mean_100m_8.yaml.

    Attributes:
        every: H, inner steps a round.
        lr: of the outer step, and of the pull to the mean of the pair's anchors.
        momentum: of the outer step.
        seed: of the pairs.
    """

    name = "noloco"
    equal = "never"
    examples = {
        "noloco": StrategyExample(
            lambda shapes, world: 2 * sum(4 * math.prod(shape) for shape in shapes) / 5, {"every": 5}
        )
    }

    every: int = 50
    lr: float = 0.7
    momentum: float = 0.5
    seed: int = 0

    def _check(self) -> None:
        super()._check()
        number("lr", self.lr, 0, open_low=True)
        number("momentum", self.momentum, 0, 1)
        self._whole("seed", 0)

    def build(self, replica: Replica) -> NoLoCo:
        return NoLoCo(self, replica)


class NoLoCo(LocalUpdates):
    """Rounds of pairs. A replica that had no state goes on from its weights, as they are loaded, without momentum.

    Attributes:
        anchor: this replica's own.
        velocity: u, likewise.
    """

    config: NoLoCoConfig

    def __init__(self, config: NoLoCoConfig, replica: Replica) -> None:
        super().__init__(config, replica)
        replica.refuse_compression(config.name)
        self.velocity = {name: weight.new_zeros(weight.shape) for name, weight in self.anchor.items()}

    def end_round(self, deltas: dict[str, Tensor]) -> Asked:
        channel, turn = self.replica.channel(), self.step // self.config.every
        other = partner(channel.rank, channel.world, self.config.seed, turn)
        sent = torch.cat([each.reshape(-1) for each in (*deltas.values(), *self.anchor.values())])
        received = torch.empty_like(sent)
        channel.swap(received, sent, other)
        yield
        channel.finish()
        # Halved before they are added: the same bits for both, and no overflow.
        means = sent.mul_(0.5).add_(received, alpha=0.5)
        if not all_finite({"": means}):
            return False
        moves, anchors = means.chunk(2)
        sizes = [weight.numel() for weight in self.anchor.values()]
        for name, move, anchor in zip(self.anchor, moves.split(sizes), anchors.split(sizes), strict=True):
            own, velocity = self.anchor[name], self.velocity[name].mul_(self.config.momentum)
            velocity.add_(anchor.view_as(own) - own - move.view_as(own), alpha=self.config.lr)
            own.add_(velocity)
        return True

    def shared_state(self) -> dict[str, Any]:
        return Strategy.shared_state(self)

    def own_state(self) -> dict[str, Any]:
        return {"anchor": self.anchor, "velocity": self.velocity}

    def load_state(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        Strategy.load_state(self, shared, own)
        if own is not None:
            restore(self.anchor, own, "own", "anchor")
            restore(self.velocity, own, "own", "velocity")
            return
        copy_all(self.anchor, self.parameters)
        for velocity in self.velocity.values():
            velocity.zero_()


def partner(rank: int, world: int, seed: int, turn: int) -> int:
    """The replica that ``rank`` is paired with in a round, the same draw on all; itself if it is left over."""
    order: list[int] = torch.randperm(world, generator=seeded("noloco", seed, turn), device="cpu").tolist()
    other = order.index(rank) ^ 1
    return order[other] if other < world else rank
