"""Entropy of a gradient (paper, section on the gradient data sampler, GDS).

Estimators (all in nats, computed in float64 whatever the input's type):

``histogram``
    Differential entropy, plug-in over bins: ``-sum p log(p / width)`` plus the Miller-Madow term ``(K - 1) / 2n`` for K
    occupied bins. Equal bins of Freedman and Diaconis' width around the median; beyond 8 robust standard deviations
    they widen geometrically, so that a few far outliers neither coarsen the centre nor cost memory (ours). Entries of
    bf16 and fp16 lie on a grid not much finer than the bins, which would move the entropy by up to 0.013 nats with
    their scale: each is first spread evenly, without chance, over what is rounded to it.
``gaussian``
    ``log sigma + log(2 pi e) / 2``: exact for normal entries, an upper bound otherwise.
``vasicek``
    Differential entropy from m-spacings with Vasicek's bias removed (Wieczorkowski and Grzegorzewski, 1999).
``released``
    Discrete entropy of a 1000-bin histogram over [min, max], as in the authors' public code. Invariant to the
    gradient's scale, so it cannot follow it; for the ablation only.

Exact zeros are dropped by all but ``released``: they are rows that got no gradient (about three quarters of
an embedding's entries), a point mass that has no differential entropy. Input that holds inf or nan gives nan.
Fewer than two non-zero entries, or entries that are all equal, give nan (no density); ``released`` gives 0
for equal and nan for no entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CORE = 8.0
"""Half width of the equal bins, in robust standard deviations."""
GROWTH = 0.05
"""Relative width of the bins beyond the core, at least."""
WIDTH = 2.7
"""Width of the equal bins (Freedman and Diaconis), in robust standard deviations times the cube root of the count."""
SUBSET = 1 << 13
"""Entries that median and robust standard deviation are found from, at most."""
MIDDLE = (0.45, 0.5, 0.55)
MIDDLE_RANGE = 0.2513227
"""Quantiles around the median, and how far the outer ones are apart in a normal distribution with sigma 1."""
_RELEASED_BINS = 1000
GRIDS = {torch.bfloat16: (8, -133), torch.float16: (11, -24)}
"""Significant binary digits of the types whose grid is not much finer than a bin, and log2 of their least spacing."""


@dataclass(frozen=True)
class Moments:
    """Shape of a gradient's entries.

    ``count`` and ``zero_fraction`` are over all entries; ``mean``, ``sigma`` (population), ``skewness`` and
    ``excess_kurtosis`` over those that are not exactly zero (nan where undefined), as for the entropies.
    """

    count: int
    zero_fraction: float
    mean: float
    sigma: float
    skewness: float
    excess_kurtosis: float


def estimate(x: Tensor, estimator: str) -> float:
    """Entropy of the entries of ``x`` (any shape, real) in nats; see the module's text for each estimator.

    Scaling ``x`` by c > 0 adds log c, except to ``released``, which does not change.
    """
    values = x.detach().reshape(-1)
    if estimator != "released":
        values = _nonzero(values)
    if not _all_finite(values):
        return math.nan
    return _ESTIMATES[estimator](values)


def moments(x: Tensor) -> Moments:
    """Count, share of exact zeros and the first four moments of the entries of ``x`` (any shape), in one pass
    over memory per moment and float64."""
    values = x.detach().reshape(-1)
    count = values.numel()
    nonzero = _nonzero(values)
    zeros = 1 - nonzero.numel() / count if count else math.nan
    if not nonzero.numel() or not _all_finite(nonzero):
        return Moments(count, zeros, math.nan, math.nan, math.nan, math.nan)
    mean, sigma, third, fourth = _standardised(nonzero, 4)
    return Moments(count, zeros, mean, sigma, third, fourth - 3)


def combine(entropies: Sequence[float], numels: Sequence[int]) -> float:
    """Entropy of a stage: mean of its parameters' entropies weighted by their sizes, nan entries left out.

    A mean over parameters moves by d when every parameter's log sigma moves by d, which the entropy of the
    pooled entries (a mixture of scales) does not. nan when nothing is left.
    """
    pairs = [(h, k) for h, k in zip(entropies, numels, strict=True) if math.isfinite(h) and k > 0]
    total = sum(k for _, k in pairs)
    return math.fsum(h * k for h, k in pairs) / total if total else math.nan


def _nonzero(values: Tensor) -> Tensor:
    mask = values != 0
    return values if bool(mask.all()) else values[mask]


def _all_finite(values: Tensor) -> bool:
    # One float64 sum instead of a mask as large as the input; float64 input itself may overflow a sum, so
    # look closer.
    return math.isfinite(float(values.sum(dtype=torch.float64))) or bool(values.isfinite().all())


def _chunks(values: Tensor) -> Iterator[Tensor]:
    """Pieces in float64: on a CPU they stay in the cache, on a GPU they only bound the extra memory."""
    size = 1 << (17 if values.device.type == "cpu" else 24)
    for start in range(0, values.numel(), size):
        yield values[start : start + size].double()


def _standardised(values: Tensor, order: int) -> list[float]:
    """[mean, sigma, third, ..., order-th moment of (x - mean) / sigma] of at least one finite value.

    A spread the size of rounding counts as none: sigma 0, further moments nan. Deviations are divided by the
    largest one before they are raised to powers, so neither 1e-100 nor 1e200 leaves the range of a float.
    """
    n = values.numel()
    mean = sum(float(chunk.sum()) for chunk in _chunks(values)) / n
    low, high = (float(bound) for bound in values.aminmax())
    largest = max(high - mean, mean - low)
    if not largest > 4 * torch.finfo(torch.float64).eps * max(abs(low), abs(high)):
        return [mean, 0.0] + [math.nan] * (order - 2)
    sums = [0.0] * (order - 1)
    for chunk in _chunks(values):
        deviation = (chunk - mean).div_(largest)
        power = deviation
        for k in range(order - 1):
            power = power * deviation
            sums[k] += float(power.sum())
    root = math.sqrt(sums[0] / n)
    return [mean, largest * root] + [sums[k - 2] / n / root**k for k in range(3, order + 1)]


def _gaussian(values: Tensor) -> float:
    if values.numel() < 2:
        return math.nan
    sigma = _standardised(values, 2)[1]
    return math.log(sigma) + 0.5 * math.log(2 * math.pi * math.e) if sigma > 0 else math.nan


def _centre_and_scale(values: Tensor) -> tuple[float, float]:
    """Median and a robust standard deviation, from a strided subsample of at most 2^13 entries.

    The scale is the smaller of sigma and the range of the middle tenth, the latter scaled to equal sigma for
    normal entries. The range resists outliers and sees a sharp peak, which wide bins would flatten; sigma
    serves where the entries keep away from the median.
    """
    # An odd stride runs through all columns of a matrix whose width is a power of two.
    stride = -(-values.numel() // SUBSET) | 1
    subset = values[::stride].double().sort().values
    points = torch.tensor(MIDDLE, dtype=torch.float64, device=subset.device)
    position = points * (subset.numel() - 1)
    low = position.long()
    # By hand: torch.quantile would sort again and refuses large inputs.
    q = torch.lerp(subset[low], subset[position.ceil().long()], position - low).tolist()
    scales = (_standardised(subset, 2)[1], (q[2] - q[0]) / MIDDLE_RANGE)
    return q[1], min((scale for scale in scales if scale > 0), default=0.0)


def _histogram(values: Tensor) -> float:
    n = values.numel()
    if n < 2:
        return math.nan
    centre, scale = _centre_and_scale(values)
    if not scale > 0:
        return math.nan
    # In units of ``scale``, like everything below, so that scaling the input adds exactly its logarithm.
    width = WIDTH * n ** (-1 / 3)
    bins = 2 * math.ceil(CORE / width)
    edge = 0.5 * bins * width
    growth = max(GROWTH, width / edge)
    ratio = math.log1p(growth)
    core = torch.zeros(bins, dtype=torch.int64, device=values.device)
    tails: dict[float, int] = {}
    grid, position = GRIDS.get(values.dtype), 0
    for chunk in _chunks(values):
        if grid is not None:
            turns = torch.arange(position, position + chunk.numel(), dtype=torch.float64, device=chunk.device)
            chunk = spread(chunk, turns, *grid)
            position += chunk.numel()
        z = (chunk - centre).div_(scale)
        if float(z.abs().max()) >= edge:
            outside = z.abs() >= edge
            outer = z[outside]
            ring = ((outer.abs().clamp(max=1e290) / edge).log() / ratio).floor().clamp_(min=0)
            keys, counts = torch.unique(torch.copysign(ring + 1, outer), return_counts=True)
            for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
                tails[key] = tails.get(key, 0) + count
            z = z[~outside]
        index = z.div_(width).add_(0.5 * bins).long().clamp_(0, bins - 1)
        core += torch.bincount(index, minlength=bins)
    occupied = core[core > 0].double()
    total = float((occupied * (occupied / (n * width)).log()).sum())
    for key, count in tails.items():
        ring_width = edge * growth * math.exp((abs(key) - 1) * ratio)
        total += count * math.log(count / (n * ring_width))
    occupied_bins = occupied.numel() + len(tails)
    return math.log(scale) - total / n + (occupied_bins - 1) / (2 * n)


def spread(chunk: Tensor, turns: Tensor, digits: int, smallest: int) -> Tensor:
    """``chunk`` (float64) of entries rounded to ``digits`` binary digits, spread over what each was rounded from.

    Evenly, and without a random state: the n-th entry (``turns`` has its n, and is overwritten) moves by the fraction
    of n times the golden ratio, less one half, of the distance to its neighbour.
    """
    spacing = (torch.frexp(chunk).exponent - digits).clamp_(min=smallest)
    offset = turns.mul_(0.5 * (math.sqrt(5) - 1)).frac_().sub_(0.5)
    return offset.mul_(spacing.double().exp2_()).add_(chunk)


def _vasicek(values: Tensor) -> float:
    n = values.numel()
    if n < 4:
        return math.nan
    ordered = values.double().sort().values
    if not bool(ordered[-1] > ordered[0]):
        return math.nan
    m = max(1, min(round(math.sqrt(n)), n // 2 - 1))
    position = torch.arange(n, dtype=torch.int64, device=ordered.device)
    spacing = ordered[(position + m).clamp_(max=n - 1)] - ordered[(position - m).clamp_(min=0)]
    tied = spacing <= 0
    logs = spacing.log() + math.log(n / (2 * m))
    if bool(tied.any()):
        # 2m + 1 equal entries: the size of the tie over the cell halfway to its two neighbours.
        distinct, inverse, counts = torch.unique_consecutive(ordered, return_inverse=True, return_counts=True)
        padded = torch.cat([2 * distinct[:1] - distinct[1:2], distinct, 2 * distinct[-1:] - distinct[-2:-1]])
        cell = 0.5 * (padded[2:] - padded[:-2])
        logs[tied] = (cell * n / counts).log()[inverse[tied]]
    psi = torch.digamma(torch.arange(m, 2 * m, dtype=torch.float64, device="cpu")).sum()
    ends = torch.digamma(torch.tensor([2.0 * m, n + 1.0], dtype=torch.float64, device="cpu")).tolist()
    bias = math.log(2 * m / n) - (1 - 2 * m / n) * ends[0] + ends[1] - 2 / n * float(psi)
    return float(logs.mean()) + bias


def _released(values: Tensor) -> float:
    n = values.numel()
    if not n:
        return math.nan
    low, high = (float(bound) for bound in values.aminmax())
    if not high > low:
        return 0.0
    counts = torch.zeros(_RELEASED_BINS, dtype=torch.int64, device=values.device)
    for chunk in _chunks(values):
        index = ((chunk - low) / (high - low) * _RELEASED_BINS).long().clamp_(0, _RELEASED_BINS - 1)
        counts += torch.bincount(index, minlength=_RELEASED_BINS)
    share = counts[counts > 0].double() / n
    return -float((share * share.log()).sum())


_ESTIMATES: dict[str, Callable[[Tensor], float]] = {
    "histogram": _histogram,
    "gaussian": _gaussian,
    "vasicek": _vasicek,
    "released": _released,
}
