"""GDS, the gradient data sampler: which iterations and which entries are measured (paper, section on GDS)."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from edgc.config import EntropyConfig


class Sampler:
    """Which iterations (rate alpha) and which entries of a gradient (rate beta) are measured.

    Every choice is a function of the settings, the iteration and the parameter's key, never of a global
    random state, so all ranks of a job and a resumed job choose alike.
    """

    def __init__(self, config: EntropyConfig) -> None:
        self.config = config
        self._period = max(1, round(1 / config.iteration_rate))

    def measures(self, iteration: int) -> bool:
        """Whether this iteration (1-based) is measured: every round(1/alpha)-th or at random."""
        if self.config.sampling == "strided":
            return iteration % self._period == 0
        return _hash(self.config.seed, "iteration", iteration) < self.config.iteration_rate * 2.0**64

    def take(self, x: Tensor, iteration: int, key: str) -> Tensor:
        """About beta of the entries of ``x``, at least one, none twice, as a 1-D tensor (a view if possible).

        ``strided``: every (1/beta)-th entry, the phase seeded per key and moving by one at each measured
        iteration, so that every entry has its turn; where 1/beta is no whole number, evenly spaced from a
        seeded start. ``random``: one seeded draw in each run of 1/beta entries. ``key`` names the parameter.
        """
        values = x.detach().reshape(-1)
        rate, seed = self.config.entry_rate, self.config.seed
        stride = round(1 / rate)
        if rate == 1 or values.numel() < 2:
            return values
        if self.config.sampling == "strided" and abs(stride * rate - 1) < 1e-9 and stride <= values.numel():
            phase = (_hash(seed, key, 0) + iteration // self._period) % stride
            return values[phase::stride]
        return values[self._indices(values.numel(), iteration, key, values.device)]

    def _indices(self, numel: int, iteration: int, key: str, device: torch.device) -> Tensor:
        count = max(1, math.floor(numel * self.config.entry_rate))
        edges = torch.arange(count + 1, device=device, dtype=torch.float64).mul_(numel / count).long()
        edges[-1] = numel
        positions = edges[:-1]
        draw = _hash(self.config.seed, key, iteration)
        if self.config.sampling == "random":
            generator = torch.Generator(device=device)
            generator.manual_seed(draw >> 1)
            offset = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
            size = edges[1:] - positions
            positions = positions + torch.minimum((offset * size).long(), size - 1)
        # Runs differ in length if 1/beta is no whole number; turning them makes all entries equally likely.
        return (positions + draw % numel) % numel


def _hash(seed: int, key: str, iteration: int) -> int:
    """64 bits that are the same on every machine (``hash()`` of a string is not)."""
    digest = hashlib.blake2b(f"{seed}/{iteration}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
