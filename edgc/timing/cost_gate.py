"""The cost gate: compress a group of gradients only where that was measured to be faster than sending it dense.

A group is what one call of :meth:`edgc.engine.Engine.exchange` reduces. On a schedule (:class:`GateSchedule`) every
rank times a compressed and a dense reduction of each of its groups on copies (:mod:`edgc.timing.benchmark`). The ranks
exchange these times, every rank averages them in the same order (:func:`verdicts`), and each follows the verdicts of
its own stage (:class:`CostGate`) until the next measurement. Plain arithmetic: no tensors, no process groups, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class GroupTimes(NamedTuple):
    """What one rank measured for one of its groups: seconds of compress + communicate + decompress.

    ``group`` starts with the name of the group's first gradient, which no other group of the rank has.
    """

    group: str
    compressed: float
    dense: float


@dataclass(frozen=True)
class GateVerdict:
    """The outcome for one group of one stage: mean seconds over the stage's ranks, and whether to compress."""

    stage: int
    group: str
    seconds_compressed: float
    seconds_dense: float
    compress: bool


def label(names: Sequence[str]) -> str:
    """How a group is called in verdicts and logs: its first name and how many follow."""
    return names[0] if len(names) == 1 else f"{names[0]} + {len(names) - 1} more"


def verdicts(rows: Sequence[tuple[int, Sequence[GroupTimes]]]) -> tuple[GateVerdict, ...]:
    """Compress exactly where the mean compressed time is below the mean dense time.

    Args:
        rows: per rank, in rank order, its stage and its measurements; times that are not finite do not count, and a
            group without any gets no verdict.

    Returns:
        Ordered by stage, then as the first rank of the stage met the groups. Equal rows give equal verdicts, bit for
        bit.
    """
    measured: dict[tuple[int, str], list[GroupTimes]] = {}
    for stage, times in rows:
        for item in times:
            measured.setdefault((stage, item.group), []).append(item)
    made = []
    for (stage, group), items in measured.items():
        good = [item for item in items if math.isfinite(item.compressed) and math.isfinite(item.dense)]
        if good:
            compressed = math.fsum(item.compressed for item in good) / len(good)
            dense = math.fsum(item.dense for item in good) / len(good)
            made.append(GateVerdict(stage, group, compressed, dense, compressed < dense))
    return tuple(sorted(made, key=lambda verdict: verdict.stage))


def summary(made: Sequence[GateVerdict]) -> str:
    """One line for a decision's reason; the verdicts themselves hold the times."""
    faster = sum(verdict.compress for verdict in made)
    return f"cost gate: compression is faster for {faster} of {len(made)} groups"


class GateSchedule:
    """When to measure: first as soon as something is compressed, then every ``interval`` iterations, and whenever the
    ranks have changed."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._last: tuple[int, tuple[int | None, ...]] | None = None

    def due(self, iteration: int, ranks: tuple[int | None, ...]) -> bool:
        """Whether an iteration that compresses at ``ranks`` (one per stage, None: dense) is to measure."""
        if all(rank is None for rank in ranks):
            return False
        return self._last is None or iteration - self._last[0] >= self.interval or ranks != self._last[1]

    def measured(self, iteration: int, ranks: tuple[int | None, ...]) -> None:
        """The measurement that was due at ``iteration`` has been made."""
        self._last = (iteration, ranks)

    def state_dict(self) -> list[Any] | None:
        """In JSON's types."""
        return None if self._last is None else [self._last[0], list(self._last[1])]

    def load_state_dict(self, state: Sequence[Any] | None) -> None:
        self._last = None if state is None else (int(state[0]), tuple(state[1]))


class CostGate:
    """The verdicts that one rank follows, kept per gradient.

    Per gradient and not per group, because groups may be cut anew: DDP rebuilds its buckets after the first iteration
    of every process. A group that was never measured as such does what holds for most of its entries, and is
    compressed where nothing is known.
    """

    def __init__(self) -> None:
        self._compress: dict[str, bool] = {}

    def compresses(self, sizes: Mapping[str, int]) -> bool:
        """Whether to compress the group of these gradients (name to number of entries)."""
        dense = sum(size for name, size in sizes.items() if not self._compress.get(name, True))
        return 2 * dense <= sum(sizes.values())

    def follow(self, made: Sequence[GateVerdict], groups: Mapping[str, Sequence[str]]) -> None:
        """Take over the verdicts of the own stage; ``groups`` are this rank's, by label. Others stay as they are."""
        for verdict in made:
            for name in groups.get(verdict.group, ()):
                self._compress[name] = verdict.compress

    def state_dict(self) -> dict[str, bool]:
        return dict(self._compress)

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        self._compress = dict(state)
