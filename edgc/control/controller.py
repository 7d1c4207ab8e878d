"""Contract of controllers: what to do at an iteration, and what follows from what all ranks have measured.

Every data-parallel rank of every stage holds one controller and feeds it the same reports, so all decide alike.
Iterations count from 1. Plain arithmetic: no tensors, no process groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from edgc.checks import integer, need
from edgc.config import CompressingConfig, ConstantConfig, EDGCConfig
from edgc.control.policies.base import Ranks
from edgc.errors import UserError
from edgc.measurement.report import Report
from edgc.timing.benchmark import GateVerdict
from edgc.timing.stage_times import StageTiming

Phase = Literal["warmup", "search", "active", "disabled"]
_FORMAT = 7


@dataclass(frozen=True)
class Plan:
    """Things to do at one iteration.

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
        """True if compression is still to begin."""
        return self.phase in ("warmup", "search")


@dataclass(frozen=True)
class Decision:
    """Outcome of an exchange.

    Attributes:
        phase, ranks: hold from the next iteration on.
        entropy: the window's, per stage; all nan where the decision falls inside a window.
        r_min, r_max: limits of the rank; None until they are known.
        gate: verdicts of a cost gate that has measured in this iteration.
        timing: times of all stages where a measurement of them ended here.
        reduction_seconds: the report's, where it has some.
        predicted_seconds: of the ranks that were in use, by the last measurement.
        target: rank that the policy asked for on stage 0, before rounding and limits; None where it asks for none.
        target_low, target_high: targets had the entropy been one standard error away; None where that is not known.
        mean_error, entropy_error, entropy_layers, entropy_embeddings, embedding_share: the report's, at a window's end.
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


class Controller:
    """Method ``none``, which never compresses, and the methods that do so from the first iteration.

    Those compress on the first stages (``compressed_stages``). The cost gate, if there is one, measures as soon as
    something is compressed, then every ``gate_interval`` iterations, and whenever the ranks have changed. For arguments
    see :func:`edgc.control.adaptive.make_controller`.

    Attributes:
        phase, ranks, r_min, r_max: as in :class:`Decision`, now.
        reason: of the last decision; why nothing will be compressed if that is known from the start.
        notice: message to the user that may hold for the rest of the run: less is compressed than the settings sound
            like. Empty as long as there is none.
    """

    def __init__(self, config: EDGCConfig, stages: int, iterations: int) -> None:
        self.config, self.stages = config, stages
        self.iterations = integer("iterations", iterations, 1)
        self.r_min: int | None = None
        self.r_max: int | None = None
        self.ranks: Ranks = (None,) * stages
        self.notice = ""
        self._gate_interval = config.gate_interval if isinstance(config, CompressingConfig) and config.cost_gate else 0
        self._gated: tuple[int, Ranks] | None = None  # iteration and ranks of the gate's last measurement
        self.phase: Phase = "disabled"
        self.reason = config.title()
        if isinstance(config, ConstantConfig):
            self.phase, self.reason = "active", ""
            compressed = config.stages_compressed(stages)
            self.r_min = self.r_max = config.fixed_rank
            # To a method without a rank the number says only that it is to compress.
            self.ranks = tuple((config.fixed_rank or 1) if i < compressed else None for i in range(stages))

    def plan(self, iteration: int) -> Plan:
        """Plan of ``iteration`` (1-based), given the reports so far; changes nothing."""
        gate = bool(self._gate_interval) and self.phase == "active" and any(rank is not None for rank in self.ranks)
        if self._gated is not None:
            gate = gate and (iteration - self._gated[0] >= self._gate_interval or self.ranks != self._gated[1])
        return Plan(self.phase, self.ranks, None, gate, gate)

    @property
    def rank_grid(self) -> tuple[int, ...]:
        """Ranks at which reports are to give error curves now, ascending; empty where no policy uses them."""
        return ()

    def predicted(self, ranks: Ranks) -> tuple[float, ...]:
        """Seconds of a reduction per stage by the last measurement of times, nan where there is none."""
        return (math.nan,) * self.stages

    def watches(self, iteration: int) -> bool:
        """True if the report of ``iteration`` is to give the window's times of reductions."""
        return False

    def observe(self, iteration: int, report: Report) -> Decision | None:
        """Take in the report of an iteration whose plan asks for an exchange.

        Returns a decision at every window end of method ``edgc``, where a measurement of times starts or ends, and
        where the cost gate has measured, else None.

        Raises:
            UserError: policy ``loss`` was not told any loss; on every rank, as the reports are the same.
        """
        plan = self.plan(iteration)
        reasons: list[str] = []
        if plan.gate:
            self._gated = iteration, plan.ranks
            faster, groups = sum(verdict.compress for verdict in report.gate), len(report.gate)
            if groups:
                reasons.append(f"cost gate: compression is faster for {faster} of {groups} groups")
            if groups and not faster:
                self.notice = f"{reasons[0]}; it is measured every {self._gate_interval} iterations"
        facts: dict[str, Any] = {"entropy": (math.nan,) * self.stages}
        self._decide(iteration, plan, report, reasons, facts)
        if not reasons:
            return None
        upcoming, self.reason = self.plan(iteration + 1), "; ".join(reasons)
        facts |= {"r_min": self.r_min, "r_max": self.r_max, "gate": report.gate}
        return Decision(iteration, upcoming.phase, self.reason, upcoming.ranks, **facts)

    def _decide(self, iteration: int, plan: Plan, report: Report, reasons: list[str], facts: dict[str, Any]) -> None:
        """Change what the report changes; adds ``reasons`` and further fields of a decision to ``facts``."""

    def state_dict(self) -> dict[str, Any]:
        """State that the next decisions depend on, in JSON's types (every float finite)."""
        return {
            "format": _FORMAT,
            "phase": self.phase,
            "ranks": list(self.ranks),
            "r_min": self.r_min,
            "r_max": self.r_max,
            "gate": [self._gated[0], list(self._gated[1])] if self._gated else None,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, iteration: int = 0, changed_settings: bool = False) -> None:
        """Continue where the controller that gave ``state`` stood, one of the same stages.

        Args:
            iteration: how many lie behind the state; looked at under ``changed_settings``.
            changed_settings: whether the state may be of other settings. This controller's then hold: its limits, its
                given ranks, its policy; phase, ranks (within the limits), history and times are the state's.

        Raises:
            UserError: the state is of another format, another number of stages, or, without ``changed_settings``, of
                another policy or of a run that measures times where this one does not.
        """
        need(state, self.state_dict(), "engine.controller")
        fits = state["format"] == _FORMAT and len(state["ranks"]) == self.stages
        if not fits or not (changed_settings or self._fits(state)):
            fix = "resume with the settings and the pipeline the run was started with"
            raise UserError("the saved controller state does not fit this run", fix=fix)
        if changed_settings:
            self._go_on_from(state, last_window=iteration - iteration % self.config.window)
        else:
            self._load(state)

    def _fits(self, state: Mapping[str, Any]) -> bool:
        """True if ``state`` is of a run that remembers and measures what this one does."""
        return True

    def _load(self, state: Mapping[str, Any]) -> None:
        self.phase, self.ranks = state["phase"], tuple(state["ranks"])
        self.r_min, self.r_max = state["r_min"], state["r_max"]
        if self._gate_interval:
            self._gated = (int(state["gate"][0]), tuple(state["gate"][1])) if state["gate"] else None

    def _go_on_from(self, state: Mapping[str, Any], last_window: int) -> None:
        """Take over the parts of a state of other settings that hold beside this controller's own."""
