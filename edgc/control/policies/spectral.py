"""Policy of our own: the smallest rank whose predicted relative error of the mean is small enough."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgc.checks import number
from edgc.config import Look
from edgc.control.policies.base import Move, Policy, WindowEnd
from edgc.control.settings import SteppedConfig
from edgc.measurement.spectral import Curve

NEWEST = 0.5
"""Weight of the newest window in the running mean of an error curve."""


class Spectral(Policy):
    """Follows the running means of error curves by :func:`spectral`."""

    config: SpectralConfig
    uses_curves = True

    def __init__(self, *run: Any) -> None:
        super().__init__(*run)
        self._grid: tuple[int, ...] = ()
        self._curves: list[Curve | None] = [None] * self.stages

    def move(self, end: WindowEnd) -> Move:
        if self._grid != tuple(end.grid):  # r_max has changed: curves have other points
            self._grid, self._curves = tuple(end.grid), [None] * self.stages
        curves = self.smoothed(end.curves or (None,) * self.stages)
        ranks, reasons = list(end.ranks), []
        for stage, (old, curve) in enumerate(zip(end.ranks, curves, strict=False)):
            name = f"stage {stage}: " if len(end.ranks) > 1 else ""
            if curve is None or old is None:
                reasons.append(f"{name}no spectra in this window, rank unchanged")
                continue
            target, why = spectral(curve, end.grid, self.config.target_error)
            new = self.config.step(old, target, end.r_min, end.r_max)
            ranks[stage] = min(new, old) if self.config.monotone else new
            reasons.append(f"{name}{why}; rank {old} -> {ranks[stage]}")
        return Move(tuple(ranks), "; ".join(reasons))

    def smoothed(self, curves: Sequence[Curve | None]) -> list[Curve | None]:
        """Every stage's running mean over windows, given one window's ``curves``; None where these say nothing.

        Such a stage keeps its mean for the windows to come.

        Raises:
            ValueError: another number of stages, or a curve of another length than the stage's before.
        """
        means = []
        for stage, (old, new) in enumerate(zip(self._curves, curves, strict=True)):
            if new is not None and old is not None:
                new = tuple(NEWEST * b + (1 - NEWEST) * a for a, b in zip(old, new, strict=True))
            self._curves[stage] = old if new is None else new
            means.append(new)
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"grid": list(self._grid), "curves": [None if c is None else list(c) for c in self._curves]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._grid = tuple(state["grid"])
        self._curves = [None if curve is None else tuple(map(float, curve)) for curve in state["curves"]]


@dataclass(frozen=True, kw_only=True)
class SpectralConfig(SteppedConfig):
    """Ranks by error curves (all ours). Without alignment each stage moves by its own.

    Attributes:
        target_error: share of its norm that the mean over workers of M = G + E may lack.
        monotone: the rank may fall and never rise again (a gentle decrease measured better than an increase at equal
            bytes).
    """

    rule = Spectral
    policy: str = "spectral"
    target_error: float = 0.3
    monotone: bool = False

    look = Look("EDGC (spectral)", "#009E73", "v", "-.")

    def _check(self) -> None:
        super()._check()
        number("target_error", self.target_error, 0, 1, open_low=True)


def spectral(curve: Sequence[float], ranks: Sequence[int], target_error: float) -> tuple[int, str]:
    """Smallest of ``ranks`` (ascending) whose predicted relative error is at most ``target_error``, and why.

    ``curve`` holds the squared relative error of the mean over workers at each of them
    (:func:`edgc.measurement.spectral.error_curve`). The largest rank where none is enough.
    """
    for rank, error_sq in zip(ranks, curve, strict=True):
        if error_sq <= target_error**2:
            return rank, f"predicted error {math.sqrt(error_sq):.4f} at rank {rank} meets {target_error:g}"
    why = f"predicted error {math.sqrt(curve[-1]):.4f} at rank {ranks[-1]} does not meet {target_error:g}"
    return ranks[-1], why
