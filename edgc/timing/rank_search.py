"""Search of r_max: time doubling ranks until compression stops paying (paper, section on DAC).

It runs in warm-up, and again when times have changed. The schedule is that of the authors' public code, which starts
at iteration 10 with two timings per rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def bytes_limit(
    shapes: Sequence[tuple[int, int]], multiple: int, *, factor_bits: float = 32, gradient_bits: float = 32
) -> int:
    """Largest multiple at which a stage's factors take fewer bytes than its matrices; 0 if none.

    It is below the stage's largest full rank: there nothing would be left to choose.

    Args:
        shapes: (rows, columns) of the stage's matrices.
        factor_bits, gradient_bits: of an entry of a factor, scales included, and of a gradient.
    """
    dense, limit = gradient_bits * sum(m * n for m, n in shapes), 0
    full = max(min(shape) for shape in shapes)
    while limit + multiple < full:
        rank = limit + multiple
        if factor_bits * sum(min(rank, m, n) * (m + n) for m, n in shapes) >= dense:
            break
        limit = rank
    return limit


class RankSearch:
    """Order of the reductions to time, and the r_max that follows. Stage 0 decides; times of all stages are kept.

    Rank 0 stands for the uncompressed reduction. Of repeated timings the shortest counts, the others having
    been disturbed.

    Args:
        limit: largest rank to try, a multiple of ``multiple``.
        multiple: first rank tried; every further one is the double, the last one ``limit``.
        repeats: timings per rank.
        stop_at_crossing: end as soon as stage 0 is slower than uncompressed. Without it all ranks are timed,
            which is wanted when r_max is given and only the line T(r) is asked for.

    Attributes:
        schedule: ranks in the order of their timings, 0 first.
        times: per rank timed so far the seconds of every stage.
    """

    def __init__(self, limit: int, multiple: int, repeats: int, *, stop_at_crossing: bool) -> None:
        self.limit, self.multiple, self.repeats, self.stop_at_crossing = limit, multiple, repeats, stop_at_crossing
        self.schedule = [0]
        rank = multiple
        while rank < limit:
            self.schedule.append(rank)
            rank *= 2
        self.schedule.append(limit)
        if len(self.schedule) == 2 and not stop_at_crossing:
            self.schedule.append(2 * limit)  # a line needs two points
        self.restart()

    def restart(self) -> None:
        """Forget all timings and begin again."""
        self.times: list[list[float]] = []
        self._repeat = 0

    @property
    def probe(self) -> int | None:
        """Rank to time next, 0 for uncompressed, None when the search is over."""
        if self._repeat == 0 and (len(self.times) == len(self.schedule) or self._crossed()):
            return None
        return self.schedule[len(self.times) - (self._repeat > 0)]

    def observe(self, seconds: Sequence[float]) -> None:
        """Add one timing of ``probe``, per stage, in seconds."""
        if self.probe is None:
            raise ValueError("the search is over")
        if not all(math.isfinite(t) and t >= 0 for t in seconds):
            raise ValueError(f"probe times must be finite and at least 0, not {tuple(seconds)}")
        if self._repeat == 0:
            self.times.append([float(t) for t in seconds])
        else:
            self.times[-1] = [min(old, float(t)) for old, t in zip(self.times[-1], seconds, strict=True)]
        self._repeat = (self._repeat + 1) % self.repeats

    def _crossed(self) -> bool:
        return self.stop_at_crossing and len(self.times) > 1 and self.times[-1][0] > self.times[0][0]

    def r_max(self) -> tuple[int, str]:
        """(r_max, reason) once the search is over; 0 when even the smallest rank is slower than uncompressed.

        The crossing is interpolated between the last two ranks and floored to the multiple.
        """
        if not self._crossed():
            return self.limit, f"rank {self.limit}, the last that saves bytes, is not slower than no compression"
        slow, multiple = len(self.times) - 1, self.multiple
        if slow == 1:
            return 0, f"even rank {self.schedule[1]} is slower than no compression"
        dense, fast_time, slow_time = self.times[0][0], self.times[slow - 1][0], self.times[slow][0]
        low, high = self.schedule[slow - 1], self.schedule[slow]
        crossing = low + (high - low) * (dense - fast_time) / (slow_time - fast_time)
        rank = max(low // multiple * multiple, math.floor(crossing / multiple + 1e-9) * multiple)
        return rank, f"compression stops being faster at rank {crossing:.1f}"

    def state_dict(self) -> dict[str, Any]:
        times = [list(row) for row in self.times]
        return {"schedule": list(self.schedule), "times": times, "repeat": self._repeat}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`; begin anew if that is of other ranks."""
        self.restart()
        if state["schedule"] == self.schedule:
            self.times = [[float(t) for t in row] for row in state["times"]]
            self._repeat = int(state["repeat"]) % self.repeats
