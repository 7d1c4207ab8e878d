"""PowerSGD: its settings, read without torch; :mod:`edgc.compressors.powersgd.algorithm` is the algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgc.checks import one_of, require
from edgc.compressors.ef21 import EstimatingConfig
from edgc.config import CompressingConfig, Example, Look
from edgc.errors import UserError

if TYPE_CHECKING:
    from edgc.compressors.base import Compressor

QUANTISED_BITS = {f"int{bits}": bits for bits in (8, 7, 6, 5, 4)}
"""Bits of an entry of a factor of these types, without the scales."""
FACTOR_BITS = {"fp32": 32.0, "bf16": 16.0} | {name: bits + 0.25 for name, bits in QUANTISED_BITS.items()}
"""Bits of an entry of a factor as it is sent, with its share, 16 / 64, of the scale of its block."""


@dataclass(frozen=True, kw_only=True)
class LowRankConfig(CompressingConfig):
    """Settings that ``powersgd`` and ``edgc``, which is PowerSGD under a controller, have in common.

    Attributes:
        error_feedback: off only for ablations.
        factor_dtype: what P and Q are sent in: ``fp32``, ``bf16`` or (ours) ``int8``, ``int7``, ``int6``, ``int5``,
            ``int4``: so many bits an entry, and 16 for the scale of every 64 entries
            (:mod:`edgc.compressors.quantization`).
        one_sided: send only P or only Q, in turn: one reduction a step instead of two (ours: an option for
            latency-bound links; it measured worse at equal bytes).
        error_dtype: what error feedback is kept in: ``fp32`` or ``bf16`` (half the memory, ours).
        orthonormal_q: make the warm-started Q orthonormal before P = M Q. In exact arithmetic M^ is the same with and
            without it; rounding of P is not. By default for factors in integers alone, whose columns are then of one
            scale; study ``orthonormal_q`` tries the others.
    """

    error_feedback: bool = True
    factor_dtype: str = "fp32"
    one_sided: bool = False
    error_dtype: str = "fp32"
    orthonormal_q: bool | None = None

    def _check(self) -> None:
        super()._check()
        one_of("factor_dtype", self.factor_dtype, FACTOR_BITS)
        one_of("error_dtype", self.error_dtype, ("fp32", "bf16"))
        known = self.orthonormal_q is None or isinstance(self.orthonormal_q, bool)
        require(known, "orthonormal_q", self.orthonormal_q, "use true or false, or leave it out")
        if self.one_sided and self.orthonormal_q is not None:
            raise UserError("orthonormal_q: one-sided, the known factor always is", fix="leave out orthonormal_q")

    def build(self) -> Compressor:
        from edgc.compressors.powersgd.algorithm import PowerSGD

        return PowerSGD(self)


def saves_bytes(shape: Sequence[int], rank: int, factor_dtype: str = "fp32", gradient_bits: float = 32) -> bool:
    """True if the two factors of this rank, scales included, are smaller than the matrix in its own type."""
    factors = min(rank, *shape) * (shape[0] + shape[1]) * FACTOR_BITS[factor_dtype]
    return factors < shape[0] * shape[1] * gradient_bits


def _factors(dtype: str, *, one_sided: bool = False) -> Example:
    """Two factors of rank 8; one-sided the left one, which is the first that is sent."""
    bits, settings = FACTOR_BITS[dtype], {"rank": 8, "factor_dtype": dtype, "one_sided": one_sided}
    return Example(lambda m, n: 8 * (m if one_sided else m + n) * bits / 8, settings, exact=bits != 16)


@dataclass(frozen=True, kw_only=True)
class PowerSGDConfig(LowRankConfig, EstimatingConfig):
    """PowerSGD at one rank, from the first step (Vogels et al., NeurIPS 2019).

    Attributes:
        rank: of the approximations.
        refresh_every: T of PowerSGD+ (arXiv 2509.11254, of which the abstract is known here; a fork of LoongForge: 50):
            every T-th reduction of a matrix is exact, error feedback included, and the warm start becomes the leading
            singular vectors of the mean; 0 is never. It costs the bytes of a dense reduction every T-th time.
    """

    method: str = "powersgd"
    rank: int
    refresh_every: int = 0

    look = Look("PowerSGD, fixed rank", "#0072B2", "s")
    examples = {
        "powersgd": _factors("fp32"),
        "powersgd refreshed": Example(lambda m, n: 4 * 8 * (m + n), {"rank": 8, "refresh_every": 3}),
        **{f"powersgd {dtype}": _factors(dtype) for dtype in ("bf16", *QUANTISED_BITS)},
        "powersgd one-sided": _factors("fp32", one_sided=True),
        "powersgd errors in bf16": Example(
            lambda m, n: 4 * 8 * (m + n), {"rank": 8, "error_dtype": "bf16"}, exact=False
        ),
    }

    def _check(self) -> None:
        super()._check()
        self._whole("rank", 1)
        self._whole("refresh_every", 0)
        exact = "bf16" not in (self.factor_dtype, self.error_dtype)
        require(exact or not self.ef21, "ef21", self.ef21, "let neither factors nor errors be bf16")

    def build(self) -> Compressor:
        from edgc.compressors.powersgd.algorithm import PowerSGD

        return self.around(PowerSGD(self, self.refresh_every))

    @property
    def fixed_rank(self) -> int:
        return self.rank
