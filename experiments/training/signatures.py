"""Names what goes wrong with compression while a run goes on: three failures and the numbers they are told by.

``diverging``: after compression began, the loss has left its best for good. ``no_speedup``: fewer bytes are sent, but
compressing and decompressing cost more than that saves. ``out_of_step``: the stages' reductions deviate from the
predicted T(r) by different amounts, so that what was to finish together does not.

Each is judged once a window by medians, against the scatter of the same window or run, and is reported from the second
window in a row on, so that noise alone hardly ever is. A skipped step is no evidence for anything, and neither are the
times of a step that was measured in (a benchmark disturbs it). Plain arithmetic on numbers that are equal on all ranks;
nothing here changes what a run does.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """What is known of one iteration; times in seconds, per pipeline stage, nan where not known.

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

    @property
    def reduction(self) -> tuple[float, ...]:
        """Seconds of the whole reduction, per stage."""
        return tuple(map(sum, zip(self.compress, self.communicate, self.decompress, strict=True)))


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
        """Whether the window before did not report it."""
        return self.windows == IN_A_ROW


class SignatureWatch:
    """Judges the windows of one run.

    Args:
        window: the controller's, in iterations; here a multiple of it that has at least ``SHORTEST_WINDOW``.
        overlapped: whether reductions overlap with backward. What counts is then the time that a step waited for
            gradients, and nothing is said of single stages: how much was hidden no prediction knows.
        uncompressed: seconds of a reduction without compression, slowest stage, where a measurement says so; the
            uncompressed windows of the run itself, its warm-up, go before.
    """

    _KEPT = (
        "_losses", "_times", "_deviations", "_predicted", "_saves", "_ranks", "_began", "_best", "_scatter",
        "_warm_up", "uncompressed", "_streaks", "_pair",
    )  # fmt: skip

    def __init__(self, window: int, *, overlapped: bool = False, uncompressed: float = math.nan) -> None:
        self.window = window * math.ceil(SHORTEST_WINDOW / window)
        self.overlapped, self.uncompressed = overlapped, uncompressed
        self._losses: list[float] = []
        self._times: list[list[float]] = []  # of every undisturbed iteration with the ranks in use, per stage
        self._deviations: list[list[float]] = []  # measured minus predicted
        self._predicted = 0.0  # the longest
        self._saves = 0.0  # share of the bytes that is not sent
        self._ranks: list[int | None] = []
        self._began = False
        self._best = math.inf
        self._scatter: list[float] = []  # of single losses, one a window
        self._warm_up: list[float] = []  # the slowest stage's median, one a window without compression
        self._streaks = dict.fromkeys(FIXES, 0)
        self._pair: list[int] = []  # the latest and the earliest stage of the window before

    def add(self, seen: Observation) -> list[Finding]:
        """Take in one iteration; findings at the end of a window, each signature at most once."""
        if list(seen.ranks) != self._ranks:
            self._ranks, self._times, self._deviations = list(seen.ranks), [], []
        if not seen.skipped:
            self._began = self._began or any(rank is not None for rank in seen.ranks)
            if math.isfinite(seen.loss):
                self._losses.append(float(seen.loss))
            if not seen.disturbed:
                self._add_times(seen)
        if seen.iteration % self.window:
            return []
        found = []
        for name, judged in (
            ("diverging", self._diverging(seen)),
            ("no_speedup", self._no_speedup()),
            ("out_of_step", self._out_of_step()),
        ):
            if judged is None:
                continue
            self._streaks[name] = self._streaks[name] + 1 if judged else 0
            if judged and self._streaks[name] >= IN_A_ROW:
                found.append(Finding(name, seen.iteration, self._streaks[name], *judged))
        self._losses, self._times, self._deviations = [], [], []
        return found

    def _add_times(self, seen: Observation) -> None:
        times = seen.exposed if self.overlapped else seen.reduction
        if not all(map(math.isfinite, times)):
            return
        self._times.append([float(seconds) for seconds in times])
        self._saves = 1 - seen.bytes / seen.bytes_dense if seen.bytes_dense else 0.0
        known = len(seen.predicted) > 1 and all(0 < seconds < math.inf for seconds in seen.predicted)
        if known and not self.overlapped and any(rank is not None for rank in seen.ranks):
            self._deviations.append([a - b for a, b in zip(times, seen.predicted, strict=True)])
            self._predicted = max(seen.predicted)

    def _diverging(self, seen: Observation) -> _Judged:
        losses = self._losses
        if len(losses) < FEWEST:
            return None
        middle = median(losses)
        steps = [abs(b - a) for a, b in itertools.pairwise(losses)]
        # The median difference of two independent normal values is 0.954 standard deviations of one. Differences of
        # neighbours do not see the trend.
        self._scatter.append(median(steps) / 0.954)
        # A run that diverges scatters more than it did: its own earlier windows are the measure.
        sigma = median(self._scatter[: max(1, len(self._scatter) - IN_A_ROW)])
        best, self._best = self._best, min(self._best, middle)
        over = middle - best
        if not self._began or not over > max(LOSS_SIGMAS * sigma, LOSS_SHARE * abs(best)):
            return ()
        numbers: dict[str, float | int] = {"loss": middle, "best_loss": best, "loss_sigma": sigma}
        ranks = "/".join("dense" if rank is None else str(rank) for rank in seen.ranks)
        text = (
            f"perplexity diverges under compression: {_perplexity(middle)} after a best of {_perplexity(best)} "
            f"(medians of {len(losses)} iterations; {over:.3g} nats are {over / max(sigma, 1e-12):.3g} standard "
            f"deviations), rank {ranks}"
        )
        return numbers, text

    def _no_speedup(self) -> _Judged:
        if len(self._times) < FEWEST:
            return None
        if all(rank is None for rank in self._ranks):
            self._warm_up.append(max(map(median, zip(*self._times, strict=True))))
            return ()
        dense = median(self._warm_up) if self._warm_up else self.uncompressed
        if not math.isfinite(dense):
            return None
        slowest = [max(times) for times in self._times]
        quartile, middle = quantiles(slowest, n=4)[0], median(slowest)
        if not (self._saves > 0 and quartile > dense):
            return ()
        what = "waiting for gradients" if self.overlapped else "a reduction"
        text = (
            f"no speed-up: {100 * self._saves:.0f} % of the bytes are saved, but {what} takes {_ms(middle)} "
            f"against {_ms(dense)} uncompressed (slowest stage), longer in three of four iterations"
        )
        numbers = {"seconds": middle, "seconds_uncompressed": dense, "bytes_saved": self._saves}
        return numbers, text

    def _out_of_step(self) -> _Judged:
        if len(self._deviations) < FEWEST:
            return None
        stages = list(zip(*self._deviations, strict=True))
        middles = [median(stage) for stage in stages]
        late, early = middles.index(max(middles)), middles.index(min(middles))
        spread = middles[late] - middles[early]
        error = max(_standard_error(stages[late]), _standard_error(stages[early]))
        before, self._pair = self._pair, [late, early]
        if not spread > max(STEP_SHARE * self._predicted, STEP_ERRORS * error):
            self._pair = []
            return ()
        if before and before != self._pair:
            self._streaks["out_of_step"] = 0
        numbers: dict[str, float | int] = {
            "stage_late": late,
            "stage_early": early,
            "seconds_late": middles[late],
            "seconds_early": middles[early],
            "seconds_predicted": self._predicted,
        }
        text = (
            f"stages finish out of step: against the fitted T(r) stage {late} is {_ms(middles[late])} and stage "
            f"{early} {_ms(middles[early])} off, {100 * spread / self._predicted:.0f} % of the longest prediction apart"
        )
        return numbers, text

    def state_dict(self) -> dict[str, Any]:
        """In JSON's types: what is not a finite number is None."""
        return dict(plain({name.removeprefix("_"): vars(self)[name] for name in self._KEPT}))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict` of a watch of the same run."""
        known = {key: value for key, value in state.items() if value is not None}
        state = {"best": math.inf, "uncompressed": math.nan, **known}
        vars(self).update({name: copy.deepcopy(state[name.removeprefix("_")]) for name in self._KEPT})


# Numbers and words; empty if all is well; None if there is too little to judge by.
_Judged = tuple[dict[str, float | int], str] | tuple[()] | None


def _standard_error(values: Sequence[float]) -> float:
    """Of the median of values with a normal core, from their median absolute deviation."""
    middle = median(values)
    return 1.2533 * 1.4826 * median(abs(value - middle) for value in values) / math.sqrt(len(values))


def _perplexity(loss: float) -> str:
    return f"{math.exp(loss):.4g}" if loss < 700 else f"exp({loss:.4g})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
