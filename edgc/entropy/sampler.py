"""GDS, the gradient data sampler: iterations and entries that are measured (paper, section on GDS)."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import torch
from torch import Tensor

from edgc.sections import EntropyConfig

MAX_COPIES = 32
"""Largest 1/beta that ``diagonal`` reads: it makes that many copies of a matrix's parts, each at a fixed cost."""


class Sampler:
    """Choice of the iterations (rate alpha) and entries of a gradient (rate beta) that are measured.

    Every choice is a function of the settings, the iteration and the parameter's key, never of a global
    random state, so all ranks of a job and a resumed job choose alike.
    """

    def __init__(self, config: EntropyConfig) -> None:
        self.config = config
        # As a fraction, or rounding would shift an iteration now and then: 0.1 is 1/10.
        exact = Fraction(config.iteration_rate)
        self._rate = exact.limit_denominator(10**9) or exact

    def _measured(self, iteration: int) -> int:
        """Number of the iterations up to this one that are measured."""
        return iteration * self._rate.numerator // self._rate.denominator

    def measures(self, iteration: int) -> bool:
        """Tell whether this iteration (1-based) is measured: under ``random`` at random, else as evenly as possible.

        Of the first i iterations floor(alpha i) are measured: every k-th one where alpha is 1/k.
        """
        if self.config.sampling != "random":
            return self._measured(iteration) > self._measured(iteration - 1)
        return _hash(self.config.seed, "iteration", iteration) < self.config.iteration_rate * 2.0**64

    def take(self, x: Tensor, iteration: int, key: str) -> Tensor:
        """About beta of the entries of ``x``, at least one, none twice, as a 1-D tensor (a view if possible).

        Args:
            x: any shape; ``diagonal`` sees it as the matrix (d_0, d_1 ... d_k) that is compressed.
            iteration: a measured one.
            key: names the parameter; each has draws of its own.

        ``diagonal``: every (1/beta)-th entry of each row, one column further left in each next row, so that all rows
        and all columns have the same share. ``strided``: every (1/beta)-th entry of the flat tensor; where that
        divides the width, these are the same columns in every row. The phase of both is seeded per key and moves by
        one at each measured iteration: every entry has its turn. ``random``: one seeded draw in each run of 1/beta
        entries. Where 1/beta is no whole number, or is not smaller than the tensor, ``strided`` reads evenly spaced
        entries from a seeded start, ``diagonal`` is ``random`` (below 1/32, to bound the number of its copies, too).
        """
        rate, seed, rule = self.config.entry_rate, self.config.seed, self.config.sampling
        values = x.detach().reshape(-1)
        if rate == 1 or values.numel() < 2:
            return values
        stride = round(1 / rate)
        if rule != "random" and abs(stride * rate - 1) < 1e-9 and stride <= values.numel():
            phase = (_hash(seed, key, 0) + self._measured(iteration)) % stride
            if rule == "strided" or x.dim() < 2:
                return values[phase::stride]
            if stride <= MAX_COPIES:
                return _diagonal(values.view(x.shape[0], -1), stride, phase)
        return values[self._indices(values.numel(), iteration, key, values.device)]

    def _indices(self, numel: int, iteration: int, key: str, device: torch.device) -> Tensor:
        count = max(1, math.floor(numel * self.config.entry_rate))
        edges = torch.arange(count + 1, device=device, dtype=torch.float64).mul_(numel / count).long()
        edges[-1] = numel
        positions = edges[:-1]
        draw = _hash(self.config.seed, key, iteration)
        if self.config.sampling != "strided":
            generator = torch.Generator(device=device)
            generator.manual_seed(draw >> 1)
            offset = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
            size = edges[1:] - positions
            positions = positions + torch.minimum((offset * size).long(), size - 1)
        # Runs differ in length if 1/beta is no whole number; turning them makes all entries equally likely.
        return (positions + draw % numel) % numel


def _diagonal(matrix: Tensor, stride: int, phase: int) -> Tensor:
    """Entries (i, j) of ``matrix`` with i + j = ``phase`` modulo ``stride``, as a 1-D copy."""
    rows = range(min(stride, matrix.shape[0]))
    return torch.cat([matrix[k::stride, (phase - k) % stride :: stride].reshape(-1) for k in rows])


def _hash(seed: int, key: str, iteration: int) -> int:
    """64 bits that are the same on every machine (``hash()`` of a string is not)."""
    digest = hashlib.blake2b(f"{seed}/{iteration}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
