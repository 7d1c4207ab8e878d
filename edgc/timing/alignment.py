"""DAC: ranks per pipeline stage with which all stages finish communicating together (paper, section on DAC).

Under 1F1B stage i (0 = first) ends its backward pass ``i * t_b`` before stage 0, t_b the backward time of one
micro-batch, so it may communicate for ``T_0(r_0) + i * t_b``. With ``T_i(r) = slope * r + fixed``

    r_i = T_i^-1(T_0(r_0) + i * t_b)

floored to the rank multiple. The paper has one t_b, for its stages are equal. Where they are not, the last
micro-batch still has to go back through every stage before i, so the head start is the sum of *their* times,
``t_b[0] + ... + t_b[i-1]``; the last stage's own time, with the loss in it, gives nobody a head start.
The authors' public code takes the next multiple *above*, ``(r // 4 + 1) * 4``, which exceeds the time budget
even where r is a multiple already; we floor, so the budget holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

_SLACK = 1e-9
"""Relative; keeps T^-1(T(r)) = r from being floored to the next lower multiple by rounding."""


@dataclass(frozen=True)
class LinearTime:
    """Time of reducing one stage's gradients as a function of the rank, in seconds.

    Attributes:
        seconds_per_rank: slope, at least 0.
        seconds_fixed: what is paid at any rank.
        residual: root mean square error of the fit, as a share of the mean of the fitted times; 0 for given times.
    """

    seconds_per_rank: float
    seconds_fixed: float
    residual: float = 0.0

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> Self:
        """Least squares through (rank, seconds).

        A falling line (noise) becomes the horizontal mean, slope 0. The fixed part may come out below 0:
        times often grow faster than the rank does, and clamping it would bias the inverse.

        Args:
            points: of at least two different ranks.
        """
        ranks, seconds = [float(r) for r, _ in points], [float(t) for _, t in points]
        mean_rank, mean_time = math.fsum(ranks) / len(ranks), math.fsum(seconds) / len(ranks)
        spread = math.fsum((r - mean_rank) ** 2 for r in ranks)
        joint = math.fsum((r - mean_rank) * (t - mean_time) for r, t in zip(ranks, seconds, strict=True))
        slope = max(0.0, joint / spread)
        fixed = mean_time - slope * mean_rank
        squares = math.fsum((t - slope * r - fixed) ** 2 for r, t in zip(ranks, seconds, strict=True))
        residual = math.sqrt(squares / len(ranks))
        return cls(slope, fixed, residual / mean_time if mean_time > 0 else 0.0)

    def time(self, rank: float) -> float:
        """T(rank), seconds."""
        return self.seconds_per_rank * rank + self.seconds_fixed

    def rank(self, seconds: float) -> float:
        """Real rank that takes ``seconds``, where the slope is above 0; negative when even rank 0 takes longer."""
        return (seconds - self.seconds_fixed) / self.seconds_per_rank


def align(
    first_rank: int,
    stages: int,
    backward_seconds: Sequence[float],
    times: Sequence[LinearTime],
    uncompressed_seconds: Sequence[float],
    r_max: int,
    multiple: int = 4,
    r_min: int | None = None,
) -> tuple[int | None, ...]:
    """Ranks of all stages when stage 0 has ``first_rank``; None means that the stage sends uncompressed.

    A stage sends uncompressed where its time budget exceeds its uncompressed time (``inf`` where that is
    unknown), where the budget allows more than ``r_max``, or where the rank it would get is slower than no
    compression. Otherwise its rank is a multiple of ``multiple`` inside [r_min, r_max] (``r_min`` defaults to
    one multiple), and not below ``first_rank`` if the stage is as fast as stage 0. A stage whose time does not
    depend on the rank (slope 0: too noisy, or nothing to compress) takes ``first_rank``, as does stage 0
    itself, whatever its times are; with one stage this is the identity.

    Args:
        backward_seconds: t_b of every stage; the last one's is not used and may be anything.
    """
    low = multiple if r_min is None else r_min
    ranks: list[int | None] = [first_rank]
    for stage in range(1, stages):
        line, dense = times[stage], uncompressed_seconds[stage] * (1 + _SLACK)
        budget = times[0].time(first_rank) + math.fsum(backward_seconds[:stage])
        if budget > dense:
            ranks.append(None)
            continue
        rank = first_rank
        if line.seconds_per_rank > 0:
            real = line.rank(budget)
            slack = _SLACK * max(1.0, abs(budget) / line.seconds_per_rank)
            if real > r_max + slack:
                ranks.append(None)
                continue
            rank = math.floor((real + slack) / multiple) * multiple
            if line.time(first_rank) <= times[0].time(first_rank):
                rank = max(rank, first_rank)
            rank = min(r_max, max(low, rank))
        ranks.append(rank if line.time(rank) <= dense else None)
    return tuple(ranks)
