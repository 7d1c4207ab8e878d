"""Policies whose ranks are given in advance (ours): one for the whole run, or a table of shares of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from edgc.checks import integer, number, require
from edgc.config import Example, Look
from edgc.control.policies.base import History, Move, Policy, WindowEnd
from edgc.control.settings import GivenConfig, Schedule


class Scheduled(Policy):
    """Moves stage 0 as :func:`scheduled` says."""

    config: GivenConfig

    def begin(self, iteration: int, r_max: int) -> int:
        return scheduled(self.config.table, iteration, self.iterations)

    def move(self, end: WindowEnd) -> Move:
        new = scheduled(self.config.table, end.iteration, self.iterations)
        return Move((new,), f"schedule; rank {end.ranks[0]} -> {new}")

    def go_on(self, iteration: int, rank: int, history: History, r_min: int, r_max: int) -> int:
        return self.begin(iteration, r_max)


class Fixed(Scheduled):
    """Leaves stage 0 where it is."""

    def move(self, end: WindowEnd) -> Move:
        return Move(None, "fixed rank")


@dataclass(frozen=True, kw_only=True)
class FixedConfig(GivenConfig):
    """A fixed rank, to compare the other policies with (ours).

    Attributes:
        rank: of stage 0.
    """

    rule = Fixed
    policy: str = "fixed"
    rank: int

    examples = {"edgc": Example(lambda m, n: 4 * 8 * (m + n), {"rank": 8})}

    def _check(self) -> None:
        super()._check()
        self._whole("rank", 1)

    @property
    def table(self) -> Schedule:
        return ((0.0, self.rank),)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(GivenConfig):
    """Ranks given in advance (ours).

    Attributes:
        schedule: (share of the run, rank) in ascending order of the share: from there on that rank, from the next
            window on. Warm-up comes first, as under every policy.
    """

    rule = Scheduled
    policy: str = "schedule"
    schedule: Schedule

    look = Look("schedule given in advance", "#332288", "3", "-.")

    def _check(self) -> None:
        super()._check()
        object.__setattr__(self, "schedule", _checked(self.schedule))

    @property
    def table(self) -> Schedule:
        return self.schedule


def scheduled(schedule: Sequence[tuple[float, int]], iteration: int, iterations: int) -> int:
    """Rank after ``iteration`` of a run of ``iterations``, by a table of (share of the run, rank) in order.

    The last row whose share of the run is over; before that the first row.
    """
    # Rounded, as everywhere: 0.1 * 30 is above 3 in floating point.
    started = [rank for share, rank in schedule if round(share * iterations, 6) <= iteration]
    return started[-1] if started else schedule[0][1]


def _checked(rows: Any) -> Schedule:
    fix = "use [[share of the run, rank], ...] with shares that rise from 0 to 1 and ranks of at least 1"
    pairs = isinstance(rows, Sequence) and not isinstance(rows, str) and len(rows) > 0
    pairs = pairs and all(isinstance(row, Sequence) and not isinstance(row, str) and len(row) == 2 for row in rows)
    require(pairs, "schedule", rows, fix)
    for share, _ in rows:
        number("schedule", share, 0, 1)
    schedule = tuple((float(share), integer("schedule", rank, 1)) for share, rank in rows)
    require(all(a < b for (a, _), (b, _) in pairwise(schedule)), "schedule", rows, fix)
    return schedule
