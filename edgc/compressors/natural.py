"""Natural compression: every entry at random to one of the two powers of two around it, unbiased.

Horváth et al., "Natural Compression for Distributed Deep Learning" (arXiv 1905.10988): for ``2^k <= |x| < 2^(k+1)``,
``C(x) = sign(x) 2^(k+1)`` with probability ``|x| / 2^k - 1``, else ``sign(x) 2^k``. Then ``E C(x) = x`` and
``E (C(x) - x)^2 <= x^2 / 8`` (their omega of 1/8). An fp32 number keeps its sign and its exponent: 9 of 32 bits.

Each worker compresses its gradient, and the owner of a shard the mean of them once more, as the paper's master does:
the mean of W workers of like gradients then has a variance of at most ``(1/8) (1 + 1/8) / W + 1/8`` of its square.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgc.compressors.base import Compressor
from edgc.compressors.entrywise.quantize import Quantised, RoundedConfig
from edgc.config import Example, Look
from edgc.lazy import Tensor, torch

_MANTISSA, _INFINITE = 23, 255  # bits of an fp32's fraction; the exponent of what is not finite
_CHUNK = 1 << 18  # entries in work at a time


@dataclass(frozen=True, kw_only=True)
class NaturalConfig(RoundedConfig):
    """Natural compression.

    Attributes:
        error_feedback: paper: none, the result is unbiased without. With it (ours) what one step loses is sent later.
    """

    method: str = "natural"
    error_feedback: bool = False

    look = Look("Natural", "#117733", "|", ":")
    examples = {
        # Either rounding moves an entry by less than itself, the second one up to twice the largest.
        "natural": Example(lambda m, n: m * n * 9 / 8, bound=3.0),
        "natural with error feedback": Example(lambda m, n: m * n * 9 / 8, {"error_feedback": True}),
    }

    def build(self) -> Compressor:
        return self.around(Natural(self, Powers()))


class Natural(Quantised):
    """Every entry as a power of two, averaged like other quantised vectors."""


class Powers:
    """Quantiser to powers of two; a message is a byte an entry, the exponent, then a bit an entry, the sign.

    Below the smallest normal number the two powers are 0 and that number; above 2^127 there is no second one, and the
    result is 2^127.
    """

    group = align = 8
    stochastic = True

    def bytes(self, elements: int) -> int:
        return -(-elements // self.group) * (self.group + 1)

    def pack(
        self, x: Tensor, out: Tensor, *, residual: Tensor | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Pack as :meth:`edgc.compressors.quantization.Blocks.pack`; an entry that is not finite stays so."""
        out.zero_()
        exponents, signs = self._views(out)
        for begin in range(0, x.numel(), _CHUNK):
            part, places = x[begin : begin + _CHUNK], slice(begin // 8, (begin + _CHUNK) // 8)
            bits = part.view(torch.int32)
            magnitude = bits.bitwise_and(0x7FFFFFFF).clamp_(max=_INFINITE << _MANTISSA)
            broken = magnitude == _INFINITE << _MANTISSA
            # Added to the fraction, a number below 2^23 carries into the exponent with the probability asked for.
            carry = torch.randint(1 << _MANTISSA, part.shape, generator=generator, dtype=torch.int32, device=x.device)
            power = magnitude.add_(carry).bitwise_right_shift_(_MANTISSA).clamp_(max=_INFINITE - 1)
            exponents[begin : begin + len(part)].copy_(power.masked_fill_(broken, _INFINITE))
            negative = bits < 0
            for place in range(8):
                flags = negative[place::8].to(torch.uint8).bitwise_left_shift_(place)
                signs[places][: len(flags)].bitwise_or_(flags)
        if residual is not None:
            if residual is not x:
                residual.copy_(x)
            self.unpack(out, residual, weight=-1, add=True)

    def unpack(self, message: Tensor, out: Tensor, *, weight: float = 1.0, add: bool = False) -> None:
        exponents, signs = self._views(message)
        for begin in range(0, out.numel(), _CHUNK):
            part, places = out[begin : begin + _CHUNK], signs[begin // 8 : (begin + _CHUNK) // 8]
            bits = exponents[begin : begin + _CHUNK].to(torch.int32).bitwise_left_shift_(_MANTISSA)
            for place in range(8):
                negative = places.bitwise_right_shift(place).bitwise_and_(1)
                bits[place::8].bitwise_or_(negative.to(torch.int32).bitwise_left_shift_(31))
            values = bits.view(torch.float32)[: len(part)]
            if add:
                part.add_(values, alpha=weight)
            else:
                torch.mul(values, weight, out=part)

    def kernels(self, device: torch.device) -> None:
        """None: torch's operations do it everywhere."""

    def finite(self, message: Tensor) -> Tensor:
        return self._views(message)[0].amax() < _INFINITE

    def _views(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Exponents and packed signs of a message."""
        cut = message.numel() // (self.group + 1) * self.group
        return message[:cut], message[cut:]
