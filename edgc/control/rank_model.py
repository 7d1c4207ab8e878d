"""CQM, the compression quantification model: the error of a rank-r approximation of noise, and its inverse
(paper, section on CQM).

For an m x n matrix of iid N(0, sigma^2) entries the best rank-r approximation leaves the Frobenius error
``sigma * g(r)``. By the Marchenko-Pastur law ``g(r)^2 = m * n * T(1 - r/p)`` with ``p = min(m, n)`` and
``T(u)`` the share of the sum of squared singular values that the smallest ``u * p`` of them hold. With the
aspect ``s^2 = p / max(m, n)`` and eigenvalues written as ``x = 1 + s^2 - 2 s cos(phi)``, T and the share F of
the eigenvalues below x have closed forms:

    T(phi) = (2 phi - sin 2 phi) / (2 pi)
    F(phi) = (2 / pi) * integral of sin^2 / (1 + s^2 - 2 s cos) from 0 to phi

They are tabulated once per shape and interpolated linearly, which makes ``rank_for_error`` the exact inverse
of ``error``. The law is that of large matrices: within 1 % of simulation up to half of the full rank for
p >= 64, too high near full rank for square matrices (whose error is small there). Ranks are real numbers;
rounding is the controller's business. Plain floats, no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

NODES = 2048
"""Cells of the table. Interpolation errs by less than 2e-5 of g(0), 1e-6 for aspects up to 1/2 (tested)."""


def _eigenvalue_share(phi: float, s: float) -> float:
    """F(phi): share of the eigenvalues below ``1 + s^2 - 2 s cos(phi)``, for the aspect ``s`` in (0, 1]."""
    if s < 0.1:
        # The closed form divides by s^2 and cancels; the integrand's Chebyshev series converges within a few
        # terms.
        total, power, k = 0.5 * phi, 1.0, 0
        while power > 1e-18:
            total -= 0.5 * power * math.sin((k + 2) * phi) / (k + 2)
            k, power = k + 1, power * s
            total += 0.5 * power * math.sin(k * phi) / k
        return 2 / math.pi * total
    angle = math.atan2((1 + s) * math.sin(phi / 2), (1 - s) * math.cos(phi / 2))
    total = (1 + s * s) * phi + 2 * s * math.sin(phi) - 2 * (1 - s * s) * angle
    return total / (2 * math.pi * s * s)


@lru_cache(maxsize=256)
def _table(small: int, large: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Nodes (F, T), both rising from 0 to 1, of the law with aspect small/large."""
    s = math.sqrt(small / large)
    shares, tails = [0.0], [0.0]
    for k in range(1, NODES):
        phi = math.pi * k / NODES
        share, tail = _eigenvalue_share(phi, s), (2 * phi - math.sin(2 * phi)) / (2 * math.pi)
        # Both are cubic in the distance at a soft edge: keep only nodes that rounding has left in order.
        if shares[-1] < share < 1 and tails[-1] < tail < 1:
            shares.append(share)
            tails.append(tail)
    return (*shares, 1.0), (*tails, 1.0)


def _interpolate(x: float, xs: tuple[float, ...], ys: tuple[float, ...]) -> float:
    k = min(max(bisect_right(xs, x) - 1, 0), len(xs) - 2)
    return ys[k] + (ys[k + 1] - ys[k]) * ((x - xs[k]) / (xs[k + 1] - xs[k]))


def _sides(m: int, n: int) -> tuple[int, int]:
    return min(m, n), max(m, n)


def error(m: int, n: int, rank: float) -> float:
    """g(rank): Frobenius error of the best rank-``rank`` approximation of an m x n matrix of N(0, 1) entries.

    ``rank`` is real and clamped to [0, min(m, n)]. Decreasing, ``g(0) = sqrt(m n)``, ``g(min(m, n)) = 0``.
    """
    p, large = _sides(m, n)
    shares, tails = _table(p, large)
    return math.sqrt(m * n * _interpolate((p - min(max(rank, 0.0), p)) / p, shares, tails))


def rank_for_error(m: int, n: int, value: float) -> float:
    """Real rank r with ``error(m, n, r) == value``; 0 where value >= g(0), min(m, n) where value <= 0."""
    p, large = _sides(m, n)
    if value <= 0:
        return float(p)
    share = value / math.sqrt(m * n)
    if share >= 1:
        return 0.0
    shares, tails = _table(p, large)
    return p - p * _interpolate(share * share, tails, shares)


@lru_cache(maxsize=64)
def _nodes_of_sum(terms: tuple[tuple[tuple[int, int], int], ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Nodes (sum of count * g^2, rank) of matrices of several shapes, by rising error."""
    ranks = sorted({p * (1 - share) for (p, large), _ in terms for share in _table(p, large)[0]}, reverse=True)
    nodes: dict[float, float] = {}
    for rank in ranks:
        nodes.setdefault(sum(count * error(p, large, rank) ** 2 for (p, large), count in terms), rank)
    # Rounding can put neighbours out of order.
    totals, ranks_ = zip(*sorted(nodes.items()), strict=True)
    return totals, ranks_


class StageModel:
    """Error of a pipeline stage: many matrices compressed at one common rank, their squared errors summed.

    Args:
        shapes: (rows, columns) of the stage's compressible matrices, at least one; a matrix takes rank
            ``min(r, rows, columns)``.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        # Layers repeat: one term per distinct shape keeps an inversion of a deep stage cheap.
        self._terms = sorted(Counter(_sides(m, n) for m, n in shapes).items())
        self.max_rank = max(p for (p, _), _ in self._terms)

    def error(self, rank: float) -> float:
        """sqrt(sum of g_i(rank)^2), for entries of standard deviation 1."""
        return math.sqrt(sum(count * error(p, large, rank) ** 2 for (p, large), count in self._terms))

    def rank_for_error(self, value: float) -> float:
        """Real rank r with ``self.error(r) == value``, to rounding: squared errors are linear between the nodes.

        Clamps as :func:`rank_for_error`: 0 where value >= error(0), ``max_rank`` where value <= 0.
        """
        if len(self._terms) == 1:
            (p, large), count = self._terms[0]
            return rank_for_error(p, large, value / math.sqrt(count))
        if value <= 0:
            return float(self.max_rank)
        if value >= self.error(0.0):
            return 0.0
        errors, ranks = _nodes_of_sum(tuple(self._terms))
        return _interpolate(value * value, errors, ranks)


def next_rank(stage: StageModel, r0: float, h0: float, h1: float) -> float:
    """CQM's answer: the real rank that keeps the error of rank ``r0`` at entropy ``h0`` when the entropy is ``h1``.

    Differential entropy in nats moves with log sigma, so ``sigma_1 g(r) = sigma_0 g(r0)`` becomes
    ``g(r) = exp(h0 - h1) g(r0)`` (paper). Saturates at 0 and ``stage.max_rank``; any finite entropies are safe.
    """
    if not (math.isfinite(h0) and math.isfinite(h1)):
        raise ValueError(f"entropies must be finite, not {h0} and {h1}")
    # Beyond e^700 either clamp has long been reached; math.exp would overflow.
    return stage.rank_for_error(math.exp(min(h0 - h1, 700.0)) * stage.error(r0))
