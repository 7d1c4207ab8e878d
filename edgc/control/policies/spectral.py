"""Ours: the smallest rank whose predicted relative error of the mean is small enough, by what the factors show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgc.checks import number
from edgc.control.policies.base import Move, SteppedPolicy, Target, WindowEnd
from edgc.control.rank_model import StageModel
from edgc.control.settings import SteppedConfig
from edgc.description import Look
from edgc.measurement.spectral import Curve


@dataclass(frozen=True, kw_only=True)
class SpectralConfig(SteppedConfig):
    """Ranks by error curves (all ours). Without alignment each stage moves by its own.

    Attributes:
        target_error: share of its norm that the mean over workers of M = G + E may lack.
        smoothing: weight of the newest window in the running mean of the error curve.
        monotone: the rank may fall and never rise again (a gentle decrease measured better than an increase at equal
            bytes).
        per_layer: share out the bytes of a stage's rank among its matrices so that the predicted error is least.
    """

    policy: str = "spectral"
    target_error: float = 0.3
    smoothing: float = 0.5
    monotone: bool = False
    per_layer: bool = False

    look = Look("EDGC (spectral)", "#009E73", "v", "-.")

    def _check(self) -> None:
        super()._check()
        number("target_error", self.target_error, 0, 1, open_low=True)
        number("smoothing", self.smoothing, 0, 1, open_low=True)

    def start(self, model: StageModel, stages: int, iterations: int) -> Spectral:
        return Spectral(self, stages)


class Spectral(SteppedPolicy):
    """Follows the running means of error curves by :func:`spectral`."""

    config: SpectralConfig
    uses_curves = True

    def __init__(self, config: SpectralConfig, stages: int) -> None:
        super().__init__(config)
        self.stages = stages
        self._begin_anew(())

    def _begin_anew(self, grid: Sequence[int]) -> None:
        self._grid = tuple(grid)
        self._curves: list[Curve | None] = [None] * self.stages

    def move(self, end: WindowEnd) -> Move:
        if self._grid != tuple(end.grid):  # r_max has changed: curves have other points
            self._begin_anew(end.grid)
        curves = self.smoothed(end.curves or (None,) * self.stages)
        moved, reasons = list(end.ranks), []
        for stage, old in enumerate(end.ranks):
            curve = curves[stage]
            where = f"stage {stage}: " if len(end.ranks) > 1 else ""
            if curve is None or old is None:
                reasons.append(f"{where}no spectra in this window, rank unchanged")
                continue
            target = spectral(curve, end.grid, self.config.target_error)
            assert target.rank is not None
            new = self.config.step(old, target.rank, end.r_min, end.r_max)
            moved[stage] = min(new, old) if self.config.monotone else new
            reasons.append(f"{where}{target.reason}; rank {old} -> {moved[stage]}")
        return Move(tuple(moved), "; ".join(reasons))

    def smoothed(self, curves: Sequence[Curve | None]) -> list[Curve | None]:
        """Every stage's running mean over windows, given one window's ``curves``; None where these say nothing.

        Such a stage keeps its mean for the windows to come.

        Raises:
            ValueError: another number of stages, or a curve of another length than the stage's before.
        """
        shown, weight = [], self.config.smoothing
        for stage, (old, new) in enumerate(zip(self._curves, curves, strict=True)):
            if new is not None and old is not None:
                new = tuple(weight * b + (1 - weight) * a for a, b in zip(old, new, strict=True))
            if new is not None:
                self._curves[stage] = new
            shown.append(new)
        return shown

    def state_dict(self) -> dict[str, Any]:
        return {"grid": list(self._grid), "curves": [None if c is None else list(c) for c in self._curves]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._grid = tuple(state["grid"])
        self._curves = [None if curve is None else tuple(map(float, curve)) for curve in state["curves"]]


def spectral(curve: Sequence[float], ranks: Sequence[int], target_error: float) -> Target:
    """The smallest of ``ranks`` (ascending) whose predicted relative error is at most ``target_error``.

    ``curve`` holds the squared relative error of the mean over workers at each of them
    (:func:`edgc.measurement.spectral.error_curve`). The largest rank where none is enough.
    """
    for rank, error_sq in zip(ranks, curve, strict=True):
        if error_sq <= target_error**2:
            why = f"predicted error {math.sqrt(error_sq):.4f} at rank {rank} meets {target_error:g}"
            return Target(rank, why)
    why = f"predicted error {math.sqrt(curve[-1]):.4f} at rank {ranks[-1]} does not meet {target_error:g}"
    return Target(ranks[-1], why)
