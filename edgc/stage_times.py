"""What a run knows about the times of its stages, and the ranks that :mod:`edgc.alignment` makes of it."""

from __future__ import annotations

import math

from edgc.alignment import LinearTime, align
from edgc.config import EDGCConfig
from edgc.rank_search import RankSearch


class StageTimes:
    """The times that one run aligns its stages with: given, or measured while training (``config.alignment``).

    Attributes:
        backward: backward times of a micro-batch as they were reported, seconds.
    """

    def __init__(self, config: EDGCConfig, stages: int) -> None:
        self.config, self.stages = config, stages
        self.backward: list[float] = []
        self._lines: list[LinearTime] | None = None
        self._uncompressed = [math.inf] * stages
        if config.alignment == "given":
            given = config.timing
            self._lines = [LinearTime(given.seconds_per_rank, given.seconds_fixed)] * stages
            self._uncompressed = [given.seconds_uncompressed or math.inf] * stages

    def add_backward(self, seconds: float | None) -> None:
        """Take in a reported backward time, if it is one."""
        if seconds is not None and math.isfinite(seconds):
            self.backward.append(max(0.0, seconds))

    def use(self, search: RankSearch) -> None:
        """Take over what a finished search has timed, if measured times are asked for."""
        if self.config.alignment == "measured":
            self._lines, self._uncompressed = search.lines(), search.uncompressed()

    def ranks(self, first_rank: int, r_min: int | None, r_max: int) -> tuple[tuple[int | None, ...], str]:
        """The ranks of all stages for stage 0's, and a remark where alignment was asked for in vain."""
        same: tuple[int | None, ...] = (first_rank,) * self.stages
        if self.config.alignment == "off" or self.stages == 1:
            return same, ""
        backward = self.config.timing.backward_seconds
        if self.config.alignment == "measured":
            if self._lines is None:
                return same, "not aligned: fewer than two ranks were timed"
            if not self.backward:
                return same, "not aligned: no backward time was reported"
            backward = sorted(self.backward)[len(self.backward) // 2]
        assert self._lines is not None
        multiple = self.config.rank_multiple
        aligned = align(
            first_rank, self.stages, backward, self._lines, self._uncompressed, r_max, multiple, r_min
        )
        return aligned, ""
