"""How ranks follow the entropy, the loss, spectra or a schedule: the rules that apply at a window's end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from edgc.config import EDGCConfig
from edgc.control.rank_model import StageModel, next_rank

Ranks = tuple[int | None, ...]


class Target(NamedTuple):
    """What a policy asks for: a real rank, or None for "leave it", and why."""

    rank: float | None
    reason: str


def cqm(stage: StageModel, reference_rank: int, reference_entropy: float, entropy: float) -> Target:
    """The paper's rule: the rank that keeps the reference's error, :func:`edgc.control.rank_model.next_rank`."""
    rank = next_rank(stage, reference_rank, reference_entropy, entropy)
    change = entropy - reference_entropy
    return Target(rank, f"entropy {change:+.4f} nats from the reference asks for rank {rank:.1f}")


def by_change(
    policy: str,
    r_min: int,
    r_max: int,
    first: float | None,
    second: float | None,
    previous: float | None,
    now: float,
) -> Target:
    """The rule of the public codes: ``r_min + (r_max - r_min) |x_k - x_(k-1)| / |x_2 - x_1|``, at most r_max.

    x_k is the mean of window k: of the entropy under ``released`` (repository xiaoao-666/EDGC, commit 69a7674), of the
    training loss under ``loss`` (HYGON-AI/Megatron-LM-das, commit 46178f3). x_1 and x_2 are of the first two windows of
    the run that have one. That code divides by their difference unguarded; here a difference of 0, like a window that
    has no measurement (None), leaves the rank as it is. It rounds down to even ranks, :func:`step` to the multiple.
    """
    what, several = ("loss", "losses") if policy == "loss" else ("entropy", "entropies")
    if first is None or second is None or previous is None:
        return Target(None, f"the window before has no {what}")
    if first == second:
        return Target(None, f"the first two windows have equal {several}")
    ratio = abs(now - previous) / abs(second - first)
    rank = r_min + (r_max - r_min) * min(1.0, ratio)
    return Target(rank, f"{what} change of {ratio:.3f} times the first one asks for rank {rank:.1f}")


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


def spectral(curve: Sequence[float], ranks: Sequence[int], target_error: float) -> Target:
    """Ours: the smallest of ``ranks`` (ascending) whose predicted relative error is at most ``target_error``.

    ``curve`` holds the squared relative error of the mean over workers at each of them
    (:func:`edgc.measurement.spectral.error_curve`). The largest rank where none is enough.
    """
    for rank, error_sq in zip(ranks, curve, strict=True):
        if error_sq <= target_error**2:
            why = f"predicted error {math.sqrt(error_sq):.4f} at rank {rank} meets {target_error:g}"
            return Target(rank, why)
    why = f"predicted error {math.sqrt(curve[-1]):.4f} at rank {ranks[-1]} does not meet {target_error:g}"
    return Target(ranks[-1], why)


def step(current: int, target: float, r_min: int, r_max: int, multiple: int, limit: int) -> int:
    """The rank after one window, at most ``limit`` away from ``current``.

    ``target`` (finite) is rounded to the nearest multiple, half up, and clamped to [r_min, r_max]. ``current``,
    ``r_min`` and ``r_max`` are multiples of ``multiple``, and so is the answer.
    """
    wanted = math.floor(target / multiple + 0.5) * multiple
    reach = limit // multiple * multiple
    return min(max(wanted, current - reach, r_min), current + reach, r_max)


def by_spectra(
    config: EDGCConfig,
    ranks: Ranks,
    curves: Sequence[Sequence[float] | None],
    grid: Sequence[int],
    r_min: int,
    r_max: int,
) -> tuple[Ranks, str]:
    """Move the rank of each of ``ranks``' stages by its own error curve over ``grid`` (None: it stays).

    Returns:
        The ranks after one window, and why, stage by stage.
    """
    moved, reasons = list(ranks), []
    for stage, old in enumerate(ranks):
        curve = curves[stage]
        where = f"stage {stage}: " if len(ranks) > 1 else ""
        if curve is None or old is None:
            reasons.append(f"{where}no spectra in this window, rank unchanged")
            continue
        target = spectral(curve, grid, config.target_error)
        assert target.rank is not None
        new = step(old, target.rank, r_min, r_max, config.rank_multiple, config.step_limit)
        moved[stage] = min(new, old) if config.monotone else new
        reasons.append(f"{where}{target.reason}; rank {old} -> {moved[stage]}")
    return tuple(moved), "; ".join(reasons)
