"""What the controller and the code around it tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgc.timing.cost_gate import GateVerdict
from edgc.timing.stage_times import StageTiming

Phase = Literal["warmup", "search", "active", "disabled"]
Ranks = tuple[int | None, ...]
"""One per stage; None: uncompressed."""


@dataclass(frozen=True)
class Plan:
    """What to do at one iteration.

    Attributes:
        probe_rank: rank of a reduction to time beside the real one; 0 means uncompressed, None no probe.
        exchange: whether :meth:`Controller.observe` must be called after this iteration.
        gate: whether the cost gate measures every group of gradients in this iteration.
    """

    phase: Phase
    ranks: Ranks
    probe_rank: int | None
    exchange: bool
    gate: bool = False

    @property
    def in_warm_up(self) -> bool:
        """Whether compression is still to begin."""
        return self.phase in ("warmup", "search")


@dataclass(frozen=True)
class Decision:
    """The outcome of an exchange; ``phase`` and ``ranks`` hold from the next iteration on.

    ``entropy`` is the window's, all nan where the decision falls inside a window. ``r_min`` and ``r_max`` are
    None until they are known. ``gate`` holds the verdicts of a cost gate that has measured in this iteration,
    ``timing`` the times of all stages where a measurement of them ended here. ``reduction_seconds`` is the report's
    where there is one, ``predicted_seconds`` what the last measurement says of the ranks that were in use. ``target``
    is the rank that the policy asked for on stage 0, before rounding and limits; None where it asks for none.
    ``mean_error`` is the report's at a window's end, and so are ``entropy_error``, ``entropy_layers``,
    ``entropy_embeddings`` and ``embedding_share``. ``target_low`` and ``target_high`` are the ranks that the policy
    would have asked for had the entropy been one standard error away on either side; None where it does not say.
    """

    iteration: int
    phase: Phase
    reason: str
    ranks: Ranks
    entropy: tuple[float, ...]
    r_min: int | None
    r_max: int | None
    gate: tuple[GateVerdict, ...] = ()
    timing: tuple[StageTiming, ...] = ()
    reduction_seconds: tuple[float, ...] = ()
    predicted_seconds: tuple[float, ...] = ()
    target: float | None = None
    target_low: float | None = None
    target_high: float | None = None
    mean_error: tuple[float, ...] = ()
    entropy_error: tuple[float, ...] = ()
    entropy_layers: tuple[float, ...] = ()
    entropy_embeddings: tuple[float, ...] = ()
    embedding_share: tuple[float, ...] = ()
