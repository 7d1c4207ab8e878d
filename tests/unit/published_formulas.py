"""Formulas of the two public EDGC codes, restated by us from reading them; docs/audit.md says where each one stands.

``authors``: xiaoao-666/EDGC at commit 69a7674. ``HYGON``: HYGON-AI/Megatron-LM-das at the commits that docs/audit.md
names. Nothing here is copied; each function is the formula alone, in plain floats or float tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ITERATIONS, WARM_UP, SAVE_INTERVAL, WINDOW, SAMPLED_EVERY = 230_000, 23_000, 10_000, 1000, 10
"""Of the authors' scripts: --train-iters, 10 % of it, --save-interval; of their code: window, 1 / 0.1."""


def bin_entropy(x: Tensor, bins: int = 1000) -> float:
    """Authors: -sum p log p over equal bins between the smallest and the largest entry, nats."""
    low, high = float(x.min()), float(x.max())
    share = torch.histc(x, bins, low, high) / x.numel()
    return -float(torch.special.xlogy(share, share).sum())


def linear_rank(r_min: float, r_max: int, windows: Sequence[float], ranks: Sequence[int], step: int = 4) -> int:
    """Authors (entropy) and HYGON (loss): the rank after the last of ``windows``, the means of all windows so far.

    Raises:
        ZeroDivisionError: the first two windows have equal means.
    """
    ratio = abs(windows[-1] - windows[-2]) / abs(windows[1] - windows[0])
    wanted = min(max(round(r_min + (r_max - r_min) * ratio), r_min), r_max)
    even = int(wanted // 2 * 2)
    old = ranks[-1] if ranks else r_max
    return old + max(-step, min(step, even - old))


def compressed_in_search(iteration: int) -> bool:
    """Authors: whether a reduction is compressed while r_max is searched."""
    return iteration >= 12 and iteration % 3 == 0


def compressed_after_search(iteration: int) -> bool:
    """Authors: the same once r_max is known, with the settings of their scripts and the warm-up test passed."""
    return iteration == WARM_UP or (iteration > WARM_UP and iteration % SAVE_INTERVAL == 1)


def recorded(entropy: float, compressed: bool) -> float:
    """Authors: what goes into the list of entropies at a sampled iteration."""
    return entropy if compressed else 0.0


def stage_rank(rank_in_budget: float) -> int:
    """Authors and HYGON: the multiple of 4 above the rank that a stage's time budget allows."""
    return int(rank_in_budget // 4 + 1) * 4


def reducer_step(matrices: Sequence[Tensor], start: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Authors: one step of their reducer from an orthonormal ``start``: what all get, what each keeps."""
    basis = torch.linalg.qr(torch.stack([m @ start for m in matrices]).sum(0)).Q
    received = basis @ torch.stack([m.T @ basis for m in matrices]).mean(0).T
    return received, [m - received for m in matrices]


def loss_windows(first: float, floor: float, decay: float, count: int) -> list[float]:
    """Window means of a loss that falls as a power of the window's number."""
    return [floor + (first - floor) * (k + 1) ** -decay for k in range(count)]


def random_basis(n: int, rank: int, generator: torch.Generator) -> Tensor:
    """Orthonormal columns in uniformly random directions, n x rank."""
    q, r = torch.linalg.qr(torch.randn(n, rank, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()


def with_spectrum(values: Sequence[float], rows: int, generator: torch.Generator) -> Tensor:
    """A matrix, rows x len(values), with these singular values and random singular vectors; norm 1."""
    left, right = (random_basis(size, len(values), generator) for size in (rows, len(values)))
    return left * (torch.tensor(values, dtype=torch.float64) / math.hypot(*values)) @ right.T
