"""Detector of a network that has changed: reductions take another time than was predicted (paper: an open question).

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
from typing import Any

PATIENCE = 4
"""Windows after a measurement in which no other one is started."""


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

    def judge(self, measured: Sequence[float], predicted: Sequence[float]) -> dict[int, str]:
        """Stages that call for a new measurement after a window, with their times in words.

        Args:
            measured, predicted: per stage, seconds; a stage with a value that is not finite, or with a prediction
                that is not above 0, is not judged.
        """
        known, mismatches = False, {}
        for stage, time, prediction in zip(range(self.stages), measured, predicted, strict=False):
            if not (math.isfinite(time) and 0 < prediction < math.inf):
                continue
            known = True
            if self._pending[stage]:
                self._reference[stage], self._pending[stage] = (time, prediction), False
                continue
            low, high = self._expected(stage, prediction)
            if max(low - time, time - high) > self.above * (prediction if self.calibrates else high):
                expected = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
                mismatches[stage] = f"stage {stage} measured {time:.4g} s, predicted {expected} s"
                continue
            reference = self._reference[stage]
            if self.calibrates and reference is not None and reference[1] != prediction:
                self._reference[stage] = time, prediction
        if known and self._wait > 0:
            self._wait -= 1
            return {}
        self._suspects = list(mismatches)
        return mismatches

    def _expected(self, stage: int, predicted: float) -> tuple[float, float]:
        reference = self._reference[stage]
        if reference is None:
            return predicted, predicted
        measured, earlier = reference
        if not self.calibrates:
            scaled = measured * predicted / earlier
            return scaled, scaled
        shifted = max(0.0, measured + (predicted - earlier))
        return min(measured, shifted), max(measured, shifted)

    def remeasured(self, before: Sequence[float], after: Sequence[float]) -> bool:
        """Take in a new measurement: times predicted for the ranks in use before and after it.

        Returns:
            Whether any stage's time has changed by more than the share.
        """
        changed = [
            not abs(new - old) <= self.above * old  # nan counts as changed
            for _, old, new in zip(range(self.stages), before, after, strict=False)
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
        """State in JSON's types."""
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
