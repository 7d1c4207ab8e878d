"""What the studies of gradients have in common: something that watches them and leaves a table of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from edgc.compressors import Gradient
from edgc.engine import Observer


class Recorder(Protocol):
    """Watches the local gradients of one rank.

    Attributes:
        file: name of the table in the run folder.
        keys: columns that the table is sorted by.
        rows: what this rank has recorded.
    """

    rows: list[dict[str, Any]]

    @property
    def file(self) -> str: ...

    @property
    def keys(self) -> tuple[str, ...]: ...

    def observe(self, iteration: int, gradients: Sequence[Gradient]) -> None:
        """Called with each bucket group's gradients, before they are reduced."""

    def end_iteration(self, iteration: int, skipped: bool) -> None:
        """Called on every rank after the reductions of an iteration, before the next one."""

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on after a whole iteration."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict` of the same rank."""


def observer_of(recorders: Sequence[Recorder]) -> Observer | None:
    """One observer for all; None where there is nothing to record."""

    def observe(iteration: int, gradients: Sequence[Gradient]) -> None:
        for recorder in recorders:
            recorder.observe(iteration, gradients)

    return observe if recorders else None
