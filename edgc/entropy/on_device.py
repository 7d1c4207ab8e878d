"""Estimators of entropy for a GPU: many gradients at once, and the host reads nothing.

Those of :mod:`edgc.entropy.estimators` ask the device a dozen times for each gradient, and the host waits each time. On
a CPU that costs nothing. Here nothing depends on a value: entries that are zero get no weight instead of being taken
out, and there are as many bins as there could be. What comes out is the same but for the order of the sums.

Rows are the entries of one gradient each, [B, n]. Memory: a few times that of :data:`MOST` entries, and five bytes an
entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from edgc.entropy import estimators

MOST = 1 << 24
"""Entries in float64 at a time."""
_LARGEST = 1e290
_RINGS = math.ceil(math.log(_LARGEST / estimators.CORE) / math.log1p(estimators.GROWTH)) + 2
"""Bins of a tail, at most: each is at least ``GROWTH`` wider than the one before."""
_EPS = 4 * torch.finfo(torch.float64).eps


def estimate_rows(x: Tensor, estimator: str) -> Tensor:
    """Entropies of the rows of ``x`` [B, n], real, in nats: [B] in fp64 on its device; nan as in
    :func:`edgc.entropy.estimators.estimate`.

    Args:
        estimator: one of :data:`ESTIMATES`.
    """
    x = x.detach()
    entropies = ESTIMATES[estimator](x, x != 0)
    return torch.where(x.isfinite().all(1), entropies, math.nan)


def _columns(x: Tensor) -> Iterator[slice]:
    size = max(1, MOST // len(x))
    return (slice(start, start + size) for start in range(0, x.shape[1], size))


def _sigma(x: Tensor, counted: Tensor, count: Tensor) -> Tensor:
    """Standard deviation of the entries that are ``counted``; 0 where the spread is that of rounding."""
    parts = list(_columns(x))
    mean = (
        sum((torch.where(counted[:, at], x[:, at].double(), 0.0).sum(1) for at in parts), count.new_zeros(())) / count
    )
    low = torch.where(counted, x, math.inf).amin(1).double()
    high = torch.where(counted, x, -math.inf).amax(1).double()
    largest = torch.maximum(high - mean, mean - low)
    spread = largest > _EPS * torch.maximum(low.abs(), high.abs())
    unit = torch.where(spread, largest, 1.0)
    squares = count.new_zeros(())
    for at in parts:
        deviation = torch.where(counted[:, at], (x[:, at].double() - mean[:, None]).div_(unit[:, None]), 0.0)
        squares = squares + deviation.square_().sum(1)
    return torch.where(spread, unit * (squares / count).sqrt(), 0.0)


def _gaussian(x: Tensor, nonzero: Tensor) -> Tensor:
    count = nonzero.sum(1)
    sigma = _sigma(x, nonzero, count)
    entropies = sigma.log() + 0.5 * math.log(2 * math.pi * math.e)
    return torch.where((count >= 2) & (sigma > 0), entropies, math.nan)


def _centre_and_scale(x: Tensor, order: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Median and robust standard deviation as the host's; ``order`` is the number of counted entries so far [B, n]."""
    most = estimators.SUBSET
    stride = torch.div(count + most - 1, most, rounding_mode="floor") | 1
    held = torch.div(count + stride - 1, stride, rounding_mode="floor")
    slots = torch.arange(min(most, x.shape[1]), dtype=torch.int64, device=x.device)
    places = slots * stride[:, None] + 1
    at = torch.searchsorted(order, places.to(order.dtype)).clamp_(max=x.shape[1] - 1)
    valid = slots < held[:, None]
    subset = torch.where(valid, x.gather(1, at), math.inf).sort(1).values.double()
    first, median, _ = estimators.MIDDLE
    points = torch.arange(3, dtype=torch.float64, device=x.device).mul_(median - first).add_(first)
    position = points * (held[:, None] - 1).clamp(min=0)
    low = position.long()
    q = torch.lerp(subset.gather(1, low), subset.gather(1, position.ceil().long()), position - low)
    scales = torch.stack([_sigma(subset, valid, held), (q[:, 2] - q[:, 0]) / estimators.MIDDLE_RANGE])
    return q[:, 1], torch.where(scales > 0, scales, math.inf).amin(0)


def _histogram(x: Tensor, nonzero: Tensor) -> Tensor:
    # Of all rows in one line, for which a GPU has a quick sum, less what the rows before have.
    order = nonzero.view(-1).cumsum(0, dtype=torch.int32 if x.numel() < 1 << 31 else torch.int64).view(x.shape)
    order -= torch.nn.functional.pad(order[:-1, -1:], (0, 0, 1, 0))
    count = order[:, -1].long()
    centre, scale = _centre_and_scale(x, order, count)
    valid = (count >= 2) & scale.isfinite()
    centre, scale = torch.where(valid, centre, 0.0)[:, None], torch.where(valid, scale, 1.0)[:, None]
    n = count.clamp(min=2).double()[:, None]
    width = estimators.WIDTH * n ** (-1 / 3)
    bins = 2 * (estimators.CORE / width).ceil()
    edge = 0.5 * bins * width
    growth = (width / edge).clamp(min=estimators.GROWTH)
    ratio = growth.log1p()
    # As many bins as n entries have, rings of both tails in turn, and a place for what does not count.
    most = 2 * math.ceil(estimators.CORE / (estimators.WIDTH * max(2, x.shape[1]) ** (-1 / 3))) + 2
    counts = torch.zeros(len(x), most + 2 * _RINGS + 1, dtype=order.dtype, device=x.device)
    unit = torch.ones((1, 1), dtype=order.dtype, device=x.device)
    for at in _columns(x):
        z = x[:, at].double()
        if x.dtype in estimators.GRIDS:
            z = estimators.spread(z, order[:, at].double() - 1, *estimators.GRIDS[x.dtype])
        z = (z - centre).div_(scale).nan_to_num_(0.0, math.inf, -math.inf)
        size = z.abs()
        ring = (size.clamp(max=_LARGEST) / edge).log_().div_(ratio).floor_().clamp_(0, _RINGS - 1)
        tail = most + 2 * ring.long() + (z < 0)
        core = torch.minimum(z.div_(width).add_(0.5 * bins).long().clamp_(min=0), bins.long() - 1)
        place = torch.where(size >= edge, tail, core)
        place = torch.where(nonzero[:, at], place, counts.shape[1] - 1)
        counts.scatter_add_(1, place, unit.expand_as(place))
    filled = counts[:, :-1].double()
    rings = torch.arange(_RINGS, dtype=torch.float64, device=x.device).repeat_interleave(2, output_size=2 * _RINGS)
    tails = (edge * growth).log() + rings * ratio
    log_width = torch.cat([width.log().expand(-1, most), tails], 1)
    total = (torch.xlogy(filled, filled / n) - filled * log_width).sum(1)
    occupied = (filled > 0).sum(1)
    entropies = scale[:, 0].log() - total / n[:, 0] + (occupied - 1) / (2 * n[:, 0])
    return torch.where(valid, entropies, math.nan)


ESTIMATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"histogram": _histogram, "gaussian": _gaussian}
"""Estimators that a device computes; those of an ablation (vasicek, released) are the host's on every device."""
