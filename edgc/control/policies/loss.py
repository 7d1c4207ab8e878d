"""The public code's rule on the training loss, as in HYGON-AI/Megatron-LM-das, commit 46178f3."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgc.control.policies.base import History
from edgc.control.policies.released import Released
from edgc.control.rank_model import StageModel
from edgc.control.settings import SteppedConfig
from edgc.description import Look
from edgc.errors import UserError


@dataclass(frozen=True, kw_only=True)
class LossConfig(SteppedConfig):
    """Ranks by the change of the training loss, which must be told: ``add_loss``."""

    policy: str = "loss"

    look = Look("follows the loss", "#CC3311", "2", ":")

    def start(self, model: StageModel, stages: int, iterations: int) -> Loss:
        return Loss(self)


class Loss(Released):
    """Follows the loss by :func:`edgc.control.policies.released.by_change`."""

    follows = "loss"

    def check_loss(self, iteration: int, loss: float, history: History) -> None:
        # A window that iteration 1 ends is over before its loss can be told.
        if iteration > 1 and not history.loss.first and math.isnan(loss):
            what = f"policy loss was not told a training loss in the first {iteration} iterations"
            raise UserError(what, fix="call add_loss(loss) after every backward, on at least one rank")
