"""Rules of public codes: ranks by how much the entropy, or the training loss, has changed since the last window."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgc.config import Look
from edgc.control.policies.base import History, MeansPolicy, Move, WindowEnd
from edgc.control.settings import SteppedConfig
from edgc.errors import UserError


class Released(MeansPolicy):
    """Follows entropy by :func:`by_change`."""

    def target(self, now: float, end: WindowEnd) -> Move:
        means = self.means(end.history)
        return by_change(self.follows, end.r_min, end.r_max, means.first, means.previous, now)


class Loss(Released):
    """Follows the loss by :func:`by_change`."""

    follows = "loss"

    def check_loss(self, iteration: int, loss: float, history: History) -> None:
        # A window that iteration 1 ends is over before its loss can be told.
        if iteration > 1 and not history.loss.first and math.isnan(loss):
            problem = f"policy loss was not told a training loss in the first {iteration} iterations"
            raise UserError(problem, fix="call add_loss(loss) after every backward, on at least one rank")


@dataclass(frozen=True, kw_only=True)
class ReleasedConfig(SteppedConfig):
    """EDGC as in the public code (repository xiaoao-666/EDGC, commit 69a7674)."""

    rule = Released
    policy: str = "released"

    look = Look("EDGC (released policy)", "#E69F00", "^", "--")


@dataclass(frozen=True, kw_only=True)
class LossConfig(SteppedConfig):
    """Ranks by the change of the training loss, which must be told with ``add_loss``.

    The rule of the public code HYGON-AI/Megatron-LM-das, commit 46178f3.
    """

    rule = Loss
    policy: str = "loss"

    look = Look("follows the loss", "#CC3311", "2", ":")


def by_change(quantity: str, r_min: int, r_max: int, first: list[float], previous: float | None, now: float) -> Move:
    """Target by the rule of the public codes: ``r_min + (r_max - r_min) |x_k - x_(k-1)| / |x_2 - x_1|``, at most r_max.

    x_k is the mean of window k: of the ``entropy``, or of the training ``loss``; x_1 and x_2 are the ``first`` two of
    the run that are known. That code divides by their difference unguarded; here a difference of 0, like a window that
    has no measurement (None), leaves the rank as it is. It rounds down to even ranks, the steps here to the multiple.
    """
    if len(first) < 2 or previous is None:
        return Move(None, f"the window before has no {quantity}")
    if first[0] == first[1]:
        return Move(None, f"the first two windows have equal {'losses' if quantity == 'loss' else 'entropies'}")
    ratio = abs(now - previous) / abs(first[1] - first[0])
    rank = r_min + (r_max - r_min) * min(1.0, ratio)
    return Move(None, f"{quantity} change of {ratio:.3f} times the first one asks for rank {rank:.1f}", rank)
