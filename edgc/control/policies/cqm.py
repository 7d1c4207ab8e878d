"""The paper's policy: the rank that keeps the error of the end of warm-up, by the entropy since then (CQM)."""

from __future__ import annotations

from dataclasses import dataclass

from edgc.control.policies.base import History, MeansPolicy, Target, WindowEnd
from edgc.control.rank_model import StageModel, next_rank
from edgc.control.settings import SteppedConfig
from edgc.errors import UserError


@dataclass(frozen=True, kw_only=True)
class CQMConfig(SteppedConfig):
    """EDGC as the paper has it (section on CQM)."""

    policy: str = "cqm"

    def start(self, model: StageModel, stages: int, iterations: int) -> CQM:
        return CQM(self, model)


class CQM(MeansPolicy):
    """Follows entropy by :func:`edgc.control.rank_model.next_rank`."""

    def __init__(self, config: CQMConfig, model: StageModel) -> None:
        super().__init__(config)
        self._model = model

    def target(self, now: float, end: WindowEnd) -> Target:
        assert end.history.reference is not None
        reference_rank, reference = end.history.reference
        rank = next_rank(self._model, reference_rank, reference, now)
        return Target(rank, f"entropy {now - reference:+.4f} nats from the reference asks for rank {rank:.1f}")

    def go_on(self, rank: int, history: History, r_min: int, r_max: int) -> int:
        if history.reference is None:
            fix = "choose the policy that the run was started with"
            raise UserError("policy cqm needs an entropy at the end of warm-up, which the state lacks", fix=fix)
        return super().go_on(rank, history, r_min, r_max)
