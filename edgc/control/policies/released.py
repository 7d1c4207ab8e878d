"""The rule of the authors' public code: ranks by how much the entropy has changed since the last window."""

from __future__ import annotations

from dataclasses import dataclass

from edgc.control.policies.base import MeansPolicy, Target, WindowEnd
from edgc.control.rank_model import StageModel
from edgc.control.settings import SteppedConfig
from edgc.description import Look


@dataclass(frozen=True, kw_only=True)
class ReleasedConfig(SteppedConfig):
    """EDGC as in the public code (repository xiaoao-666/EDGC, commit 69a7674)."""

    policy: str = "released"

    look = Look("EDGC (released policy)", "#E69F00", "^", "--")

    def start(self, model: StageModel, stages: int, iterations: int) -> Released:
        return Released(self)


class Released(MeansPolicy):
    """Follows entropy by :func:`by_change`."""

    def target(self, now: float, end: WindowEnd) -> Target:
        means = self.means(end.history)
        first, second = means.first if len(means.first) == 2 else (None, None)
        return by_change(self.follows, end.r_min, end.r_max, first, second, means.previous, now)


def by_change(
    what: str, r_min: int, r_max: int, first: float | None, second: float | None, previous: float | None, now: float
) -> Target:
    """The rule of the public codes: ``r_min + (r_max - r_min) |x_k - x_(k-1)| / |x_2 - x_1|``, at most r_max.

    x_k is the mean of window k: of the ``entropy``, or of the training ``loss``; x_1 and x_2 are of the first two
    windows of the run that have one. That code divides by their difference unguarded; here a difference of 0, like a
    window that has no measurement (None), leaves the rank as it is. It rounds down to even ranks, the steps here to
    the multiple.
    """
    if first is None or second is None or previous is None:
        return Target(None, f"the window before has no {what}")
    if first == second:
        return Target(None, f"the first two windows have equal {'losses' if what == 'loss' else 'entropies'}")
    ratio = abs(now - previous) / abs(second - first)
    rank = r_min + (r_max - r_min) * min(1.0, ratio)
    return Target(rank, f"{what} change of {ratio:.3f} times the first one asks for rank {rank:.1f}")
