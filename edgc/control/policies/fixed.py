"""One rank for all of the run after warm-up."""

from __future__ import annotations

from dataclasses import dataclass

from edgc.control.policies.base import History, Move, Policy, WindowEnd
from edgc.control.rank_model import StageModel
from edgc.control.settings import GivenConfig
from edgc.description import Example


@dataclass(frozen=True, kw_only=True)
class FixedConfig(GivenConfig):
    """A fixed rank, to compare the other policies with (ours).

    Attributes:
        rank: of stage 0.
    """

    policy: str = "fixed"
    rank: int

    examples = {"edgc": Example(lambda m, n: 4 * 8 * (m + n), {"rank": 8})}

    def _check(self) -> None:
        super()._check()
        self._whole("rank", 1)

    @property
    def ranks_given(self) -> tuple[int, ...]:
        return (self.rank,)

    def start(self, model: StageModel, stages: int, iterations: int) -> Fixed:
        return Fixed(self.rank)


class Fixed(Policy):
    """Leaves stage 0 where it is."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def begin(self, iteration: int, r_max: int) -> int:
        return self.rank

    def move(self, end: WindowEnd) -> Move:
        return Move(None, "fixed rank")

    def go_on(self, iteration: int, rank: int, history: History, r_min: int, r_max: int) -> int:
        return self.rank
