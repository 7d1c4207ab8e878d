"""DiLoCo: every replica takes steps of its own; the mean of what they moved is a gradient for an outer Nesterov step.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv 2311.08105),
Algorithm 1; defaults of its public reimplementations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgc.checks import need, number
from edgc.lazy import Tensor
from edgc.strategies.base import Asked, Replica, StrategyExample, all_finite, dense_bytes, gradients_of, restore
from edgc.strategies.local_updates import LocalUpdates, LocalUpdatesConfig, Nesterov


def _low_rank(shapes: Sequence[Sequence[int]], world: int) -> float:
    """Bytes a step of the second example: rank 4, its two factors, every five steps; vectors as they are."""
    sent = [[(shape[0] + shape[1]) * 4] if len(shape) == 2 else shape for shape in shapes]
    return dense_bytes(sent, world) / 5


@dataclass(frozen=True, kw_only=True)
class DiLoCoConfig(LocalUpdatesConfig):
    """Settings of DiLoCo.

    Attributes:
        every: H, inner steps a round. Paper: 500; its scaling laws (2503.09799): 30.
        lr: of the outer step. OpenDiLoCo and torchft: 0.7; MaxText: 0.3.
        momentum: of the outer step, Nesterov's. Paper and codes: 0.9.
    """

    name = "diloco"
    examples = {
        "diloco": StrategyExample(lambda shapes, world: dense_bytes(shapes, world) / 5, {"every": 5}),
        "diloco_powersgd": StrategyExample(_low_rank, {"every": 5}, {"method": "powersgd", "rank": 4}),
    }

    lr: float = 0.7
    momentum: float = 0.9

    def _check(self) -> None:
        super()._check()
        number("lr", self.lr, 0, open_low=True)
        number("momentum", self.momentum, 0, 1)

    def build(self, replica: Replica) -> DiLoCo:
        return DiLoCo(self, replica)


class DiLoCo(LocalUpdates):
    """Local steps, and outer steps with the mean of the replicas' deltas.

    Attributes:
        outer: the outer optimizer, the same on every replica.
        engine: averages the deltas.
    """

    def __init__(self, config: DiLoCoConfig, replica: Replica) -> None:
        super().__init__(config, replica)
        self.outer = Nesterov(self.anchor, config.lr, config.momentum)
        self.engine = replica.engine(config.rounds(replica.iterations))

    def end_round(self, deltas: dict[str, Tensor]) -> Asked:
        yield from self.engine.exchange(gradients_of(deltas), self.replica.group)
        ok = all_finite(deltas)
        self.engine.end_iteration(skipped=not ok)
        if ok:
            self.outer.step(deltas)
        return ok

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), "velocity": self.outer.velocity}

    def own_state(self) -> dict[str, Any]:
        return {"engine": self.engine.state_dict()}

    def load_state(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        super().load_state(shared, own)
        restore(self.outer.velocity, shared, "shared", "velocity")
        if own is not None:
            need(own, ("engine",), "own")
            self.engine.load_state_dict(own["engine"])
