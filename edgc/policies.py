"""How stage 0's rank follows the entropy: the rules that the controller applies at a window's end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from edgc.config import EDGCConfig
from edgc.rank_model import StageModel, next_rank


class Target(NamedTuple):
    """What a policy asks for: a real rank, or None for "leave it", and why."""

    rank: float | None
    reason: str


def cqm(stage: StageModel, reference_rank: int, reference_entropy: float, entropy: float) -> Target:
    """The paper's rule: the rank that keeps the reference's error, :func:`edgc.rank_model.next_rank`."""
    rank = next_rank(stage, reference_rank, reference_entropy, entropy)
    change = entropy - reference_entropy
    return Target(rank, f"entropy {change:+.4f} nats from the reference asks for rank {rank:.1f}")


def released(
    r_min: int, r_max: int, first: float | None, second: float | None, previous: float | None, entropy: float
) -> Target:
    """The rule of the authors' public code: ``r_min + (r_max - r_min) |H_k - H_(k-1)| / |H_2 - H_1|``.

    At most r_max. H_1 and H_2 are the first two windows of the run that have an entropy. That code divides
    by their difference unguarded; here a difference of 0, like a missing entropy (None), leaves the rank as
    it is. It rounds down to even ranks; here :func:`step` rounds to the multiple.
    Source: repository xiaoao-666/EDGC, commit 69a7674.
    """
    if first is None or second is None or previous is None:
        return Target(None, "the window before has no entropy")
    if first == second:
        return Target(None, "the first two windows have equal entropies")
    ratio = abs(entropy - previous) / abs(second - first)
    rank = r_min + (r_max - r_min) * min(1.0, ratio)
    return Target(rank, f"entropy change of {ratio:.3f} times the first one asks for rank {rank:.1f}")


def spectral(curve: Sequence[float], ranks: Sequence[int], target_error: float) -> Target:
    """Ours: the smallest of ``ranks`` (ascending) whose predicted relative error is at most ``target_error``.

    ``curve`` holds the squared relative error at each of them (:func:`edgc.spectral.error_curve`). The largest rank
    where none is enough.
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
    ranks: Sequence[int | None],
    curves: Sequence[Sequence[float] | None],
    grid: Sequence[int],
    r_min: int,
    r_max: int,
) -> tuple[tuple[int | None, ...], str]:
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
