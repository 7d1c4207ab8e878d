"""What the controller and the code around it tell each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from edgc.measurement.spectral import Curve
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


@dataclass(frozen=True)
class Report:
    """What was measured; the same numbers on every rank.

    Attributes:
        entropy: per stage, nats, mean over this window's samples so far and over replicas; nan if none.
        probe_seconds: per stage, seconds of the reduction asked for by ``probe_rank``; None without a probe.
        backward_seconds: per stage, backward time of one micro-batch, nan where none was timed; None as a whole
            where nothing was.
        error_curve: at a window's end, per stage, predicted squared relative error of the mean of M at every rank of
            :attr:`Controller.rank_grid`, of this window's samples together, mean over the stage's ranks; None for a
            stage without spectra, and as a whole where no policy asks for them.
        gate: what the cost gate has measured, all stages.
        reduction_seconds: per stage, seconds that a reduction of the training step took in this window (compress +
            communicate + decompress), nan where that is not known; None where it was not asked for.
        loss: mean of the finite training losses of this window that some rank was told; nan if none was told, infinite
            if none that was told is finite.
        mean_error: at a window's end, per stage, what the replicas' mean lacked relative to it, all shards of the stage
            together; nan where nothing was compressed with error feedback.
    """

    entropy: tuple[float, ...]
    probe_seconds: tuple[float, ...] | None = None
    backward_seconds: tuple[float, ...] | None = None
    error_curve: tuple[Curve | None, ...] | None = None
    gate: tuple[GateVerdict, ...] = ()
    reduction_seconds: tuple[float, ...] | None = None
    loss: float = math.nan
    mean_error: tuple[float, ...] = ()


@dataclass(frozen=True)
class Decision:
    """The outcome of an exchange; ``phase`` and ``ranks`` hold from the next iteration on.

    ``entropy`` is the window's, all nan where the decision falls inside a window. ``r_min`` and ``r_max`` are
    None until they are known. ``gate`` holds the verdicts of a cost gate that has measured in this iteration,
    ``timing`` the times of all stages where a measurement of them ended here. ``reduction_seconds`` is the report's
    where there is one, ``predicted_seconds`` what the last measurement says of the ranks that were in use. ``target``
    is the rank that the policy asked for on stage 0, before rounding and limits; None where it asks for none.
    ``mean_error`` is the report's at a window's end.
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
    mean_error: tuple[float, ...] = ()
