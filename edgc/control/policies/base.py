"""Contract of policies: the rank of stage 0 after warm-up, and the ranks that follow from the end of a window.

Plain arithmetic: equal numbers give equal answers, so all ranks of a job decide alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

from edgc.control.rank_model import StageModel
from edgc.control.settings import PolicyConfig, SteppedConfig
from edgc.measurement.spectral import Curve

Ranks = tuple[int | None, ...]
"""One per stage; None: uncompressed."""


@dataclass
class Means:
    """Means of one quantity, window by window; None where a window has none.

    Attributes:
        first: of the first two windows that have one.
        previous, now: of the last two windows.
        error: standard error of ``now``; None where it is not known.
    """

    first: list[float] = field(default_factory=list)
    previous: float | None = None
    now: float | None = None
    error: float | None = None

    def add(self, mean: float | None, error: float | None = None) -> None:
        self.previous, self.now, self.error = self.now, mean, error
        if mean is not None and len(self.first) < 2:
            self.first.append(mean)


@dataclass
class History:
    """Window means of stage 0's entropy and of the training loss.

    Attributes:
        reference: rank and entropy of stage 0 when warm-up ended, and the entropy's standard error (0: not known);
            None before, and if no entropy was measured then.
    """

    entropy: Means = field(default_factory=Means)
    loss: Means = field(default_factory=Means)
    reference: tuple[int, float, float] | None = None

    def anchor(self, rank: int) -> None:
        """Set the reference to ``rank`` and the entropy of the window that ends warm-up."""
        if self.entropy.now is not None:
            self.reference = rank, self.entropy.now, self.entropy.error or 0.0

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """History of its fields in JSON's types."""
        reference = tuple(state["reference"]) if state["reference"] else None
        entropy, loss = (Means(**{**state[kind], "first": list(state[kind]["first"])}) for kind in ("entropy", "loss"))
        return cls(entropy, loss, reference)

    def state_dict(self) -> dict[str, Any]:
        """Fields in JSON's types."""
        return asdict(self) | {"reference": list(self.reference) if self.reference else None}


@dataclass(frozen=True)
class WindowEnd:
    """End of a window after warm-up, as a policy sees it.

    Attributes:
        iteration: the last one of the window.
        ranks: of all stages where each moves on its own (no alignment), else of stage 0 alone.
        r_min, r_max: limits of the rank.
        history: of all windows, this one included.
        curves: error curves of the stages over ``grid``; None where nothing was measured.
    """

    iteration: int
    ranks: Ranks
    r_min: int
    r_max: int
    history: History
    curves: Sequence[Curve | None] | None = None
    grid: Sequence[int] = ()


class Move(NamedTuple):
    """Ranks after the end of a window.

    Attributes:
        ranks: of as many stages as were given or of stage 0 alone; None: they stay.
        target: rank that the policy asked for on stage 0 before rounding and limits; None where it asks for none.
        low, high: targets one standard error away; None where that is not known.
    """

    ranks: Ranks | None
    reason: str
    target: float | None = None
    low: float | None = None
    high: float | None = None


class Policy(ABC):
    """Rule of one run.

    Args:
        model: of the first stage's errors.
        stages: number of stages.
        iterations: length of the run.

    Attributes:
        uses_curves: whether reports are to have error curves.
    """

    uses_curves: ClassVar[bool] = False

    def __init__(self, config: PolicyConfig, model: StageModel, stages: int, iterations: int) -> None:
        self.config, self.model, self.stages, self.iterations = config, model, stages, iterations

    def begin(self, iteration: int, r_max: int) -> int:
        """Rank of stage 0 after warm-up, which ``iteration`` ends."""
        return r_max

    @abstractmethod
    def move(self, end: WindowEnd) -> Move:
        """Ranks after the end of a window."""

    def check_loss(self, iteration: int, loss: float, history: History) -> None:  # noqa: B027  (most need none)
        """Refuse to go on without a loss, if the policy follows it.

        Args:
            loss: as in :class:`edgc.measurement.report.Report`.

        Raises:
            UserError: no rank was told any.
        """

    def go_on(self, iteration: int, rank: int, history: History, r_min: int, r_max: int) -> int:
        """Rank of stage 0 to go on with from a state of other settings, in which it had ``rank``.

        Args:
            iteration: the last one of the last window.

        Raises:
            UserError: ``history`` lacks what the policy compares with.
        """
        multiple = self.config.rank_multiple
        return self.config.clamped(rank // multiple * multiple, r_min, r_max)

    def state_dict(self) -> dict[str, Any]:
        """State beside the history that the next moves depend on, in JSON's types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  (most keep nothing)
        """Go on from :meth:`state_dict`."""


class MeansPolicy(Policy):
    """Moves stage 0 towards a target that follows from window means.

    Attributes:
        follows: whose means: ``entropy`` or ``loss``.
    """

    config: SteppedConfig
    follows: ClassVar[str] = "entropy"

    @abstractmethod
    def target(self, now: float, end: WindowEnd) -> Move:
        """Target by the mean of the window that has ended, without ranks yet; no target: ranks stay."""

    def means(self, history: History) -> Means:
        return getattr(history, self.follows)

    def move(self, end: WindowEnd) -> Move:
        now, old = self.means(end.history).now, end.ranks[0]
        assert old is not None
        if now is None:
            return Move(None, f"no {self.follows} was measured in this window; ranks unchanged")
        move = self.target(now, end)
        if move.target is None:
            return move._replace(reason=f"{move.reason}; ranks unchanged")
        new = self.config.step(old, move.target, end.r_min, end.r_max)
        return move._replace(ranks=(new,), reason=f"{move.reason}; rank {old} -> {new}")
