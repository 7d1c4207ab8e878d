"""Controller of method ``edgc``: warm-up, search of r_max, windows, limits; and the controller of any run.

Windows are consecutive blocks of ``window`` iterations, and phases change between windows:

* warm-up: no compression for ``warmup_fraction`` of the run and until two consecutive window means of stage
  0's entropy differ by at most ``stability_tolerance``, but not beyond the first window end after
  ``warmup_limit_fraction``;
* search, inside warm-up (which waits for it): one timed reduction per iteration
  (:class:`~edgc.timing.stage_times.RankSearch`);
* active: stage 0 starts at r_max (reference rank and entropy: the last complete window of warm-up) and moves
  by the policy (:mod:`edgc.control.policies`) at every window end; the other stages follow by
  :mod:`edgc.timing.alignment`. Where times were measured they are watched (:mod:`edgc.timing.change_detector`) and, if
  they change, measured again beside the training steps; then r_max (if it was searched) and the ranks follow at once.
  While even the lowest rank would be slower, nothing is compressed;
* disabled: uncompressed to the end: compression that could not pay.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from edgc.checks import plain
from edgc.compressors.powersgd import FACTOR_BITS, LowRankConfig, saves_bytes
from edgc.config import CompressingConfig, EDGCConfig
from edgc.control.controller import Controller, Phase, Plan
from edgc.control.policies.base import History, Move, Policy, Ranks, WindowEnd
from edgc.control.rank_model import StageModel
from edgc.control.settings import PolicyConfig
from edgc.errors import UserError
from edgc.measurement.report import Report
from edgc.timing.stage_times import StageTimes, bytes_limit

Shapes = Sequence[Sequence[tuple[int, int]]]
NO_MATRIX = "no matrix is large enough to compress"
WINDOW_FACTS = ("entropy", "entropy_error", "entropy_layers", "entropy_embeddings", "embedding_share", "mean_error")
"""Fields of the report that a decision at a window's end takes over."""


def make_controller(
    config: EDGCConfig,
    stages: Shapes,
    iterations: int,
    *,
    overlapped: bool = False,
    gradient_bits: float = 32,
    embeddings: Sequence[tuple[int, int]] = (),
) -> Controller:
    """Build the controller of one run, of whatever method.

    Args:
        config: the compression settings.
        stages: per pipeline stage the (rows, columns) of its compressible matrices.
        iterations: length of the run.
        overlapped: whether the training step's reductions overlap with backward or with each other, so that their
            times show only what nothing hid.
        gradient_bits: of an entry of the first stage's gradients, on average.
        embeddings: those of the first stage's matrices that are embeddings; the error that CQM keeps is of the matrices
            that the entropy is of (:attr:`edgc.sections.EntropyConfig.parameters`).

    Raises:
        UserError: settings that cannot work with this model or this length of run, or a length that is no whole number
            of at least 1.
    """
    if isinstance(config, PolicyConfig):
        controller: Controller = AdaptiveController(config, stages, iterations, overlapped, gradient_bits, embeddings)
    else:
        controller = Controller(config, len(stages), iterations)
    if isinstance(config, CompressingConfig):
        why = controller.reason if controller.phase == "disabled" else ""
        why = why or _never_smaller(config, stages, controller.r_min, gradient_bits)
        controller.notice = f"nothing is compressed in this run: {why}" if why else ""
    return controller


def _never_smaller(config: CompressingConfig, stages: Shapes, lowest: int | None, gradient_bits: float) -> str:
    """Reason why every matrix is sent dense at the ``lowest`` rank and so at all; empty if some are compressed."""
    shapes = [shape for stage in stages for shape in stage]
    if not shapes:
        return NO_MATRIX
    dtype = config.factor_dtype if isinstance(config, LowRankConfig) else "fp32"
    if lowest is None or any(saves_bytes(shape, lowest, dtype, gradient_bits) for shape in shapes):
        return ""
    bits = FACTOR_BITS[dtype]
    highest = max(math.ceil(m * n * gradient_bits / ((m + n) * bits)) - 1 for m, n in shapes)
    return f"rank {lowest} saves no bytes for any matrix; the highest that does is {highest}"


class AdaptiveController(Controller):
    """State machine of one run of method ``edgc``; arguments as of :func:`make_controller`."""

    config: PolicyConfig

    def __init__(
        self,
        config: PolicyConfig,
        stages: Shapes,
        iterations: int,
        overlapped: bool,
        gradient_bits: float,
        embeddings: Sequence[tuple[int, int]],
    ) -> None:
        super().__init__(config, len(stages), iterations)
        self._history = History()
        self._policy: Policy | None = None
        self._times = StageTimes(config, self.stages, overlapped=overlapped)
        self._paused: Ranks | None = None  # ranks to go on from once compression pays again
        if not any(stages):
            self.reason = NO_MATRIX
            return
        self.phase, self.reason = "warmup", ""
        shapes = [(m, n) for m, n in stages[0]]
        if not shapes:
            fix = "lower min_compression_elements or use method: none"
            raise UserError("the first pipeline stage has no matrix to compress", fix=fix)
        layers = list((Counter(shapes) - Counter(embeddings)).elements())
        model = StageModel(layers if layers and config.entropy.parameters == "layers" else shapes)
        config.check_run(model, self.iterations)
        self._policy = config.rule(config, model, self.stages, self.iterations)
        factor_bits = FACTOR_BITS[config.factor_dtype]
        limit = bytes_limit(shapes, config.rank_multiple, factor_bits=factor_bits, gradient_bits=gradient_bits)
        upper = config.upper_rank(limit)
        if upper is not None:
            self._set_limits(upper)
            if config.alignment == "measured" and self.stages > 1:
                self._times.measure(max(config.rank_multiple, upper), find_r_max=False)
        elif limit:
            self._times.measure(limit, find_r_max=True)
        else:
            self.phase, self.reason = "disabled", f"rank {config.rank_multiple} already saves no bytes"

    def _set_limits(self, r_max: int) -> None:
        self.r_min, self.r_max = self.config.lower_rank(r_max), r_max

    @property
    def _limits(self) -> tuple[int, int]:
        assert self.r_min is not None
        assert self.r_max is not None
        return self.r_min, self.r_max

    def plan(self, iteration: int) -> Plan:
        plan = super().plan(iteration)
        if self.phase == "disabled":
            return plan
        probe = self._times.probe if iteration >= self.config.search_start else None
        phase: Phase = "search" if self.phase == "warmup" and probe is not None else self.phase
        exchange = plan.gate or probe is not None or iteration % self.config.window == 0
        return Plan(phase, self.ranks, probe, exchange, plan.gate)

    @property
    def rank_grid(self) -> tuple[int, ...]:
        if self._policy is None or not self._policy.uses_curves or self.phase != "active" or self.r_max is None:
            return ()
        return tuple(range(self.config.rank_multiple, self.r_max + 1, self.config.rank_multiple))

    def predicted(self, ranks: Ranks) -> tuple[float, ...]:
        return self._times.predicted(ranks)

    def watches(self, iteration: int) -> bool:
        return self.phase == "active" and iteration % self.config.window == 0 and self._times.watched

    def _decide(self, iteration: int, plan: Plan, report: Report, reasons: list[str], facts: dict[str, Any]) -> None:
        # As they were in this window, whatever is decided below.
        measured = report.reduction_seconds if self.watches(iteration) else None
        predicted, grid = self.predicted(plan.ranks), self.rank_grid
        if plan.probe_rank is not None:
            reasons[:0] = self._observe_probe(report)
            if self._times.probe is None:
                facts["timing"] = self._times.timing
        if iteration % self.config.window:
            return
        facts |= {name: getattr(report, name) for name in WINDOW_FACTS}
        if measured is not None:
            facts |= {"reduction_seconds": tuple(measured), "predicted_seconds": predicted}
        if self.phase == "disabled":
            return
        if measured is not None and (mismatch := self._times.check(measured, plan.ranks)):
            reasons.append(mismatch)
        move = self._end_window(iteration, report, grid)
        reasons.append(move.reason)
        facts |= {"target": move.target, "target_low": move.low, "target_high": move.high}

    def _observe_probe(self, report: Report) -> list[str]:
        search = self._times.search
        assert search is not None
        assert report.probe_seconds is not None
        if not all(map(math.isfinite, report.probe_seconds)):
            return []  # a gradient was not finite and the reduction given up: timed again at the next iteration
        reasons = [] if search.times else ["search: timing reductions"]
        if not self._times.add(report.probe_seconds, report.backward_seconds):
            return reasons
        if verdict := self._times.finish(self.ranks):
            reasons.append(verdict)
        r_max, why = None, "times of the reductions are known"
        if search.stop_at_crossing:
            r_max, why = search.r_max()
        reasons.append(f"search: {why}" + (f"; r_max = {r_max}" if r_max else ""))
        if self.phase == "active":
            reasons.append(self._follow_times(r_max))
        elif r_max == 0:
            self.phase = "disabled"
            self.notice = f"{why}, so nothing is compressed for the rest of this run"
            reasons[-1] += "; compression is off for this run"
        elif r_max is not None:
            self._set_limits(r_max)
        return reasons

    def _follow_times(self, r_max: int | None) -> str:
        """Go on with times that were measured anew, and with the r_max that follows from them (None: not searched)."""
        old, self._paused = self._paused or self.ranks, None
        if r_max == 0:
            self._paused, self.ranks = old, (None,) * self.stages
            self.notice = "compression became slower than none, so nothing is compressed until times change again"
            return "nothing is compressed until times change again"
        if r_max is not None:
            self._set_limits(r_max)
        ranks = [rank if rank is None else self.config.clamped(rank, *self._limits) for rank in old]
        self.ranks, remark = tuple(ranks), ""
        if self.config.alignment != "off" and ranks[0] is not None:
            remark = self._align(ranks[0])
        names = ["/".join("dense" if r is None else str(r) for r in ranks) for ranks in (old, self.ranks)]
        return f"ranks {names[0]} -> {names[1]}{remark}"

    def _end_window(self, iteration: int, report: Report, grid: Sequence[int]) -> Move:
        """Move on with a window's means. ``grid``: ranks of the report's error curves."""
        assert self._policy is not None
        history = self._history
        self._policy.check_loss(iteration, report.loss, history)
        error = report.entropy_error[0] if report.entropy_error else math.nan
        history.entropy.add(plain(report.entropy[0]), plain(error))
        history.loss.add(plain(report.loss))
        if self.phase == "warmup":
            return Move(None, self._warm_up(iteration, self._policy))
        if self._paused is not None:
            return Move(None, "compression would not pay; ranks unchanged")
        alone = self.config.alignment == "off"
        curves = report.error_curve if self.rank_grid == grid else None  # another r_max: another grid
        ranks = self.ranks if alone else self.ranks[:1]
        move = self._policy.move(WindowEnd(iteration, ranks, *self._limits, history, curves, self.rank_grid))
        if move.ranks is not None and alone and len(move.ranks) == self.stages:
            self.ranks = move.ranks
        elif move.ranks is not None and move.ranks[0] is not None:
            return move._replace(reason=move.reason + self._align(move.ranks[0]))
        return move

    def _warm_up(self, iteration: int, policy: Policy) -> str:
        measuring, entropy = self._times.probe is not None, self._history.entropy
        ends, why = self.config.warm_up_ends(
            self.iterations, iteration, entropy.previous, entropy.now, measuring=measuring
        )
        if not ends:
            return f"warm-up: {why}"
        self.phase = "active"
        rank = policy.begin(iteration, self._limits[1])
        self._history.anchor(rank)
        return f"warm-up ends: {why}; rank {rank}{self._align(rank)}"

    def _align(self, rank: int) -> str:
        """Set every stage's rank from stage 0's; returns a remark where alignment was asked for in vain."""
        self.ranks, remark = self._times.ranks(rank, *self._limits)
        self.notice = remark or self.notice
        return f"; {remark}" if remark else ""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "history": self._history.state_dict(),
            "policy": None if self._policy is None else [self.config.policy, self._policy.state_dict()],
            "paused": list(self._paused) if self._paused else None,
            "times": self._times.state_dict(),
        }

    def _fits(self, state: Mapping[str, Any]) -> bool:
        same_policy = self._policy is None or (state["policy"] or [None])[0] == self.config.policy
        return same_policy and self._times.fits(state["times"])

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load(state)
        if self.phase == "disabled":
            self.notice = self.notice or "nothing is compressed: an earlier search of r_max in this run ended so"
        self._history = History.from_state(state["history"])
        self._paused = tuple(state["paused"]) if state["paused"] else None
        self._times.load_state_dict(state["times"])
        if self._policy is not None:
            self._policy.load_state_dict(state["policy"][1])

    def _go_on_from(self, state: Mapping[str, Any], last_window: int) -> None:
        if self.phase == "disabled":
            return
        assert self._policy is not None
        self.phase, self._history = state["phase"], History.from_state(state["history"])
        known_times = self._times.fits(state["times"])
        if known_times:
            self._times.load_state_dict(state["times"])
        if state["policy"] is not None and state["policy"][0] == self.config.policy:
            self._policy.load_state_dict(state["policy"][1])
        if self.r_max is None and state["r_max"] is not None:
            self._set_limits(state["r_max"])
        rank = (state["paused"] or state["ranks"])[0]
        if self.phase == "active" and rank is not None:
            self._align(self._policy.go_on(last_window, rank, self._history, *self._limits))
            if state["paused"] and known_times:
                self._paused, self.ranks = self.ranks, (None,) * self.stages
