"""Ranks by a table of shares of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from edgc.checks import integer, number, require
from edgc.control.policies.base import History, Move, Policy, WindowEnd
from edgc.control.rank_model import StageModel
from edgc.control.settings import GivenConfig
from edgc.description import Look

Schedule = tuple[tuple[float, int], ...]


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(GivenConfig):
    """Ranks given in advance (ours).

    Attributes:
        schedule: (share of the run, rank) in ascending order of the share: from there on that rank, from the next
            window on. Warm-up comes first, as under every policy.
    """

    policy: str = "schedule"
    schedule: Schedule

    look = Look("schedule given in advance", "#332288", "3", "-.")

    def _check(self) -> None:
        super()._check()
        object.__setattr__(self, "schedule", _schedule(self.schedule))

    @property
    def ranks_given(self) -> tuple[int, ...]:
        return tuple(rank for _, rank in self.schedule)

    def start(self, model: StageModel, stages: int, iterations: int) -> Scheduled:
        return Scheduled(self.schedule, iterations)


class Scheduled(Policy):
    """Moves stage 0 as :func:`scheduled` says."""

    def __init__(self, schedule: Schedule, iterations: int) -> None:
        self.schedule, self.iterations = schedule, iterations

    def begin(self, iteration: int, r_max: int) -> int:
        return scheduled(self.schedule, iteration, self.iterations)

    def move(self, end: WindowEnd) -> Move:
        new = scheduled(self.schedule, end.iteration, self.iterations)
        return Move((new,), f"schedule; rank {end.ranks[0]} -> {new}")

    def go_on(self, iteration: int, rank: int, history: History, r_min: int, r_max: int) -> int:
        return scheduled(self.schedule, iteration, self.iterations)


def scheduled(schedule: Sequence[tuple[float, int]], iteration: int, iterations: int) -> int:
    """The rank after ``iteration`` of a run of ``iterations``, by a table of (share of the run, rank) in order.

    That of the last row whose share of the run is over; of the first row before that.
    """
    rank = schedule[0][1]
    for share, value in schedule:
        # As everywhere: 0.1 * 30 is above 3 in floating point.
        if round(share * iterations, 6) <= iteration:
            rank = value
    return rank


def _schedule(rows: Any) -> Schedule:
    fix = "use [[share of the run, rank], ...] with shares that rise from 0 to 1 and ranks of at least 1"
    require(isinstance(rows, Sequence) and not isinstance(rows, str) and len(rows) > 0, "schedule", rows, fix)
    for row in rows:
        ok = isinstance(row, Sequence) and not isinstance(row, str) and len(row) == 2
        require(ok, "schedule", rows, fix)
        number("schedule", row[0], 0, 1)
    ranks = [integer("schedule", row[1], 1) for row in rows]
    shares = [float(row[0]) for row in rows]
    require(all(a < b for a, b in pairwise(shares)), "schedule", rows, fix)
    return tuple(zip(shares, ranks, strict=True))
