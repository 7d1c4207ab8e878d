"""What the controller and the code around it tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgc.cost_gate import GateVerdict
from edgc.spectral import Curve

Phase = Literal["warmup", "search", "active", "disabled"]


@dataclass(frozen=True)
class Plan:
    """What to do at one iteration.

    Attributes:
        ranks: one per stage; None sends that stage's gradients uncompressed.
        probe_rank: rank of a reduction to time beside the real one; 0 means uncompressed, None no probe.
        exchange: whether :meth:`Controller.observe` must be called after this iteration.
        gate: whether the cost gate measures every group of gradients in this iteration.
    """

    phase: Phase
    ranks: tuple[int | None, ...]
    probe_rank: int | None
    exchange: bool
    gate: bool = False


@dataclass(frozen=True)
class Report:
    """What was measured; the same numbers on every rank.

    Attributes:
        entropy: per stage, nats, mean over this window's samples so far and over replicas; nan if none.
        probe_seconds: per stage, seconds of the reduction asked for by ``probe_rank``; None without a probe.
        backward_seconds: backward time of one micro-batch on one stage, None if not measured.
        error_curve: per stage, predicted squared relative error of M at every rank of
            :attr:`Controller.rank_grid`, mean over this window's samples and the stage's ranks; None for a stage
            without spectra, and as a whole where no policy asks for them.
        gate: what the cost gate has measured, all stages.
    """

    entropy: tuple[float, ...]
    probe_seconds: tuple[float, ...] | None = None
    backward_seconds: float | None = None
    error_curve: tuple[Curve | None, ...] | None = None
    gate: tuple[GateVerdict, ...] = ()


@dataclass(frozen=True)
class Decision:
    """The outcome of an exchange; ``phase`` and ``ranks`` hold from the next iteration on.

    ``entropy`` is the window's, all nan where the decision falls inside a window. ``r_min`` and ``r_max`` are
    None until they are known. ``gate`` holds the verdicts of a cost gate that has measured in this iteration.
    """

    iteration: int
    phase: Phase
    reason: str
    ranks: tuple[int | None, ...]
    entropy: tuple[float, ...]
    r_min: int | None
    r_max: int | None
    gate: tuple[GateVerdict, ...] = ()
