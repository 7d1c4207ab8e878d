"""What a policy remembers from window to window, and what it makes of a window's end.

Stage 0 moves by the policy; the other stages follow by alignment. Under ``spectral`` without alignment each stage moves
by its own spectra. Plain arithmetic, as the controller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from edgc.config import EDGCConfig
from edgc.control import policies
from edgc.control.policies import Ranks
from edgc.control.rank_model import StageModel
from edgc.errors import UserError
from edgc.measurement.spectral import Curve, SmoothedCurves


class Move(NamedTuple):
    """What a window's end makes of the ranks.

    Attributes:
        ranks: after it; None: they stay.
        target: what the policy asked for on stage 0 before rounding and limits; None where it asks for no rank.
    """

    ranks: Ranks | None
    reason: str
    target: float | None = None


class Following:
    """The policy of one run.

    Args:
        config: settings of method ``edgc``.
        model: of the errors of the first stage.
        stages: number of pipeline stages.
        iterations: length of the run.

    Attributes:
        curves: smoothed error curves of the stages; None unless the policy uses them.
    """

    def __init__(self, config: EDGCConfig, model: StageModel, stages: int, iterations: int) -> None:
        self.config, self.stages, self.iterations = config, stages, iterations
        self.curves: SmoothedCurves | None = None
        self._model = model
        self._reference: tuple[int, float] | None = None  # rank and entropy of stage 0 at the end of warm-up
        self._first: list[float] = []  # what is followed in the first two windows
        self._previous: float | None = None  # and in the last one
        self._now: float | None = None
        self.forget_curves()

    def forget_curves(self) -> None:
        """Begin anew with them: they have a point for every rank up to r_max, which has changed."""
        if self.config.policy == "spectral":
            self.curves = SmoothedCurves(self.stages, self.config.smoothing)

    def require_loss(self, iteration: int, loss: float) -> None:
        """Under policy ``loss``, see that one was told by the end of the first window in which there could be one.

        Args:
            iteration: ends the window. That of iteration 1 ends before its loss can be told.
            loss: as in :class:`edgc.control.plan.Report`.

        Raises:
            UserError: none was.
        """
        if self.config.policy == "loss" and iteration > 1 and not self._first and math.isnan(loss):
            what = f"policy loss was not told a training loss in the first {iteration} iterations"
            raise UserError(what, fix="call add_loss(loss) after every backward, on at least one rank")

    def take(self, entropy: float | None, loss: float | None) -> None:
        """Take in a window's mean of stage 0's entropy and of the training loss (None: not measured)."""
        self._previous, self._now = self._now, loss if self.config.policy == "loss" else entropy
        if self._now is not None and len(self._first) < 2:
            self._first.append(self._now)

    def begin(self, iteration: int, r_max: int, entropy: float | None) -> int:
        """The rank of stage 0 after warm-up, which ``iteration`` ends; what is measured there is the reference."""
        rank = r_max
        if self.config.policy == "fixed":
            assert self.config.rank is not None
            rank = self.config.rank
        elif self.config.policy == "schedule":
            rank = policies.scheduled(self.config.schedule, iteration, self.iterations)
        if entropy is not None:
            self._reference = (rank, entropy)
        return rank

    def move(
        self,
        iteration: int,
        ranks: Ranks,
        curves: Sequence[Curve | None] | None,
        grid: Sequence[int],
        r_min: int,
        r_max: int,
    ) -> Move:
        """What the window that ``iteration`` ends makes of ``ranks``, those of stage 0 or of all stages.

        Args:
            curves: error curves of the stages over ``grid``; None where nothing was measured.
        """
        config = self.config
        if config.policy == "fixed":
            return Move(None, "fixed rank")
        if self.curves is not None:
            smoothed = self.curves.update(curves or (None,) * self.stages)
            return Move(*policies.by_spectra(config, ranks, smoothed, grid, r_min, r_max))
        old = ranks[0]
        assert old is not None
        if config.policy == "schedule":
            new = policies.scheduled(config.schedule, iteration, self.iterations)
            return Move((new,), f"schedule; rank {old} -> {new}")
        if self._now is None:
            what = "loss" if config.policy == "loss" else "entropy"
            return Move(None, f"no {what} was measured in this window; ranks unchanged")
        if config.policy == "cqm":
            assert self._reference is not None
            target = policies.cqm(self._model, *self._reference, self._now)
        else:
            first, second = self._first if len(self._first) == 2 else (None, None)
            target = policies.by_change(config.policy, r_min, r_max, first, second, self._previous, self._now)
        if target.rank is None:
            return Move(None, f"{target.reason}; ranks unchanged")
        new = policies.step(old, target.rank, r_min, r_max, config.rank_multiple, config.step_limit)
        return Move((new,), f"{target.reason}; rank {old} -> {new}", target.rank)

    def state_dict(self) -> dict[str, Any]:
        """What the next decisions depend on, in JSON's types."""
        return {
            "reference": list(self._reference) if self._reference else None,
            "first": list(self._first),
            "now": self._now,
            "curves": self.curves.state_dict() if self.curves else None,
        }

    def fits(self, state: Mapping[str, Any] | None) -> bool:
        """Whether ``state`` is of a policy that remembers the same."""
        return state is not None and (state["curves"] is None) == (self.curves is None)

    @property
    def lacks_reference(self) -> bool:
        """Whether the policy compares with an entropy that was not measured at the end of warm-up."""
        return self.config.policy == "cqm" and self._reference is None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`; of other settings what both remember is taken over."""
        reference = state["reference"]
        self._reference = (int(reference[0]), float(reference[1])) if reference else None
        self._first, self._now = [float(value) for value in state["first"]], state["now"]
        if self.curves is not None and state["curves"] is not None:
            self.curves.load_state_dict(state["curves"])
