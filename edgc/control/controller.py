"""Decides the ranks: warm-up, search of r_max, windows, limits. Plain arithmetic: no tensors, no groups.

Every data-parallel rank of every stage holds one controller and feeds it the same reports, so all decide
alike. Iterations count from 1; windows are consecutive blocks of ``window`` iterations, and phases change
between windows:

* warm-up: no compression for ``warmup_fraction`` of the run and until two consecutive window means of stage
  0's entropy differ by at most ``stability_tolerance``, but not beyond the first window end after
  ``warmup_limit_fraction``;
* search, inside warm-up (which waits for it): one timed reduction per iteration, see :mod:`edgc.timing.rank_search`;
* active: stage 0 starts at r_max (reference rank and entropy: the last complete window of warm-up) and moves
  by the policy (:mod:`edgc.control.policy`) at every window end; the other stages follow by
  :mod:`edgc.timing.alignment`. Where times were measured they are watched (:mod:`edgc.timing.change_detector`) and, if
  they change, measured again beside the training steps; then r_max (if it was searched) and the ranks follow at once.
  While even the lowest rank would be slower, nothing is compressed;
* disabled: uncompressed to the end: method ``none``, or compression that could not pay.

Methods other than ``edgc`` are active from the first iteration, on the first stages (``compressed_stages``). While
active, the cost gate (if there is one) measures on the schedule of :mod:`edgc.timing.cost_gate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from edgc.checks import integer, need
from edgc.config import FACTOR_BITS, EDGCConfig
from edgc.control import warm_up
from edgc.control.feasibility import check
from edgc.control.plan import Decision, Phase, Plan
from edgc.control.policies import Ranks
from edgc.control.policy import Following
from edgc.errors import UserError
from edgc.measurement.report import Report
from edgc.measurement.spectral import Curve
from edgc.timing.cost_gate import GateSchedule, summary
from edgc.timing.rank_search import bytes_limit
from edgc.timing.stage_times import StageTimes

_FORMAT = 4
_KEYS = ("format", "phase", "ranks", "r_min", "r_max", "previous", "following", "paused", "times", "gate")

__all__ = ["Controller", "Decision", "Plan", "Report"]


class Controller:
    """The state machine of one run.

    Args:
        config: the compression settings.
        stages: per pipeline stage the (rows, columns) of its compressible matrices.
        iterations: length of the run.
        overlapped: whether the training step's reductions overlap with backward or with each other, so that their
            times show only what nothing hid.
        gradient_bits: of an entry of the first stage's gradients, on average.

    Attributes:
        phase, ranks, r_min, r_max: as in :class:`~edgc.control.plan.Decision`, now.
        reason: of the last decision; why nothing will be compressed if that is known from the start.

    Raises:
        UserError: settings that cannot work with this model or this length of run, or a length that is no whole number
            of at least 1.
    """

    def __init__(
        self,
        config: EDGCConfig,
        stages: Sequence[Sequence[tuple[int, int]]],
        iterations: int,
        *,
        overlapped: bool = False,
        gradient_bits: float = 32,
    ) -> None:
        if not stages:
            raise ValueError("at least one stage is needed")
        self.config, self.stages = config, len(stages)
        self.iterations = integer("iterations", iterations, 1)
        self.phase: Phase = "warmup"
        self.reason = ""
        self.r_min: int | None = None
        self.r_max: int | None = None
        self.ranks: Ranks = (None,) * self.stages
        self._previous: float | None = None  # stage 0's entropy in the window before
        self._following: Following | None = None  # of method edgc
        self._target: float | None = None  # of the decision that is being taken
        self._times = StageTimes(config, self.stages, overlapped=overlapped)
        self._paused: Ranks | None = None  # ranks to go on from once compression pays again
        self._gate = GateSchedule(config.gate_interval) if config.cost_gate else None
        if config.method == "none":
            self.phase, self.reason = "disabled", "method: none"
        elif config.method != "edgc":
            # To a method without a rank the number says only that it is to compress.
            compressed = config.stages_compressed(self.stages)
            rank = config.rank or 1
            self.phase = "active"
            self.ranks = tuple(rank if stage < compressed else None for stage in range(self.stages))
            self.r_min = self.r_max = config.rank
        elif not any(stages):
            self.phase, self.reason = "disabled", "no matrix is large enough to compress"
        else:
            self._prepare([(m, n) for m, n in stages[0]], gradient_bits)

    def _prepare(self, shapes: list[tuple[int, int]], gradient_bits: float) -> None:
        """Check the settings of method edgc against the model, and set up its search and its times."""
        config = self.config
        model = check(config, shapes, self.iterations)
        self._following = Following(config, model, self.stages, self.iterations)
        bits = {"factor_bits": FACTOR_BITS[config.factor_dtype], "gradient_bits": gradient_bits}
        limit = bytes_limit(shapes, config.rank_multiple, **bits)
        if given := config.ranks_given:
            # Stage 0 has these ranks; only the other stages may rise above them.
            self._set_limits(config.r_max or max(limit, *given))
        elif config.r_max is not None:
            self._set_limits(config.r_max)
        elif not limit:
            self.phase, self.reason = "disabled", f"rank {config.rank_multiple} already saves no bytes"
            return
        if self.r_max is None:
            self._times.measure(limit, find_r_max=True)
        elif config.alignment == "measured" and self.stages > 1:
            self._times.measure(max(config.rank_multiple, self.r_max), find_r_max=False)

    def _set_limits(self, r_max: int) -> None:
        self.r_max = r_max
        self.r_min = min(self.config.ranks_given, default=self.config.lower_rank(r_max))

    def plan(self, iteration: int) -> Plan:
        """What to do at ``iteration`` (1-based), given the reports so far; changes nothing."""
        gate = self._gate is not None and self.phase == "active" and self._gate.due(iteration, self.ranks)
        if self.config.method != "edgc" or self.phase == "disabled":
            return Plan(self.phase, self.ranks, None, gate, gate)
        probe = self._times.probe if iteration >= self.config.search_start else None
        phase: Phase = "search" if self.phase == "warmup" and probe is not None else self.phase
        exchange = gate or probe is not None or iteration % self.config.window == 0
        return Plan(phase, self.ranks, probe, exchange, gate)

    @property
    def rank_grid(self) -> tuple[int, ...]:
        """Ranks at which reports are to give error curves now, ascending; empty where no policy uses them."""
        uses = self._following is not None and self._following.curves is not None
        if not uses or self.phase != "active" or self.r_max is None:
            return ()
        return tuple(range(self.config.rank_multiple, self.r_max + 1, self.config.rank_multiple))

    def predicted(self, ranks: Sequence[int | None]) -> tuple[float, ...]:
        """Seconds of a reduction per stage by the last measurement of times, nan where there is none."""
        return self._times.predicted(ranks)

    def watches(self, iteration: int) -> bool:
        """Whether the report of ``iteration`` is to give the window's times of reductions."""
        active = self.config.method == "edgc" and self.phase == "active"
        return active and iteration % self.config.window == 0 and self._times.watched

    def observe(self, iteration: int, report: Report) -> Decision | None:
        """Take in the report of an iteration whose plan asks for an exchange.

        Returns a decision at every window end, where a measurement of times starts or ends, and where the cost gate
        has measured, else None.

        Raises:
            UserError: policy ``loss`` was not told any loss; on every rank, as the reports are the same.
            ValueError: no exchange was due, or the report does not fit the plan.
        """
        plan = self.plan(iteration)
        if not plan.exchange:
            raise ValueError(f"iteration {iteration} has no exchange")
        if len(report.entropy) != self.stages:
            raise ValueError(f"the report has {len(report.entropy)} entropies for {self.stages} stages")
        reasons, self._target = [], None
        # As they were in this window, whatever is decided below.
        measured = report.reduction_seconds if self.watches(iteration) else None
        predicted, grid = self._times.predicted(plan.ranks), self.rank_grid
        if plan.probe_rank is not None:
            reasons = self._observe_probe(report)
        measurement_ended = plan.probe_rank is not None and self._times.probe is None
        if plan.gate and self._gate is not None:
            self._gate.measured(iteration, plan.ranks)
            if report.gate:
                reasons.append(summary(report.gate))
        window_end = self.config.method == "edgc" and iteration % self.config.window == 0
        if window_end and self.phase != "disabled":
            if measured is not None and (why := self._times.check(measured, plan.ranks)):
                reasons.append(why)
            entropy = report.entropy[0] if math.isfinite(report.entropy[0]) else None
            loss = report.loss if math.isfinite(report.loss) else None
            if self._following is not None:
                self._following.require_loss(iteration, report.loss)
            curves = report.error_curve if self.rank_grid == grid else None  # another r_max: another grid
            reasons.append(self._end_of_window(iteration, entropy, loss, curves))
        if not reasons:
            return None
        upcoming = self.plan(iteration + 1)
        shown = report.entropy if window_end else (math.nan,) * self.stages
        self.reason = "; ".join(reasons)
        limits = self.r_min, self.r_max
        return Decision(
            iteration,
            upcoming.phase,
            self.reason,
            upcoming.ranks,
            shown,
            *limits,
            gate=report.gate,
            timing=self._times.timing if measurement_ended else (),
            reduction_seconds=() if measured is None else tuple(measured),
            predicted_seconds=() if measured is None else predicted,
            target=self._target,
            mean_error=report.mean_error if window_end else (),
        )

    def _observe_probe(self, report: Report) -> list[str]:
        search = self._times.search
        assert search is not None
        if report.probe_seconds is None or len(report.probe_seconds) != self.stages:
            raise ValueError("a probe was due: the report needs probe_seconds, one per stage")
        if not all(map(math.isfinite, report.probe_seconds)):
            return []  # a gradient was not finite and the reduction given up: timed again at the next iteration
        reasons = [] if search.started else ["search: timing reductions"]
        if not self._times.add(report.probe_seconds, report.backward_seconds):
            return reasons
        if verdict := self._times.finish(self.ranks):
            reasons.append(verdict)
        r_max = None
        if search.stop_at_crossing:
            r_max, why = search.r_max(self.config.rank_multiple)
            reasons.append(f"search: {why}" + (f"; r_max = {r_max}" if r_max else ""))
        else:
            reasons.append("search: times of the reductions are known")
        if self.phase == "active":
            reasons.append(self._follow_times(r_max))
        elif r_max == 0:
            self.phase = "disabled"
            reasons[-1] += "; compression is off for this run"
        elif r_max is not None:
            self._set_limits(r_max)
        return reasons

    def _follow_times(self, r_max: int | None) -> str:
        """Go on with times that were measured anew, and with the r_max found by them (None: not searched)."""
        old, self._paused = self._paused or self.ranks, None
        if r_max == 0:
            self._paused, self.ranks = old, (None,) * self.stages
            return "nothing is compressed until times change again"
        if r_max is not None and r_max != self.r_max:
            self._set_limits(r_max)
            if self._following is not None:
                self._following.forget_curves()
        ranks = [rank if rank is None else self._clamped(rank) for rank in old]
        self.ranks, remark = tuple(ranks), ""
        if self.config.alignment != "off" and ranks[0] is not None:
            remark = self._spread(ranks[0])
        return f"ranks {_words(old)} -> {_words(self.ranks)}{remark}"

    def _clamped(self, rank: int) -> int:
        if self.config.ranks_given:
            return rank
        r_min, r_max = self._limits
        return min(r_max, max(r_min, rank))

    @property
    def _limits(self) -> tuple[int, int]:
        assert self.r_min is not None
        assert self.r_max is not None
        return self.r_min, self.r_max

    def _end_of_window(
        self,
        iteration: int,
        entropy: float | None,
        loss: float | None,
        curves: Sequence[Curve | None] | None,
    ) -> str:
        """Move on with a window's means of stage 0's entropy, of the loss and of all stages' error curves (None: not
        measured); the reason."""
        assert self._following is not None
        previous, self._previous = self._previous, entropy
        self._following.take(entropy, loss)
        if self.phase == "warmup":
            return self._warmup(iteration, previous, entropy)
        if self._paused is not None:
            return "compression would not pay; ranks unchanged"
        alone = self.config.alignment == "off"
        before = self.ranks if alone else self.ranks[:1]
        move = self._following.move(iteration, before, curves, self.rank_grid, *self._limits)
        ranks, reason, self._target = move
        if ranks is not None and alone and len(ranks) == self.stages:
            self.ranks = ranks
        elif ranks is not None and ranks[0] is not None:
            reason += self._spread(ranks[0])
        return reason

    def _warmup(self, iteration: int, previous: float | None, entropy: float | None) -> str:
        measuring = self._times.probe is not None
        over, why = warm_up.ends(
            self.config, self.iterations, iteration, previous, entropy, measuring=measuring
        )
        if not over:
            return f"warm-up: {why}"
        assert self._following is not None
        self.phase = "active"
        rank = self._following.begin(iteration, self._limits[1], entropy)
        return f"warm-up ends: {why}; rank {rank}{self._spread(rank)}"

    def _spread(self, rank: int) -> str:
        """Set every stage's rank from stage 0's; returns a remark where alignment was asked for in vain."""
        self.ranks, remark = self._times.ranks(rank, *self._limits)
        return f"; {remark}" if remark else ""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next decisions depend on, in JSON's types (every float finite)."""
        return {
            "format": _FORMAT,
            "phase": self.phase,
            "ranks": list(self.ranks),
            "r_min": self.r_min,
            "r_max": self.r_max,
            "previous": self._previous,
            "following": self._following.state_dict() if self._following else None,
            "paused": list(self._paused) if self._paused else None,
            "times": self._times.state_dict(),
            "gate": self._gate.state_dict() if self._gate else None,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, changed_settings: bool = False) -> None:
        """Continue where the controller that gave ``state`` stood, one of the same stages.

        Args:
            changed_settings: whether the state may be of other settings. This controller's then hold: its limits, its
                given ranks, its policy; phase, ranks (within the limits), reference and times are the state's.

        Raises:
            UserError: the state is of another format, another number of stages, or, without ``changed_settings``, of
                another policy or of a run that measures times where this one does not.
        """
        need(state, _KEYS, "engine.controller")
        fits = state["format"] == _FORMAT and len(state["ranks"]) == self.stages
        same_times = fits and self._times.fits(state["times"])
        same_policy = self._following is None or (fits and self._following.fits(state["following"]))
        if not fits or not (changed_settings or (same_times and same_policy)):
            fix = "resume with the settings and the pipeline the run was started with"
            raise UserError("the saved controller state does not fit this run", fix=fix)
        if changed_settings:
            self._go_on_from(state, same_times)
            return
        self.phase, self.ranks = state["phase"], tuple(state["ranks"])
        self.r_min, self.r_max = state["r_min"], state["r_max"]
        self._previous = state["previous"]
        self._paused = tuple(state["paused"]) if state["paused"] else None
        self._times.load_state_dict(state["times"])
        if self._following is not None:
            self._following.load_state_dict(state["following"])
        if self._gate is not None:
            self._gate.load_state_dict(state["gate"])

    def _go_on_from(self, state: Mapping[str, Any], same_times: bool) -> None:
        """Take over what a state of other settings says beside this controller's own."""
        if self.config.method != "edgc" or self.phase == "disabled":
            return
        assert self._following is not None
        self.phase, self._previous = state["phase"], state["previous"]
        if same_times:
            self._times.load_state_dict(state["times"])
        if state["following"] is not None:
            self._following.load_state_dict(state["following"])
        if self.phase != "active":
            return
        if self.r_max is None:
            self._set_limits(state["r_max"])
        if self._following.lacks_reference:
            fix = "choose the policy that the run was started with"
            raise UserError(
                "policy cqm needs an entropy at the end of warm-up, which the state lacks", fix=fix
            )
        rank = state["ranks"][0]
        if rank is not None:
            multiple = self.config.rank_multiple
            fixed = self.config.rank if self.config.policy == "fixed" else None
            self._spread(
                fixed or self._clamped(rank if self.config.ranks_given else rank // multiple * multiple)
            )


def _words(ranks: Sequence[int | None]) -> str:
    return "/".join("dense" if rank is None else str(rank) for rank in ranks)
