"""Ranks of single matrices: a stage's bytes given to the matrices where they lower the predicted error most.

Ours; an option of policy ``spectral`` (``per_layer``). The policy sets a stage's common rank; these ranks send no more
bytes than it would.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from edgc.measurement.report import mean_curve
from edgc.measurement.spectral import Curve, MatrixSpectrum


def allocate(
    curves: Mapping[str, Curve], sides: Mapping[str, int], ranks: Sequence[int], common: int
) -> dict[str, int]:
    """Ranks by name, each of ``ranks``, with a small sum of errors whose factors are no larger than at ``common``.

    Rank by rank to the matrix that gains most per byte, as long as it gains anything and the bytes last. With convex
    curves, which those of singular values are, that is the smallest sum where all matrices have equal sides, and else
    at most the gain of one step above it.

    Args:
        curves: per matrix its squared error at each of ``ranks``, never rising.
        sides: rows plus columns of each matrix: the entries of its factors per rank.
        ranks: ascending, the first at most ``common``.
    """
    budget = (common - ranks[0]) * sum(sides[name] for name in curves)
    places = dict.fromkeys(curves, 0)

    def bid(name: str) -> tuple[float, str, int]:
        place = places[name]
        cost = (ranks[place + 1] - ranks[place]) * sides[name]
        return -(curves[name][place] - curves[name][place + 1]) / cost, name, cost

    bids = [bid(name) for name in curves] if len(ranks) > 1 else []
    heapq.heapify(bids)
    while bids:
        gain, name, cost = heapq.heappop(bids)
        if cost > budget or gain == 0:
            continue
        budget -= cost
        places[name] += 1
        if places[name] + 1 < len(ranks):
            heapq.heappush(bids, bid(name))
    return {name: ranks[place] for name, place in places.items()}


class LayerRanks:
    """Ranks decided at the end of the last window, by the error curves of the mean of every matrix in it.

    Attributes:
        ranks: by name, of the matrices that have one of their own.
        measured: of this rank's matrices in the window, for :meth:`decide`: error curve, and rows plus columns.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Give all matrices the common rank again."""
        self.ranks: dict[str, int] = {}
        self.measured: dict[str, tuple[Curve, int]] = {}

    def take(self, matrices: Mapping[str, MatrixSpectrum], ranks: Sequence[int]) -> None:
        """Take in the spectra of a window, before :meth:`decide`."""
        known = {name: matrix for name, matrix in matrices.items() if matrix.known}
        total = sum(matrix.input_sq for matrix in known.values())
        self.measured = {
            name: (tuple(error / total for error in matrix.errors_sq(ranks)), sum(matrix.shape))
            for name, matrix in known.items()
        }

    def decide(self, rows: Sequence[Mapping[str, tuple[Curve, int]]], common: int | None, ranks: Sequence[int]) -> None:
        """Share out the bytes of rank ``common`` (None: nothing is compressed) at the end of a window.

        Args:
            rows: :attr:`measured` of all ranks of this stage, in rank order; equal rows have equal outcomes.
        """
        by_name: dict[str, list[Curve]] = defaultdict(list)
        sides: dict[str, int] = {}
        for name, (curve, size) in (item for measured in rows for item in measured.items()):
            by_name[name].append(curve)
            sides[name] = size
        curves = {name: mean for name in sorted(by_name) if (mean := mean_curve(by_name[name])) is not None}
        if common is None or not ranks or common < ranks[0]:
            self.ranks = {}
        elif curves:
            self.ranks = allocate(curves, sides, ranks, common)
        self.measured = {}

    def state_dict(self) -> dict[str, Any]:
        return {"ranks": dict(self.ranks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ranks = dict(state["ranks"])
