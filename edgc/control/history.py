"""What the windows of a run have said so far, which policies compare the last one with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass
class Means:
    """Of one quantity, window by window; None where a window has none.

    Attributes:
        first: of the first two windows that have one.
        previous, now: of the last two windows.
    """

    first: list[float] = field(default_factory=list)
    previous: float | None = None
    now: float | None = None

    def add(self, mean: float | None) -> None:
        self.previous, self.now = self.now, mean
        if mean is not None and len(self.first) < 2:
            self.first.append(mean)


@dataclass
class History:
    """Window means of stage 0's entropy and of the training loss.

    Attributes:
        reference: rank and entropy of stage 0 when warm-up ended; None before, and if no entropy was measured then.
    """

    entropy: Means = field(default_factory=Means)
    loss: Means = field(default_factory=Means)
    reference: tuple[int, float] | None = None

    def state_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return asdict(self) | {"reference": list(self.reference) if self.reference else None}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        reference = tuple(state["reference"]) if state["reference"] else None
        return cls(Means(**state["entropy"]), Means(**state["loss"]), reference)
