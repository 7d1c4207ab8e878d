"""Decides the ranks of methods that are alike from first to last; :mod:`edgc.control.adaptive` those of ``edgc``.

Every data-parallel rank of every stage holds one controller and feeds it the same reports, so all decide alike.
Iterations count from 1. Plain arithmetic: no tensors, no process groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from edgc.checks import integer, need
from edgc.config import CompressingConfig, ConstantConfig, EDGCConfig
from edgc.control.plan import Decision, Phase, Plan, Ranks
from edgc.errors import UserError
from edgc.measurement.report import Report
from edgc.timing.cost_gate import GateSchedule, summary

_FORMAT = 6


class Controller:
    """Method ``none``, which never compresses, and the methods that do so from the first iteration.

    Those compress on the first stages (``compressed_stages``). The cost gate, if there is one, measures on the schedule
    of :mod:`edgc.timing.cost_gate` while something is compressed. For arguments see ``make_controller``.

    Attributes:
        phase, ranks, r_min, r_max: as in :class:`~edgc.control.plan.Decision`, now.
        reason: of the last decision; why nothing will be compressed if that is known from the start.
        notice: what a user has to be told, for it may hold for the rest of the run: that less is compressed than the
            settings sound like. Empty as long as there is nothing to be said.
    """

    phase: Phase

    def __init__(self, config: EDGCConfig, stages: int, iterations: int) -> None:
        if not stages:
            raise ValueError("at least one stage is needed")
        self.config, self.stages = config, stages
        self.iterations = integer("iterations", iterations, 1)
        self.r_min: int | None = None
        self.r_max: int | None = None
        self.ranks: Ranks = (None,) * stages
        self.notice = ""
        self._gate: GateSchedule | None = None
        if isinstance(config, CompressingConfig) and config.cost_gate:
            self._gate = GateSchedule(config.gate_interval)
        self.phase, self.reason = "disabled", config.title()
        if isinstance(config, ConstantConfig):
            self.phase, self.reason = "active", ""
            compressed = config.stages_compressed(stages)
            self.r_min = self.r_max = config.fixed_rank
            # To a method without a rank the number says only that it is to compress.
            self.ranks = tuple((config.fixed_rank or 1) if i < compressed else None for i in range(stages))

    def plan(self, iteration: int) -> Plan:
        """What to do at ``iteration`` (1-based), given the reports so far; changes nothing."""
        gate = self._gate is not None and self.phase == "active" and self._gate.due(iteration, self.ranks)
        return Plan(self.phase, self.ranks, None, gate, gate)

    @property
    def rank_grid(self) -> tuple[int, ...]:
        """Ranks at which reports are to give error curves now, ascending; empty where no policy uses them."""
        return ()

    def predicted(self, ranks: Sequence[int | None]) -> tuple[float, ...]:
        """Seconds of a reduction per stage by the last measurement of times, nan where there is none."""
        return (math.nan,) * self.stages

    def watches(self, iteration: int) -> bool:
        """Whether the report of ``iteration`` is to give the window's times of reductions."""
        return False

    def observe(self, iteration: int, report: Report) -> Decision | None:
        """Take in the report of an iteration whose plan asks for an exchange.

        Returns a decision at every window end of method ``edgc``, where a measurement of times starts or ends, and
        where the cost gate has measured, else None.

        Raises:
            UserError: policy ``loss`` was not told any loss; on every rank, as the reports are the same.
            ValueError: no exchange was due, or the report does not fit the plan.
        """
        plan = self.plan(iteration)
        if not plan.exchange:
            raise ValueError(f"iteration {iteration} has no exchange")
        if len(report.entropy) != self.stages:
            raise ValueError(f"the report has {len(report.entropy)} entropies for {self.stages} stages")
        gate: list[str] = []
        if plan.gate and self._gate is not None:
            self._gate.measured(iteration, plan.ranks)
            gate = [summary(report.gate)] if report.gate else []
            if gate and not any(verdict.compress for verdict in report.gate):
                self.notice = f"{gate[0]}; it is measured every {self._gate.interval} iterations"
        reasons, facts = self._decide(iteration, plan, report, gate)
        if not reasons:
            return None
        upcoming, self.reason = self.plan(iteration + 1), "; ".join(reasons)
        facts = {"entropy": (math.nan,) * self.stages, "r_min": self.r_min, "r_max": self.r_max, **facts}
        return Decision(iteration, upcoming.phase, self.reason, upcoming.ranks, gate=report.gate, **facts)

    def _decide(self, iteration: int, plan: Plan, report: Report, gate: list[str]) -> tuple[list[str], dict[str, Any]]:
        """What the report changes: reasons, among them those of the gate, and what else a decision tells."""
        return gate, {}

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next decisions depend on, in JSON's types (every float finite)."""
        return {
            "format": _FORMAT,
            "phase": self.phase,
            "ranks": list(self.ranks),
            "r_min": self.r_min,
            "r_max": self.r_max,
            "gate": self._gate.state_dict() if self._gate else None,
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
        """Whether ``state`` is of a run that remembers and measures what this one does."""
        return True

    def _load(self, state: Mapping[str, Any]) -> None:
        self.phase, self.ranks = state["phase"], tuple(state["ranks"])
        self.r_min, self.r_max = state["r_min"], state["r_max"]
        if self._gate is not None:
            self._gate.load_state_dict(state["gate"])

    def _go_on_from(self, state: Mapping[str, Any], last_window: int) -> None:
        """Take over what a state of other settings says beside this controller's own."""
