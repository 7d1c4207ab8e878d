"""What topk and randomk share: how many entries are sent, the warm-up of that number, momentum correction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgc.checks import number, require
from edgc.compressors.base import Compressor
from edgc.compressors.entrywise.feedback import EntrywiseConfig, Feedback
from edgc.compressors.entrywise.flat import Flat
from edgc.lazy import Tensor

WARMUP_DENSITY = 0.25
"""Where the warm-up begins: the paper's first sparsity is 75 % (Lin et al., section 3.3)."""


@dataclass(frozen=True, kw_only=True)
class SparseConfig(EntrywiseConfig):
    """What methods that send some of the entries have in common.

    ``momentum`` and ``density_warmup_steps`` are those of Deep Gradient Compression (Lin et al., ICLR 2018), off unless
    they are given. Its clipping of every worker's own gradient (section 3.2) is not here: the optimizer clips the mean.

    Attributes:
        density: share of the entries that a worker sends (ours).
        momentum: m of momentum correction, at least 0 and below 1; 0 is off. Every worker keeps a velocity
            u <- m u + (1 - m) G, which takes the gradient's place (section 3.2), and clears u where an entry is sent
            (momentum factor masking, section 3.3), unless all are. The paper's u lacks the factor 1 - m: with it
            gradients keep their scale, for clipping among others. What goes dense has its velocity, too, never cleared.
            **The optimizer must have no first moment of its own**: SGD without momentum, Adam with beta1 = 0. A
            velocity takes 4 bytes a parameter, twice, since a step may be given up.
        density_warmup_steps: reductions of a parameter over which its density falls exponentially from 0.25 to
            ``density`` (section 3.3; there epoch by epoch, here step by step); 0 is off. A number of steps and not a
            share of the run, because a compressor does not know the length of the run: it counts reductions, which are
            in its saved state. Messages and their buffers are as large as the density of the step asks; among W workers
            topk sends more than an uncompressed all-reduce while its density is above 1/W. A cost gate judges by
            ``density`` from the start.
    """

    density: float = 0.01
    momentum: float = 0.0
    density_warmup_steps: int = 0

    def _check(self) -> None:
        super()._check()
        number("density", self.density, 0, 1, open_low=True)
        number("momentum", self.momentum, 0)
        require(self.momentum < 1, "momentum", self.momentum, "use a number of at least 0 and below 1")
        self._whole("density_warmup_steps", 0)
        if self.density_warmup_steps:
            fix = f"set density below {WARMUP_DENSITY}, where the warm-up begins"
            require(self.density < WARMUP_DENSITY, "density_warmup_steps", self.density_warmup_steps, fix)

    @classmethod
    def idle(cls, values: Mapping[str, Any]) -> dict[str, str]:
        fix = {} if values["error_feedback"] else {"momentum": "set error_feedback: true"}
        return super().idle(values) | fix

    def build_to_time(self) -> Compressor:
        return replace(self, density_warmup_steps=0).build()

    def density_after(self, reductions: int) -> float:
        """The density of a parameter's next reduction."""
        if reductions >= self.density_warmup_steps:
            return self.density
        return WARMUP_DENSITY * (self.density / WARMUP_DENSITY) ** (reductions / self.density_warmup_steps)


class Sparse(Feedback):
    """A method that sends k entries of every matrix: its density times the number of entries, rounded, at least 1."""

    config: SparseConfig

    def __init__(self, config: SparseConfig) -> None:
        super().__init__(config, config.momentum)
        self.counts_reductions |= config.density_warmup_steps > 0

    def _sizes(self, flat: Flat) -> list[int]:
        """How many entries of each gradient are sent this time; the same on every rank, as the counts are."""
        densities = (self.config.density_after(self.counts.get(name, 0)) for name in flat.names)
        return [chosen(shape.numel(), density) for shape, density in zip(flat.shapes, densities, strict=True)]

    def _clear(self, flat: Flat, places: Tensor) -> None:
        """Zeros for what is sent: in ``flat.work`` and, unless everything is sent, in the velocity."""
        flat.work.index_fill_(0, places, 0)
        if flat.velocity is not None and self.config.density < 1:
            flat.velocity.index_fill_(0, places, 0)


def chosen(entries: int, density: float) -> int:
    """Number of entries sent of so many: the rounded share, at least 1."""
    return min(entries, max(1, round(density * entries)))
