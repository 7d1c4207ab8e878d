"""What the studies of gradients have in common: something that watches them and leaves a table of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from edgc.compressors import Gradient
from edgc.config import EDGCConfig
from edgc.engine import Observer
from experiments.spec.settings import ProbeConfig


class Recorder(ABC):
    """Watches the local gradients of one rank.

    Args:
        config: at which iterations, and what.
        edgc: settings of the run.
        stage: pipeline stage of this rank.
        reports: whether this rank describes its replica.

    Attributes:
        file: name of the table in the run folder.
        keys: columns that the table is sorted by.
        rows: what this rank has recorded.
    """

    file: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]

    def __init__(self, config: ProbeConfig, edgc: EDGCConfig, stage: int, *, reports: bool) -> None:
        self.config, self.edgc, self.stage, self.reports = config, edgc, stage, reports
        self.rows: list[dict[str, Any]] = []

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
