"""What the studies of gradients have in common: something that watches them and leaves a table of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from edgc.compressors import Gradient
from edgc.compressors.base import compressible
from edgc.config import EDGCConfig
from edgc.engine import Observer
from experiments.spec.settings import ProbeConfig

if TYPE_CHECKING:
    from experiments.training.experts import ExpertShare


class Recorder(ABC):
    """Watches the local gradients of one rank.

    Args:
        config: at which iterations, and what.
        edgc: settings of the run.
        stage: pipeline stage of this rank.
        reports: whether this rank describes its replica.
        experts: which of the model's experts this rank holds; None without expert parallelism.

    Attributes:
        file: name of the table in the run folder.
        keys: columns that the table is sorted by.
        rows: what this rank has recorded.
    """

    file: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]

    def __init__(
        self, config: ProbeConfig, edgc: EDGCConfig, stage: int, *, reports: bool, experts: ExpertShare | None = None
    ) -> None:
        self.config, self.edgc, self.stage, self.reports, self.experts = config, edgc, stage, reports, experts
        self.rows: list[dict[str, Any]] = []

    def matrices(self, gradients: Sequence[Gradient]) -> Iterator[tuple[str, Tensor]]:
        """The gradients that compression is meant for, by name."""
        for gradient in gradients:
            if compressible(gradient.tensor.shape, self.edgc.min_compression_elements):
                yield gradient.name, gradient.tensor.detach()

    def described(self, gradients: Sequence[Gradient]) -> Iterator[tuple[str, Tensor]]:
        """Those of them that this rank describes, each under the name that it has in the whole model."""
        for name, gradient in self.matrices(gradients):
            if self.experts is None or self.experts.describes(name):
                yield self.in_model(name), gradient

    def in_model(self, name: str) -> str:
        return name if self.experts is None else self.experts.in_model(name)

    @abstractmethod
    def observe(self, iteration: int, gradients: Sequence[Gradient]) -> None:
        """Called with each bucket group's gradients, before they are reduced."""

    @abstractmethod
    def end_iteration(self, iteration: int, skipped: bool) -> None:
        """Called on every rank after the reductions of an iteration, before the next one."""

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on after a whole iteration."""
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict` of the same rank."""
        self.rows = list(state["rows"])


def observer_of(recorders: Sequence[Recorder]) -> Observer | None:
    """One observer for all; None where there is nothing to record."""

    def observe(iteration: int, gradients: Sequence[Gradient]) -> None:
        for recorder in recorders:
            recorder.observe(iteration, gradients)

    return observe if recorders else None
