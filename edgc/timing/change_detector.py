"""Notices that the network has changed: reductions take another time than was predicted (paper: an open question).

Once a window every stage's measured time of a reduction is compared with T(r) of the rank in use, or with the
uncompressed time. Where they differ by more than a share, everything is timed anew. Three things would make that go
wrong, and this is what is done about them:

* A real step is not a benchmark: other processes compete with it, the line is only fitted. If a new measurement gives
  the old times again, the difference was no change, and from then on the stage is compared with what it really took
  (in its next window, scaled by T) instead of with T itself.
* Where reductions overlap with backward, or are compressed only in part, a stage takes less than T, and how much less
  no benchmark can tell. Such runs are compared with the first window after a measurement from the start, and with the
  first window at every rank they go on to. Where the rank has just moved, anything between "all of the change of T
  was hidden" and "none of it" is as expected, and the share is one of T, not of the little that is left to see.
* Noise must not start measurements for ever: after one, nothing is judged for ``PATIENCE`` windows, and for twice as
  many after each that has found no change.

Plain arithmetic; equal numbers give equal answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PATIENCE = 4
"""Windows after a measurement in which no other one is started."""


@dataclass(frozen=True)
class Mismatch:
    """A stage whose reductions took ``measured`` seconds where ``low`` to ``high`` were expected."""

    stage: int
    measured: float
    low: float
    high: float

    def __str__(self) -> str:
        expected = f"{self.low:.4g}" if self.low == self.high else f"{self.low:.4g} to {self.high:.4g}"
        return f"stage {self.stage} measured {self.measured:.4g} s, predicted {expected} s"


class ChangeDetector:
    """Compares measured with predicted times of reductions, window by window.

    Args:
        above: share by which they may differ.
        stages: how many stages are judged, from stage 0 on.
        calibrates: whether stages are compared with the first window after a measurement and not with T(r) itself.
    """

    def __init__(self, above: float, stages: int, *, calibrates: bool) -> None:
        self.above, self.stages, self.calibrates = above, stages, calibrates
        self._patience = PATIENCE
        self._wait = 0  # windows until the next judgement
        self._suspects: list[int] = []  # stages that have started the measurement under way
        # Per stage (measured, predicted) of the window that it is compared with; None: with the prediction.
        self._reference: list[tuple[float, float] | None] = [None] * stages
        self._pending = [calibrates] * stages  # whether the next window is to become the reference

    def judge(self, measured: Sequence[float], predicted: Sequence[float]) -> list[Mismatch]:
        """Stages that call for a new measurement after a window.

        Args:
            measured, predicted: per stage, seconds; a stage with a value that is not finite, or with a prediction
                that is not above 0, is not judged.
        """
        known = [
            stage for stage in range(self.stages) if math.isfinite(measured[stage]) and 0 < predicted[stage] < math.inf
        ]
        found = []
        for stage in known:
            if self._pending[stage]:
                self._reference[stage], self._pending[stage] = (measured[stage], predicted[stage]), False
                continue
            low, high = self._expected(stage, predicted[stage])
            off = max(low - measured[stage], measured[stage] - high)
            if off > self.above * (predicted[stage] if self.calibrates else high):
                found.append(Mismatch(stage, measured[stage], low, high))
                continue
            reference = self._reference[stage]
            if self.calibrates and reference is not None and reference[1] != predicted[stage]:
                self._reference[stage] = measured[stage], predicted[stage]
        if known and self._wait > 0:
            self._wait -= 1
            return []
        self._suspects = [mismatch.stage for mismatch in found]
        return found

    def _expected(self, stage: int, predicted: float) -> tuple[float, float]:
        reference = self._reference[stage]
        if reference is None:
            return predicted, predicted
        measured, before = reference
        if not self.calibrates:
            scaled = measured * predicted / before
            return scaled, scaled
        moved = max(0.0, measured + (predicted - before))
        return min(measured, moved), max(measured, moved)

    def remeasured(self, before: Sequence[float], after: Sequence[float]) -> bool:
        """Times have been measured anew: what was predicted for the ranks in use, and what is predicted now.

        Returns:
            Whether any stage's time has changed by more than the share.
        """
        changed = [
            not abs(after[stage] - before[stage]) <= self.above * before[stage]  # nan counts as changed
            for stage in range(self.stages)
        ]
        for stage in range(self.stages):
            if changed[stage]:
                self._reference[stage], self._pending[stage] = None, self.calibrates
            elif stage in self._suspects:
                self._pending[stage] = True
        self._patience = PATIENCE if any(changed) else 2 * self._patience
        self._wait, self._suspects = self._patience, []
        return any(changed)

    def state_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return {
            "patience": self._patience,
            "wait": self._wait,
            "suspects": list(self._suspects),
            "reference": [None if pair is None else list(pair) for pair in self._reference],
            "pending": list(self._pending),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._patience, self._wait = int(state["patience"]), int(state["wait"])
        self._suspects = [int(stage) for stage in state["suspects"]]
        self._reference = [None if pair is None else (float(pair[0]), float(pair[1])) for pair in state["reference"]]
        self._pending = [bool(pending) for pending in state["pending"]]
