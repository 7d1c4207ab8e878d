"""Settings of method ``edgc``: what all of its policies have. A policy adds its own (``edgc/control/policies``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from edgc.checks import number, one_of, require
from edgc.compressors.entrywise.quantize import Quantize, QuantizeConfig
from edgc.compressors.powersgd import LowRankConfig
from edgc.config import Look
from edgc.errors import UserError

if TYPE_CHECKING:
    from edgc.compressors.base import KeepsErrors
    from edgc.control.policies.base import Policy
    from edgc.control.rank_model import StageModel

Schedule = tuple[tuple[float, int], ...]


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(LowRankConfig):
    """EDGC: PowerSGD under the controller.

    Attributes:
        policy: by what the rank of stage 0 moves at the end of a window.
        r_max: upper rank; None searches it by timing during warm-up (paper, DAC).
        rank_multiple: ranks are multiples of this. Paper: 4.
        warmup_fraction: share of the iterations without compression, at least. Paper: 0.1.
        warmup_bits: of an entry during warm-up, 8 or 4 with error feedback, which compression then takes over; None:
            uncompressed, as in the paper (ours: an uncompressed tenth of the run is most of what EDGC sends).
        warmup_limit_fraction: share after which compression starts even if the entropy is not stable (ours).
        stability_tolerance: entropy counts as stable when two consecutive window means differ by at most this
            many nats (ours; the paper gives no number).
        search_start, search_repeats: first iteration of the r_max search, timings per rank. Code: 10 and 2.
        alignment: DAC: ``off``, or by ``measured`` times.
        remeasure_above: where times were measured (``alignment: measured``, or r_max searched), measure them again
            while training goes on when reductions took another time than predicted over a window, by more than
            this share; None: never (ours; the paper leaves congestion open).
    """

    method: str = "edgc"
    policy: str = ""
    r_max: int | None = None
    rank_multiple: int = 4
    warmup_fraction: float = 0.1
    warmup_bits: int | None = None
    warmup_limit_fraction: float = 0.5
    stability_tolerance: float = 0.1
    search_start: int = 10
    search_repeats: int = 2
    alignment: str = "off"
    remeasure_above: float | None = 0.2

    look = Look("EDGC", "#D55E00", "D")
    rule: ClassVar[type[Policy]]
    """Class of the policy."""
    gives_ranks: ClassVar[bool] = False
    """True if the settings give the ranks of stage 0, so that no entropy and no search is needed for them."""

    def _check(self) -> None:
        super()._check()
        for key in ("rank_multiple", "search_start", "search_repeats"):
            self._whole(key, 1)
        self._whole("r_max", 1, optional=True)
        number("warmup_fraction", self.warmup_fraction, 0, 1)
        number("warmup_limit_fraction", self.warmup_limit_fraction, 0, 1)
        limit, fix = self.warmup_limit_fraction, f"use at least warmup_fraction = {self.warmup_fraction}"
        require(limit >= self.warmup_fraction, "warmup_limit_fraction", limit, fix)
        self._whole("warmup_bits", 1, optional=True)
        require(self.warmup_bits in (8, 4, None), "warmup_bits", self.warmup_bits, "use 8, 4 or null")
        number("stability_tolerance", self.stability_tolerance, 0, open_low=True)
        one_of("alignment", self.alignment, ("off", "measured"))
        if self.remeasure_above is not None:
            number("remeasure_above", self.remeasure_above, 0, open_low=True)

    @classmethod
    def idle(cls, values: Mapping[str, Any]) -> dict[str, str]:
        unused = super().idle(values)
        if values["alignment"] != "measured" and (cls.gives_ranks or values["r_max"] is not None):
            fix = "have times measured, with alignment: measured" + ("" if cls.gives_ranks else " or without r_max")
            unused |= dict.fromkeys(("search_start", "search_repeats"), fix)
        return unused

    def build_warm_up(self) -> KeepsErrors | None:
        if self.warmup_bits is None:
            return None
        config = QuantizeConfig(
            bits=self.warmup_bits,
            min_compression_elements=self.min_compression_elements,
            error_feedback=self.error_feedback,
            seed=self.seed,
        )
        return Quantize(config)

    def upper_rank(self, limit: int) -> int | None:
        """r_max before anything was timed, for a first stage that saves bytes up to rank ``limit``; None: search it."""
        return self.r_max

    def lower_rank(self, r_max: int) -> int:
        """r_min for an upper rank ``r_max``."""
        raise NotImplementedError

    def clamped(self, rank: int, r_min: int, r_max: int) -> int:
        """``rank`` within limits that have changed."""
        return min(r_max, max(r_min, rank))

    def warm_up_ends(
        self, iterations: int, iteration: int, previous: float | None, entropy: float | None, *, measuring: bool
    ) -> tuple[bool, str]:
        """Decide whether warm-up ends with the window that ``iteration`` closes, and why or why not.

        Args:
            iterations: length of the run.
            previous, entropy: stage 0's in the window before and in this one, nats; None if it was not measured.
            measuring: whether times are still being measured, which warm-up waits for.
        """
        # Rounded: 0.1 * 30 is above 3 in floating point.
        least, most = (round(f * iterations, 6) for f in (self.warmup_fraction, self.warmup_limit_fraction))
        if iteration + 1 <= least:
            return False, "before warmup_fraction"
        if measuring:
            return False, "the search of r_max is not finished"
        if entropy is None and not self.gives_ranks:
            return False, "no entropy was measured in this window"
        change = abs(entropy - previous) if entropy is not None and previous is not None else math.inf
        if change <= self.stability_tolerance:
            return True, f"entropy stable within {change:.4f} nats"
        if iteration + 1 > most:
            return True, "warmup_limit_fraction reached"
        return False, "entropy is not stable yet"

    def check_run(self, model: StageModel, iterations: int) -> None:
        """Refuse settings that cannot work with a model and a length of run.

        Args:
            model: of the first stage's errors.

        Raises:
            UserError: no complete window, windows without an entropy where the policy needs one, a rank that could
                never move, or limits that the model is too small for.
        """
        if self.window >= iterations:
            what = f"window = {self.window} leaves nothing to compress in {iterations} iterations"
            raise UserError(what, fix="choose a shorter window or method: none")


@dataclass(frozen=True, kw_only=True)
class SteppedConfig(PolicyConfig):
    """Policies that move the rank in steps between two limits.

    Attributes:
        r_min: lower rank; None means r_max/4 (paper: between r_max/4 and r_max/6).
        step_limit: s, largest change of the rank per window. Paper: 8.
    """

    r_min: int | None = None
    step_limit: int = 8

    def _check(self) -> None:
        super()._check()
        self._whole("step_limit", 1)
        self._whole("r_min", 1, optional=True)
        if self.r_max is not None and self.r_min is not None:
            fix = f"choose r_min at most r_max = {self.r_max}"
            require(self.r_min <= self.r_max, "r_min", self.r_min, fix)
        for key in ("r_max", "r_min"):
            multiple = (getattr(self, key) or 0) % self.rank_multiple == 0
            require(multiple, key, getattr(self, key), f"use a multiple of {self.rank_multiple}")

    def lower_rank(self, r_max: int) -> int:
        """r_min for an upper rank ``r_max``: the configured one, or r_max/4 in whole multiples, at least one."""
        if self.r_min is not None:
            return min(self.r_min, r_max)
        return min(r_max, max(self.rank_multiple, r_max // 4 // self.rank_multiple * self.rank_multiple))

    def step(self, current: int, target: float, r_min: int, r_max: int) -> int:
        """The rank after one window, at most ``step_limit`` away from ``current``.

        ``target`` (finite) is rounded to the nearest multiple, half up, and clamped to [r_min, r_max]. ``current``,
        ``r_min`` and ``r_max`` are multiples of ``rank_multiple``, and so is the answer.
        """
        nearest = math.floor(target / self.rank_multiple + 0.5) * self.rank_multiple
        reach = self.step_limit // self.rank_multiple * self.rank_multiple
        return min(max(nearest, current - reach, r_min), current + reach, r_max)

    def check_run(self, model: StageModel, iterations: int) -> None:
        super().check_run(model, iterations)
        rate = self.entropy.iteration_rate
        if round(self.window * rate, 9) < 1:
            what = f"window = {self.window} is shorter than 1 / entropy.iteration_rate = {1 / rate:.4g} iterations"
            least = math.ceil(round(1 / rate, 9))
            fix = f"some windows would have no entropy; use a window of at least {least}, or a higher rate"
            raise UserError(what, fix=fix)
        if self.step_limit < self.rank_multiple:
            what = f"step_limit = {self.step_limit} is below rank_multiple: no rank could ever move"
            raise UserError(what, fix=f"use a step_limit of at least {self.rank_multiple}")
        if self.r_max is not None and self.r_max >= model.max_rank:
            what = f"r_max = {self.r_max} is not below the largest rank of the first stage"
            raise UserError(what, fix=f"use an r_max below {model.max_rank}")


@dataclass(frozen=True, kw_only=True)
class GivenConfig(PolicyConfig):
    """Policies that are given the ranks of stage 0; only other stages may rise above them, as alignment says."""

    gives_ranks = True

    @property
    def table(self) -> Schedule:
        """Ranks of stage 0, each with the share of the run from which on it has it."""
        raise NotImplementedError

    @property
    def ranks_given(self) -> tuple[int, ...]:
        """Ranks that stage 0 has in the course of a run."""
        return tuple(rank for _, rank in self.table)

    def upper_rank(self, limit: int) -> int:
        return self.r_max or max(limit, *self.ranks_given)

    def lower_rank(self, r_max: int) -> int:
        return min(self.ranks_given)

    def clamped(self, rank: int, r_min: int, r_max: int) -> int:
        return rank

    def check_run(self, model: StageModel, iterations: int) -> None:
        super().check_run(model, iterations)
        highest = max(self.ranks_given)
        if self.r_max is not None and self.r_max < highest:
            fix = f"use a rank of at most {self.r_max}"
            raise UserError(f"{self.policy}: rank = {highest} is above r_max", fix=fix)
