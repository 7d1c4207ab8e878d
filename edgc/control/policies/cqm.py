"""Policy of the paper: the rank that keeps the error of the end of warm-up, by the entropy since then (CQM)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgc.checks import number
from edgc.control.policies.base import History, MeansPolicy, Move, WindowEnd
from edgc.control.rank_model import next_rank
from edgc.control.settings import SteppedConfig
from edgc.errors import UserError


class CQM(MeansPolicy):
    """Follows entropy by :func:`edgc.control.rank_model.next_rank`."""

    config: CQMConfig

    def __init__(self, config: CQMConfig, *run: Any) -> None:
        super().__init__(config, *run)
        self._moved_at: tuple[float, float] | None = None  # entropy when the rank last moved, and its standard error

    def target(self, now: float, end: WindowEnd) -> Move:
        assert end.history.reference is not None
        reference_rank, reference, reference_error = end.history.reference
        error, hysteresis = end.history.entropy.error or 0.0, self.config.hysteresis
        noise = math.hypot(error, reference_error)
        rank, low, high = (
            next_rank(self.model, reference_rank, reference, now + shift) for shift in (0.0, -noise, noise)
        )
        why = f"entropy {now - reference:+.4f} nats from the reference asks for rank {rank:.1f}"
        if noise:
            why += f" ({low:.1f} to {high:.1f} within a standard error of {noise:.4f})"
        if hysteresis:
            moved_at, moved_error = self._moved_at or (reference, reference_error)
            least = hysteresis * math.hypot(error, moved_error)
            if abs(now - moved_at) <= least:
                return Move(None, f"{why}; {now - moved_at:+.4f} nats since it last moved is within {least:.4f}")
            self._moved_at = now, error
        return Move(None, why, rank, low, high)

    def state_dict(self) -> dict[str, Any]:
        return {"moved_at": list(self._moved_at) if self._moved_at else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._moved_at = tuple(state["moved_at"]) if state["moved_at"] else None

    def go_on(self, iteration: int, rank: int, history: History, r_min: int, r_max: int) -> int:
        if history.reference is None:
            fix = "choose the policy that the run was started with"
            raise UserError("policy cqm needs an entropy at the end of warm-up, which the state lacks", fix=fix)
        return super().go_on(iteration, rank, history, r_min, r_max)


@dataclass(frozen=True, kw_only=True)
class CQMConfig(SteppedConfig):
    """EDGC as the paper has it (section on CQM).

    The ranks of a whole run hang on one number, the entropy at the end of warm-up, and on small differences from it: at
    the shapes of the paper's 12.1-billion model a fall of 0.03 nats, a window's noise, takes rank 64 to its lower limit
    of 16. So every decision says which ranks it would have asked for one standard error away.

    Attributes:
        hysteresis: the rank moves only when the entropy has changed by more than so many standard errors since it last
            moved; 0, as in the paper: at every window's end (ours).
    """

    rule = CQM
    policy: str = "cqm"
    hysteresis: float = 0.0

    def _check(self) -> None:
        super()._check()
        number("hysteresis", self.hysteresis, 0)
