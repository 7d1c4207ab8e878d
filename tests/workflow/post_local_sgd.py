"""Post-local SGD: averaged gradients at first, then steps of every replica's own, and the mean of their weights now and
then. Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD" (arXiv 1808.07217).

What ``CONTRIBUTING.md`` tells, done by ``tests/workflow/test_contributing.py``; no strategy of the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgc.compressors.base import Steps
from edgc.lazy import Tensor
from edgc.strategies.base import (
    Asked,
    Replica,
    Strategy,
    StrategyConfig,
    StrategyExample,
    all_finite,
    dense_bytes,
    restore,
)
from edgc.strategies.local_updates import copy_all


@dataclass(frozen=True, kw_only=True)
class PostLocalSGDConfig(StrategyConfig):
    """Settings of post-local SGD.

    Attributes:
        every: H, steps between two means. Paper: up to 16.
        dense_steps: with averaged gradients, before the first that is not. Paper: those before the rate falls.
    """

    name = "post_local_sgd"
    equal = "round"
    examples = {"post_local_sgd": StrategyExample(lambda shapes, world: dense_bytes(shapes, world) / 4, {"every": 4})}

    every: int = 16
    dense_steps: int = 0

    def _check(self) -> None:
        self._whole("every", 1)
        self._whole("dense_steps", 0)

    @property
    def period(self) -> int:
        return self.every

    def build(self, replica: Replica) -> PostLocalSGD:
        return PostLocalSGD(self, replica)


class PostLocalSGD(Strategy):
    """Weights that are averaged; a round with one that is not finite begins anew from ``start``, the last mean."""

    def __init__(self, config: PostLocalSGDConfig, replica: Replica) -> None:
        self.config, self.replica = config, replica
        self.start = {name: p.detach().clone() for name, p in replica.parameters.items()}

    def reduces(self, step: int) -> bool:
        return step <= self.config.dense_steps

    def before_step(self, gradients: Mapping[str, Tensor]) -> Asked:
        yield from ()
        return not self.reduces(self.step + 1) or all_finite(gradients)

    def after_step(self) -> Steps:
        self.step += 1
        local = self.step - self.config.dense_steps
        if local == 0:
            copy_all(self.start, self.replica.parameters)
        if local <= 0 or local % self.config.every:
            return
        means = {name: p.detach().clone() for name, p in self.replica.parameters.items()}
        channel = self.replica.channel()
        for mean in means.values():
            channel.mean_(mean)
        yield
        channel.finish()
        if all_finite(means):
            copy_all(self.start, means)
        else:
            self.replica.mend_optimizer()
        copy_all(self.replica.parameters, self.start)

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), "start": self.start}

    def load_state(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        super().load_state(shared, own)
        restore(self.start, shared, "shared", "start")
