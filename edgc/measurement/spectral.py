"""Error at another rank, predicted from singular values that PowerSGD has for nothing.

With orthonormal P^ and Q = M^T P^ the eigenvalues of Q^T Q are the squared singular values s_1^2 >= ... >= s_r^2 of the
approximation, and what it leaves out is R = ||M||^2 - sum s_i^2. M is here the mean over workers; where error feedback
is on, its R is estimated (:mod:`edgc.measurement.mean_error`). Dropping directions adds their s_i^2 to the error. Of
the N = min(m, n) - r directions that are not in the approximation only the sum R is known; their squared singular
values are taken as a geometric tail a q^k, k = 1..N, with

* a from the last values: the least-squares line through log s_i^2 of the smaller half, read at i = r;
* q from the energy: a (q + ... + q^N) = R, at most 1 (where R asks for more, the tail is flat at R / N).

Accuracy, tested on synthetic spectra of p = 256 up to twice the known rank: from exact singular values the predicted
error is off by less than 1 % for exponential decay and 5 % for noise, with or without a low-rank part. For power laws a
tail of one scale is too short: 17 % too low for s_i = 1/i, 36 % for i^-1.5. Singular values from few power iterations
are too small, which errs upwards: by up to 50 % after three from a random start, less with a warm one.

Plain floats, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

Shape = tuple[int, int]
Curve = tuple[float, ...]


@dataclass(frozen=True)
class MatrixSpectrum:
    """Spectrum of a matrix M, by its compressed reductions: M = G + E of a worker, or its mean over workers.

    Attributes:
        shape: rows and columns.
        singular_sq: squared singular values of the approximation, one per rank; order and rounding below 0 do not
            matter.
        input_sq: squared Frobenius norm of M.
    """

    shape: Shape
    singular_sq: Sequence[float]
    input_sq: float

    @property
    def known(self) -> bool:
        """True if there is anything to predict from: finite numbers and a matrix that is not zero."""
        return self.input_sq > 0 and all(map(math.isfinite, [*self.singular_sq, self.input_sq]))

    def errors_sq(self, ranks: Sequence[int]) -> list[float]:
        """Predicted ||M - M_rank||^2 at each of ``ranks``; never rises with the rank, 0 from min(shape) on.

        At the rank that the values come from it is ``input_sq - sum(singular_sq)``, not a prediction.
        """
        values = sorted((max(0.0, float(value)) for value in self.singular_sq), reverse=True)
        rank, tail = len(values), min(self.shape) - len(values)
        residual = max(0.0, self.input_sq - math.fsum(values)) if tail else 0.0
        # dropped[k]: energy of the smallest k values, summed from below so that nothing cancels.
        dropped = list(accumulate(reversed(values), initial=0.0))
        decay = _decay(_anchor(values), tail, residual) if residual > 0 else 0.0
        return [
            residual + dropped[rank - max(0, target)]
            if target <= rank
            else residual * _share_beyond(decay, tail, target - rank)
            for target in ranks
        ]


def _anchor(values: Sequence[float]) -> float:
    """Line through the logarithms of the smaller half of ``values`` (descending), at the last; 0 if one is 0.

    A line and not the last value alone: after few power iterations the last one is far too small.
    """
    positive = [value for value in values if value > 0]
    if not positive or len(positive) < len(values):
        return 0.0  # directions without energy were found, yet some is left: nothing to extrapolate from
    logs = [math.log(value) for value in positive[len(positive) // 2 :]]
    count = len(logs)
    if count < 2:
        return positive[-1]
    centre, mean = (count - 1) / 2, math.fsum(logs) / count
    slope = math.fsum((k - centre) * (y - mean) for k, y in enumerate(logs)) / (count * (count**2 - 1) / 12)
    return math.exp(mean + slope * centre)


def _decay(anchor: float, count: int, energy: float) -> float:
    """-log q >= 0 of the tail ``anchor * q^k``, k = 1..``count``, that sums to ``energy``; 0 (flat) where none does."""
    if not anchor > 0 or energy >= count * anchor:
        return 0.0
    ratio = max(energy / anchor, 1e-300)
    # An endless tail sums to 1 / (1/q - 1), more than a finite one, so the decay is below the one where that fits.
    low, high = 0.0, math.log1p(1 / ratio)
    for _ in range(60):
        middle = 0.5 * (low + high)
        total = math.exp(-middle) * math.expm1(-count * middle) / math.expm1(-middle) if middle > 0 else count
        low, high = (middle, high) if total > ratio else (low, middle)
    return 0.5 * (low + high)


def _share_beyond(decay: float, count: int, first: int) -> float:
    """Share of a tail of ``count`` directions that remains when the ``first`` of them are gone."""
    if first >= count:
        return 0.0
    if count * decay < 1e-12:
        return (count - first) / count
    return math.exp(-first * decay) * math.expm1((first - count) * decay) / math.expm1(-count * decay)


def error_curve(
    matrices: Sequence[MatrixSpectrum], ranks: Sequence[int], compresses: Callable[[Shape, int], bool]
) -> Curve | None:
    """Predicted squared error of many matrices at a common rank, relative to the squared norm of all, per rank.

    Squared errors add up over matrices. Within [0, 1] and never rising with the rank.

    Args:
        matrices: those that are not known (zero or not finite) are left out.
        ranks: ascending.
        compresses: whether a matrix of this shape is factored at this rank; where it is not, it is sent exactly.

    Returns:
        None if no matrix is known.
    """
    known = [matrix for matrix in matrices if matrix.known]
    total = math.fsum(max(matrix.input_sq, math.fsum(matrix.singular_sq)) for matrix in known)
    if not known or not math.isfinite(total):
        return None
    sums = [0.0] * len(ranks)
    for matrix in known:
        errors = matrix.errors_sq(ranks)
        for k, rank in enumerate(ranks):
            if compresses(matrix.shape, rank):
                sums[k] += errors[k]
    return tuple(min(1.0, value / total) for value in sums)
