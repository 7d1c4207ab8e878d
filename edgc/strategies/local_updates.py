"""Local updates: every replica takes steps of its own for a round, and then the replicas exchange what they moved.

What DiLoCo and its kin share: steps with averaged gradients before the first round, the anchor that a round starts
from, rounds that are void, state. In such strategies the rate of the outer step does not carry over between lengths of
rounds, numbers of replicas and inner optimizers: tune it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from edgc.compressors.base import Steps
from edgc.lazy import Tensor
from edgc.strategies.base import Asked, Equality, Replica, Strategy, StrategyConfig, all_finite, restore


@dataclass(frozen=True, kw_only=True)
class LocalUpdatesConfig(StrategyConfig):
    """Settings of local updates.

    Attributes:
        every: H, inner steps a round.
        warmup_steps: steps with averaged gradients before the first round (ours); many start from a trained model.
    """

    equal: ClassVar[Equality] = "round"

    every: int = 30
    warmup_steps: int = 0

    def _check(self) -> None:
        self._whole("every", 1)
        self._whole("warmup_steps", 0)

    @property
    def period(self) -> int:
        return self.every

    def rounds(self, iterations: int) -> int:
        """Rounds in a run of so many steps, at least 1."""
        return max(1, (iterations - self.warmup_steps) // self.every)


class LocalUpdates(Strategy):
    """Local steps, and a round's end after every ``every`` of them.

    A round with a parameter that is not finite on a replica is void: all begin it anew from the anchor, and the
    replica's optimizer loses what is not finite of its state.

    Attributes:
        anchor: weights after the last round, the same on every replica where it is not said otherwise.
    """

    def __init__(self, config: LocalUpdatesConfig, replica: Replica) -> None:
        self.config, self.replica = config, replica
        self.parameters = replica.parameters
        self.anchor = {name: p.detach().clone() for name, p in self.parameters.items()}

    def reduces(self, step: int) -> bool:
        return step <= self.config.warmup_steps

    def before_step(self, gradients: Mapping[str, Tensor]) -> Asked:
        yield from ()
        return not self.reduces(self.step + 1) or all_finite(gradients)

    def after_step(self) -> Steps:
        self.step += 1
        taken = self.step - self.config.warmup_steps
        if taken == 0:
            copy_all(self.anchor, self.parameters)
        if taken > 0:
            yield from self.after_local_step(taken)

    def after_local_step(self, taken: int) -> Steps:
        """Finish the local step of this number, counted from 1."""
        if taken % self.config.every == 0:
            if not (yield from self.end_round(self.deltas())):
                self.replica.mend_optimizer()
            copy_all(self.parameters, self.anchor)

    def end_round(self, deltas: dict[str, Tensor]) -> Asked:
        """Exchange what replicas moved, and move the anchor.

        Returns:
            False, with the anchor where it was, if the round is void: the same answer on every replica.
        """
        raise NotImplementedError

    def deltas(self) -> dict[str, Tensor]:
        """Moves of this replica since the anchor, as a gradient: against their direction."""
        return {name: self.anchor[name] - p.detach() for name, p in self.parameters.items()}

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), "anchor": self.anchor}

    def load_state(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        super().load_state(shared, own)
        restore(self.anchor, shared, "shared", "anchor")


class Nesterov:
    """Outer steps of SGD with Nesterov's momentum, as torch's: u <- m u + d; anchor <- anchor - lr (d + m u).

    Attributes:
        velocity: u by parameter name.
    """

    def __init__(self, anchor: Mapping[str, Tensor], lr: float, momentum: float) -> None:
        self.anchor, self.lr, self.momentum = anchor, lr, momentum
        self.velocity = {name: weight.new_zeros(weight.shape) for name, weight in anchor.items()}

    def step(self, deltas: Mapping[str, Tensor]) -> None:
        """Move the anchor by the mean of the replicas' deltas."""
        for name, delta in deltas.items():
            velocity = self.velocity[name].mul_(self.momentum).add_(delta)
            self.anchor[name].sub_(delta.add(velocity, alpha=self.momentum), alpha=self.lr)


def copy_all(to: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Overwrite tensors by those of the same names."""
    for name, tensor in to.items():
        tensor.detach().copy_(source[name].detach())
