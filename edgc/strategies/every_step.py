"""Averaged gradients at every step: data parallelism, by whatever compressor the settings name."""

from __future__ import annotations

from dataclasses import dataclass

from edgc.strategies.base import Replica, Strategy, StrategyConfig, StrategyExample, dense_bytes


@dataclass(frozen=True, kw_only=True)
class EveryStepConfig(StrategyConfig):
    """Nothing to set."""

    name = "every_step"
    equal = "step"
    examples = {"every_step": StrategyExample(dense_bytes)}

    def build(self, replica: Replica) -> EveryStep:
        return EveryStep()


class EveryStep(Strategy):
    """Gradients are averaged before every step of the optimizer."""

    def reduces(self, step: int) -> bool:
        return True
