"""Failures of compression, named while a run goes on: three of them, and the numbers they are told by.

``diverging``: after compression began, the loss has left its best for good. ``no_speedup``: fewer bytes are sent, but
compressing and decompressing cost more than that saves. ``out_of_step``: the stages' reductions deviate from the
predicted T(r) by different amounts, so that what was to finish together does not.

Each is judged once a window by medians, against the scatter of the same window or run, and is reported from the second
window in a row on, so that noise alone hardly ever is. A skipped step is no evidence for anything, and neither are the
times of a step that was measured in (a benchmark disturbs it). Plain arithmetic on numbers that are equal on all ranks;
nothing here changes what a run does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median, quantiles
from typing import Any

from edgc.checks import plain

SHORTEST_WINDOW = 8
FEWEST = 6  # samples of a window that may be judged
IN_A_ROW = 2  # windows
LOSS_SIGMAS = 4.0  # of a single iteration's loss
LOSS_SHARE = 0.02
STEP_SHARE = 0.2  # as edgc.config's remeasure_above
STEP_ERRORS = 5.0  # standard errors of a median

FIXES = {
    "diverging": "raise r_min (or rank); if the run diverges without compression too, lower the learning rate",
    "no_speedup": "set cost_gate: true, which compresses only where that measures faster, or method: none",
    "out_of_step": "set remeasure_above so that T(r) is timed anew, raise search_repeats, or alignment: off",
}

TOLD_BY_TIMES = ("no_speedup", "out_of_step")  # by measured seconds, so they need not repeat with a run


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Numbers of one iteration; times in seconds, per pipeline stage, nan where not known.

    Attributes:
        loss: in nats per token.
        ranks: None sends a stage's gradients uncompressed.
        bytes: sent by one replica, all stages; bytes_dense: what it would have been.
        compress, communicate, decompress: of the reduction.
        exposed: how long the step waited for averaged gradients.
        predicted: T(r) of the ranks in use by the last measurement of times; empty if there was none.
        skipped: whether the step was given up because of a gradient that was not finite.
        disturbed: whether something was timed on copies in this step.
    """

    iteration: int
    loss: float
    ranks: Sequence[int | None]
    bytes: int
    bytes_dense: int
    compress: Sequence[float]
    communicate: Sequence[float]
    decompress: Sequence[float]
    exposed: Sequence[float]
    predicted: Sequence[float] = ()
    skipped: bool = False
    disturbed: bool = False


@dataclass(frozen=True)
class Finding:
    """A signature at the end of a window.

    Attributes:
        signature: a key of :data:`FIXES`.
        windows: for how many windows in a row it has held.
        numbers, text: what it was told by, and the same in words.
        fix: what to do, in one line.
    """

    signature: str
    iteration: int
    windows: int
    numbers: dict[str, float | int]
    text: str

    @property
    def fix(self) -> str:
        return FIXES[self.signature]

    @property
    def is_new(self) -> bool:
        """True if the last window did not report it."""
        return self.windows == IN_A_ROW


@dataclass
class SignatureWatch:
    """Judges the windows of one run.

    Args:
        window: the controller's, in iterations; here a multiple of it that has at least ``SHORTEST_WINDOW``.
        overlapped: whether reductions overlap with backward. What counts is then the time that a step waited for
            gradients, and nothing is said of single stages: how much was hidden no prediction knows.
        uncompressed: seconds of a reduction without compression, slowest stage, where a measurement says so; the
            uncompressed windows of the run itself, its warm-up, go before.
    """

    window: int
    overlapped: bool = False
    uncompressed: float = math.nan
    # All from here on, and ``uncompressed``, is what a checkpoint holds.
    losses: list[float] = field(default_factory=list, init=False)  # of this window
    times: list[list[float]] = field(default_factory=list, init=False)  # undisturbed, at these ranks, per stage
    deviations: list[list[float]] = field(default_factory=list, init=False)  # measured minus predicted
    predicted: float = field(default=0.0, init=False)  # the longest
    saves: float = field(default=0.0, init=False)  # share of the bytes that is not sent
    ranks: list[int | None] = field(default_factory=list, init=False)
    began: bool = field(default=False, init=False)  # compression
    best: float = field(default=math.inf, init=False)  # median loss of a window
    scatter: list[float] = field(default_factory=list, init=False)  # of single losses, one a window
    warm_up: list[float] = field(default_factory=list, init=False)  # slowest median of uncompressed windows
    streaks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FIXES, 0), init=False)
    pair: list[int] = field(default_factory=list, init=False)  # the latest and the earliest stage of the last window

    def __post_init__(self) -> None:
        self.window *= -(-SHORTEST_WINDOW // self.window)

    def add(self, observation: Observation) -> list[Finding]:
        """Take in one iteration; findings at the end of a window, each signature at most once."""
        if list(observation.ranks) != self.ranks:
            self.ranks, self.times, self.deviations = list(observation.ranks), [], []
        if not observation.skipped:
            self.began = self.began or any(rank is not None for rank in observation.ranks)
            if math.isfinite(observation.loss):
                self.losses.append(float(observation.loss))
            if not observation.disturbed:
                self._add_times(observation)
        if observation.iteration % self.window:
            return []
        findings = []
        for name, judge in (
            ("diverging", self._diverging),
            ("no_speedup", self._no_speedup),
            ("out_of_step", self._out_of_step),
        ):
            verdict = judge()
            if verdict is None:
                continue
            self.streaks[name] = self.streaks[name] + 1 if verdict else 0
            if verdict and self.streaks[name] >= IN_A_ROW:
                findings.append(Finding(name, observation.iteration, self.streaks[name], *verdict))
        self.losses, self.times, self.deviations = [], [], []
        return findings

    def _add_times(self, observation: Observation) -> None:
        parts = (
            [observation.exposed]
            if self.overlapped
            else [observation.compress, observation.communicate, observation.decompress]
        )
        times = [float(sum(stage)) for stage in zip(*parts, strict=True)]
        if not all(map(math.isfinite, times)):
            return
        self.times.append(times)
        self.saves = 1 - observation.bytes / observation.bytes_dense if observation.bytes_dense else 0.0
        known = len(observation.predicted) > 1 and all(0 < seconds < math.inf for seconds in observation.predicted)
        if known and not self.overlapped and any(rank is not None for rank in observation.ranks):
            self.deviations.append([a - b for a, b in zip(times, observation.predicted, strict=True)])
            self.predicted = max(observation.predicted)

    def _diverging(self) -> _Verdict:
        losses = self.losses
        if len(losses) < FEWEST:
            return None
        middle = median(losses)
        # The median difference of two independent normal values is 0.954 standard deviations of one. Differences of
        # neighbours do not see the trend.
        self.scatter.append(median(abs(b - a) for a, b in itertools.pairwise(losses)) / 0.954)
        # A run that diverges scatters more than it did: its own earlier windows are the measure.
        sigma = median(self.scatter[: max(1, len(self.scatter) - IN_A_ROW)])
        best, self.best = self.best, min(self.best, middle)
        excess = middle - best
        if not self.began or not excess > max(LOSS_SIGMAS * sigma, LOSS_SHARE * abs(best)):
            return ()
        ranks = "/".join("dense" if rank is None else str(rank) for rank in self.ranks)
        return {"loss": middle, "best_loss": best, "loss_sigma": sigma}, (
            f"perplexity diverges under compression: {_perplexity(middle)} after a best of {_perplexity(best)} "
            f"(medians of {len(losses)} iterations; {excess:.3g} nats are {excess / max(sigma, 1e-12):.3g} standard "
            f"deviations), rank {ranks}"
        )

    def _no_speedup(self) -> _Verdict:
        if len(self.times) < FEWEST:
            return None
        if all(rank is None for rank in self.ranks):
            self.warm_up.append(max(map(median, zip(*self.times, strict=True))))
            return ()
        dense = median(self.warm_up) if self.warm_up else self.uncompressed
        if not math.isfinite(dense):
            return None
        slowest = [max(times) for times in self.times]
        quartile, middle = quantiles(slowest, n=4)[0], median(slowest)
        if not (self.saves > 0 and quartile > dense):
            return ()
        action = "waiting for gradients" if self.overlapped else "a reduction"
        return {"seconds": middle, "seconds_uncompressed": dense, "bytes_saved": self.saves}, (
            f"no speed-up: {100 * self.saves:.0f} % of the bytes are saved, but {action} takes {_ms(middle)} "
            f"against {_ms(dense)} uncompressed (slowest stage), longer in three of four iterations"
        )

    def _out_of_step(self) -> _Verdict:
        if len(self.deviations) < FEWEST:
            return None
        stages = list(zip(*self.deviations, strict=True))
        middles = [median(stage) for stage in stages]
        late, early = middles.index(max(middles)), middles.index(min(middles))
        spread = middles[late] - middles[early]
        error = max(_standard_error(stages[late]), _standard_error(stages[early]))
        last, self.pair = self.pair, [late, early]
        if not spread > max(STEP_SHARE * self.predicted, STEP_ERRORS * error):
            self.pair = []
            return ()
        if last and last != self.pair:
            self.streaks["out_of_step"] = 0
        numbers: dict[str, float | int] = {"stage_late": late, "stage_early": early}
        numbers |= {"seconds_late": middles[late], "seconds_early": middles[early], "seconds_predicted": self.predicted}
        return numbers, (
            f"stages finish out of step: against the fitted T(r) stage {late} is {_ms(middles[late])} and stage "
            f"{early} {_ms(middles[early])} off, {100 * spread / self.predicted:.0f} % of the longest prediction apart"
        )

    def state_dict(self) -> dict[str, Any]:
        """State in JSON's types: a number that is not finite is None."""
        state = {item.name: getattr(self, item.name) for item in fields(self)[2:]}
        return dict(plain(state))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict` of a watch of the same run."""
        for name, value in plain(state).items():  # a copy
            if value is not None:
                setattr(self, name, value)


# Numbers and words; empty if all is well; None if there is too little to judge by.
_Verdict = tuple[dict[str, float | int], str] | tuple[()] | None


def _standard_error(values: Sequence[float]) -> float:
    """Standard error of the median of values with a normal core, from their median absolute deviation."""
    middle = median(values)
    return 1.2533 * 1.4826 * median(abs(value - middle) for value in values) / math.sqrt(len(values))


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.4g}" if loss < 700 else f"exp({loss:.4g})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
