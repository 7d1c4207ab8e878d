"""What the controller and the code around it tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["warmup", "search", "active", "disabled"]


@dataclass(frozen=True)
class Plan:
    """What to do at one iteration.

    Attributes:
        ranks: one per stage; None sends that stage's gradients uncompressed.
        probe_rank: rank of a reduction to time beside the real one; 0 means uncompressed, None no probe.
        exchange: whether :meth:`Controller.observe` must be called after this iteration.
    """

    phase: Phase
    ranks: tuple[int | None, ...]
    probe_rank: int | None
    exchange: bool


@dataclass(frozen=True)
class Report:
    """What was measured; the same numbers on every rank.

    Attributes:
        entropy: per stage, nats, mean over this window's samples so far and over replicas; nan if none.
        probe_seconds: per stage, seconds of the reduction asked for by ``probe_rank``; None without a probe.
        backward_seconds: backward time of one micro-batch on one stage, None if not measured.
    """

    entropy: tuple[float, ...]
    probe_seconds: tuple[float, ...] | None = None
    backward_seconds: float | None = None


@dataclass(frozen=True)
class Decision:
    """The outcome of an exchange; ``phase`` and ``ranks`` hold from the next iteration on.

    ``entropy`` is the window's, all nan where the decision falls inside a window. ``r_min`` and ``r_max`` are
    None until they are known.
    """

    iteration: int
    phase: Phase
    reason: str
    ranks: tuple[int | None, ...]
    entropy: tuple[float, ...]
    r_min: int | None
    r_max: int | None
