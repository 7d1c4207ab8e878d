"""DiLoCo: every replica takes steps of its own; the mean of what they moved is a gradient for an outer Nesterov step.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv 2311.08105),
Algorithm 1; defaults of its public reimplementations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgc.checks import number
from edgc.compressors.base import Steps
from edgc.lazy import Tensor
from edgc.strategies.base import (
    Replica,
    Strategy,
    StrategyConfig,
    StrategyExample,
    all_finite,
    dense_bytes,
    gradients_of,
)


def _low_rank(shapes: Sequence[Sequence[int]], world: int) -> float:
    """Bytes a step of the second example: rank 4, its two factors, every five steps; vectors as they are."""
    sent = [[(shape[0] + shape[1]) * 4] if len(shape) == 2 else shape for shape in shapes]
    return dense_bytes(sent, world) / 5


@dataclass(frozen=True, kw_only=True)
class DiLoCoConfig(StrategyConfig):
    """Settings of DiLoCo. The outer rate does not carry over between ``every``, replicas and inner optimizers: tune it.

    Attributes:
        every: H, inner steps a round. Paper: 500; its scaling laws (2503.09799): 30.
        lr: of the outer step. OpenDiLoCo and torchft: 0.7; MaxText: 0.3.
        momentum: of the outer step, Nesterov's. Paper and codes: 0.9.
        warmup_steps: steps with averaged gradients before the first round (ours); many start from a trained model.
    """

    name = "diloco"
    equal = "round"
    examples = {
        "diloco": StrategyExample(lambda shapes, world: dense_bytes(shapes, world) / 5, {"every": 5}),
        "diloco_powersgd": StrategyExample(_low_rank, {"every": 5}, {"method": "powersgd", "rank": 4}),
    }

    every: int = 30
    lr: float = 0.7
    momentum: float = 0.9
    warmup_steps: int = 0

    def _check(self) -> None:
        self._whole("every", 1)
        self._whole("warmup_steps", 0)
        number("lr", self.lr, 0, open_low=True)
        number("momentum", self.momentum, 0, 1)

    @property
    def period(self) -> int:
        return self.every

    def build(self, replica: Replica) -> DiLoCo:
        return DiLoCo(self, replica)


class DiLoCo(Strategy):
    """Local steps, and outer steps with the mean of the replicas' deltas.

    Attributes:
        anchor: weights after the last round, the same on every replica.
        velocity: momentum of the outer step.
    """

    def __init__(self, config: DiLoCoConfig, replica: Replica) -> None:
        self.config, self.replica = config, replica
        self.parameters = replica.parameters
        self.anchor = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.velocity = {name: p.detach().new_zeros(p.shape) for name, p in self.parameters.items()}
        self.engine = replica.engine(max(1, (replica.iterations - config.warmup_steps) // config.every))

    def reduces(self, step: int) -> bool:
        return step <= self.config.warmup_steps

    def after_step(self) -> Steps:
        self.step += 1
        taken = self.step - self.config.warmup_steps
        if taken == 0:
            self._move_anchor()
        if taken <= 0 or taken % self.config.every:
            return
        deltas = {name: self.anchor[name] - p.detach() for name, p in self.parameters.items()}
        yield from self.engine.exchange(gradients_of(deltas), self.replica.group)
        ok = all_finite(deltas)
        self.engine.end_iteration(skipped=not ok)
        if not ok:
            self.replica.mend_optimizer()
        else:
            for name, delta in deltas.items():
                self._outer_step(name, delta)
        for name, p in self.parameters.items():
            p.data.copy_(self.anchor[name])

    def _outer_step(self, name: str, delta: Tensor) -> None:
        velocity = self.velocity[name].mul_(self.config.momentum).add_(delta)
        self.anchor[name].sub_(delta.add(velocity, alpha=self.config.momentum), alpha=self.config.lr)

    def _move_anchor(self) -> None:
        for name, p in self.parameters.items():
            self.anchor[name].copy_(p.detach())

    def shared_state(self) -> dict[str, Any]:
        return {"step": self.step, "anchor": self.anchor, "velocity": self.velocity}

    def own_state(self) -> dict[str, Any]:
        return {"engine": self.engine.state_dict()}

    def load_state(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        super().load_state(shared, own)
        for name, anchor in self.anchor.items():
            anchor.copy_(shared["anchor"][name])
            self.velocity[name].copy_(shared["velocity"][name])
        if own is not None:
            self.engine.load_state_dict(own["engine"])
