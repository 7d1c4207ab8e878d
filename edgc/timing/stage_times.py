"""Times of a run's stages: searched, measured, watched for changes, and made into ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import median_high
from typing import TYPE_CHECKING, Any

from edgc.timing.alignment import LinearTime, align
from edgc.timing.change_detector import ChangeDetector

if TYPE_CHECKING:  # the settings of what stands above
    from edgc.control.settings import PolicyConfig


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
    """Search of r_max (paper, section on DAC): order of the reductions to time, doubling ranks until compression stops
    paying, and the r_max that follows. Stage 0 decides; times of all stages are kept.

    It runs in warm-up, and again when times have changed. The schedule is that of the authors' public code, which
    starts at iteration 10 with two timings per rank. Rank 0 stands for the uncompressed reduction. Of repeated timings
    the shortest counts, the others having been disturbed.

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


@dataclass(frozen=True)
class StageTiming:
    """One measurement of the times of one stage, in seconds: all that its rank follows from.

    Attributes:
        backward_seconds: t_b, median over the measurement; None if it was not timed.
        seconds_uncompressed: of the reduction without compression.
        timed: (rank, seconds) of the compressed reductions, ascending.
        seconds_per_rank, seconds_fixed: T(r) = seconds_per_rank * r + seconds_fixed, fitted to ``timed``; None
            where fewer than two ranks were timed.
        residual: root mean square error of that fit, as a share of the mean time.
    """

    stage: int
    backward_seconds: float | None
    seconds_uncompressed: float
    timed: tuple[tuple[int, float], ...]
    seconds_per_rank: float | None
    seconds_fixed: float | None
    residual: float | None

    @property
    def line(self) -> LinearTime | None:
        """T(r)."""
        if self.seconds_per_rank is None or self.seconds_fixed is None:
            return None
        return LinearTime(self.seconds_per_rank, self.seconds_fixed)

    def seconds(self, rank: int | None) -> float:
        """Time of a reduction at ``rank`` (None: uncompressed), nan where that is not known."""
        if rank is None:
            return self.seconds_uncompressed
        return math.nan if self.line is None else self.line.time(rank)


class StageTimes:
    """Times that one run aligns its stages with, and their measurement (``config.alignment``).

    Args:
        overlapped: whether reductions overlap with backward or with each other.

    Attributes:
        search: the measurement, under way or finished; None where nothing is to be measured.
        timing: result of the last finished measurement, per stage; empty before.
    """

    def __init__(self, config: PolicyConfig, stages: int, *, overlapped: bool = False) -> None:
        self.config, self.stages, self.overlapped = config, stages, overlapped
        self.search: RankSearch | None = None
        self.timing: tuple[StageTiming, ...] = ()
        self._detector: ChangeDetector | None = None
        self._aligned = config.alignment == "measured"
        self._backward: list[list[float]] = [[] for _ in range(stages)]

    def measure(self, limit: int, *, find_r_max: bool) -> None:
        """Have reductions timed at ranks up to ``limit``: until they stop paying, or at all of them."""
        config = self.config
        self.search = RankSearch(limit, config.rank_multiple, config.search_repeats, stop_at_crossing=find_r_max)
        if config.remeasure_above is not None:
            # Without alignment only r_max depends on times, and it on those of stage 0 alone.
            judged = self.stages if self._aligned else 1
            calibrates = self.overlapped or config.cost_gate
            self._detector = ChangeDetector(config.remeasure_above, judged, calibrates=calibrates)

    @property
    def probe(self) -> int | None:
        """Rank of the next reduction to time, 0 for uncompressed; None when nothing is to be timed."""
        return None if self.search is None else self.search.probe

    @property
    def watched(self) -> bool:
        """True if measured times of the training step's reductions are asked for."""
        return self._detector is not None and bool(self.timing) and self.probe is None

    def add(self, probe_seconds: Sequence[float], backward_seconds: Sequence[float] | None) -> bool:
        """Take in one timing of ``probe`` and of backward, per stage; returns whether it was the last one."""
        assert self.search is not None
        self.search.observe(probe_seconds)
        for known, seconds in zip(self._backward, backward_seconds or (), strict=False):
            if math.isfinite(seconds):
                known.append(max(0.0, seconds))
        return self.search.probe is None

    def finish(self, ranks: Sequence[int | None]) -> str:
        """Fit the times of a finished measurement; from now on they hold.

        Args:
            ranks: those in use.

        Returns:
            For a measurement after the first: whether times have changed, in words.
        """
        assert self.search is not None
        old, first = self.predicted(ranks), not self.timing
        dense, *compressed = self.search.times
        timing = []
        for stage, backward in enumerate(self._backward):
            points = tuple((rank, row[stage]) for rank, row in zip(self.search.schedule[1:], compressed, strict=False))
            line = astuple(LinearTime.fit(points)) if len(points) > 1 else (None, None, None)
            timing.append(StageTiming(stage, median_high(backward) if backward else None, dense[stage], points, *line))
        self.timing = tuple(timing)
        self._backward = [[] for _ in range(self.stages)]
        if first or self._detector is None:
            return ""
        changed = self._detector.remeasured(old, self.predicted(ranks))
        return "times have changed" if changed else "times have not changed"

    def check(self, measured: Sequence[float], ranks: Sequence[int | None]) -> str:
        """Compare a window's measured times with those predicted for its ranks; start a measurement where they differ.

        Returns:
            Stages and times that differ, if a measurement was started.
        """
        if self._detector is None or self.search is None:
            return ""
        mismatches = self._detector.judge(measured, self.predicted(ranks))
        if not mismatches:
            return ""
        self.search.restart()
        names = ["no compression" if rank is None else f"rank {rank}" for rank in ranks]
        return "times are measured anew: " + ", ".join(f"{why} at {names[stage]}" for stage, why in mismatches.items())

    def predicted(self, ranks: Sequence[int | None]) -> tuple[float, ...]:
        """Seconds of a reduction per stage by the last measurement, nan where that does not say."""
        if not self.timing:
            return (math.nan,) * self.stages
        return tuple(timing.seconds(rank) for timing, rank in zip(self.timing, ranks, strict=True))

    def ranks(self, first_rank: int, r_min: int | None, r_max: int) -> tuple[tuple[int | None, ...], str]:
        """Ranks of all stages for stage 0's, and a remark where alignment was asked for in vain."""
        same: tuple[int | None, ...] = (first_rank,) * self.stages
        if self.config.alignment == "off" or self.stages == 1:
            return same, ""
        lines = [timing.line for timing in self.timing if timing.line is not None]
        if len(lines) < self.stages:
            return same, "not aligned: fewer than two ranks were timed"
        if any(timing.backward_seconds is None for timing in self.timing[:-1]):
            return same, "not aligned: no backward time was reported"
        backward = [timing.backward_seconds or 0.0 for timing in self.timing]
        uncompressed = [timing.seconds_uncompressed for timing in self.timing]
        multiple = self.config.rank_multiple
        return align(first_rank, self.stages, backward, lines, uncompressed, r_max, multiple, r_min), ""

    def state_dict(self) -> dict[str, Any]:
        """State in JSON's types."""
        return {
            "search": self.search.state_dict() if self.search else None,
            "timing": [asdict(timing) for timing in self.timing],
            "backward": [list(seconds) for seconds in self._backward],
            "detector": self._detector.state_dict() if self._detector else None,
            "aligned": self._aligned,
        }

    def fits(self, state: Mapping[str, Any]) -> bool:
        """True if ``state`` is of a run that measures and watches as this one does."""
        same = (state["search"] is None) == (self.search is None)
        same = same and (state["detector"] is None) == (self._detector is None)
        return bool(same and state["aligned"] == self._aligned)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.search is not None:
            self.search.load_state_dict(state["search"])
        if self._detector is not None:
            self._detector.load_state_dict(state["detector"])
        self._backward = [[float(seconds) for seconds in row] for row in state["backward"]]
        self.timing = tuple(
            StageTiming(**{**item, "timed": tuple((int(rank), float(t)) for rank, t in item["timed"])})
            for item in state["timing"]
        )
