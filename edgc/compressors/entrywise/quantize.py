"""Every entry of every matrix in few bits: to the nearest with error feedback, at random without (QSGD), or signs.

A vector may be rotated first (:func:`rotate`), and error feedback filtered (:class:`RoundedConfig`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from edgc.checks import number, one_of, require
from edgc.compressors.base import Compressor
from edgc.compressors.entrywise.feedback import EntrywiseConfig, Feedback, Flat, Result
from edgc.compressors.float8 import Float8
from edgc.compressors.quantization import LEVELS, Blocks, QuantisedMean, Quantiser
from edgc.config import Example, Look
from edgc.lazy import Tensor, torch
from edgc.runtime.channel import Channel

ORDER = 32
"""Rows of the Hadamard matrices, as in SDP4Bit."""


def rotate(vector: Tensor) -> None:
    """Multiply every 32 entries of a flat fp32 vector by the orthonormal Hadamard matrix, in place; its own inverse."""
    vector.mul_(ORDER**-0.5)
    for half in (1, 2, 4, 8, 16):
        low, high = vector.view(-1, 2, half).unbind(1)
        difference = low - high
        low.add_(high)
        high.copy_(difference)


def _example(bits: int, bound: float | None = None, **more: Any) -> Example:
    """Each entry travels twice, (W-1)/W of them each way, with the bfloat16 scale of its block of 64."""
    settings = {"bits": bits, "rounding": "nearest" if bound is None else "stochastic", **more}
    return Example(lambda m, n: m * n * (bits / 8 + 2 / 64), settings, exact=bound is None, bound=bound)


@dataclass(frozen=True, kw_only=True)
class RoundedConfig(EntrywiseConfig):
    """Settings of the methods that send every entry in fewer bits.

    The last two filter error feedback as LoCo does (Xie et al., 2024; DeepSpeed: 0.8 and 1024)::

        E <- error_decay E + (1 - error_decay) K

    where K is what was not sent of G + E. So a share of every rounding is lost, and one bad step does not come back
    whole. LoCo's E is in 8 bits, and it sends the mean on as it is; here E is in fp32, and of the mean, which is
    rounded too, its owner's K has the rest. DeepSpeed's counter, one for all matrices, resets one of them at a time.

    Attributes:
        error_decay: beta, at least 0 and below 1; 0 keeps K itself.
        error_reset_every: reductions of a matrix after which its E is cleared; 0 is never.
    """

    error_decay: float = 0.0
    error_reset_every: int = 0

    def _check(self) -> None:
        super()._check()
        number("error_decay", self.error_decay, 0)
        require(self.error_decay < 1, "error_decay", self.error_decay, "use a number of at least 0 and below 1")
        self._whole("error_reset_every", 0)

    @classmethod
    def idle(cls, values: Mapping[str, Any]) -> dict[str, str]:
        fix, filtered = super().idle(values), ("error_decay", "error_reset_every")
        if not values["error_feedback"] or values.get("rounding") == "stochastic":
            return fix | dict.fromkeys(("ef21", *filtered), "let error feedback be on")
        return fix | dict.fromkeys(filtered if values["ef21"] else (), "set ef21: false")


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig(RoundedConfig):
    """Every entry in a few bits (ours; with ``stochastic`` rounding QSGD: Alistarh et al., NeurIPS 2017).

    Attributes:
        bits: 8, 7, 6, 5, 4 or 2.
        rounding: ``nearest`` with error feedback, or ``stochastic``: unbiased, without.
        format: ``integer``, or ``e4m3``: the floats of eight bits (:mod:`edgc.compressors.float8`), with ``bits: 8``
            and to the nearest.
        hadamard: rotate every 32 entries before they are quantised, so that a large one is spread over all of them
            (SDP4Bit: Jia et al., NeurIPS 2024; there with 4 bits rounded at random).
    """

    method: str = "quantize"
    bits: int = 8
    rounding: str = "nearest"
    format: str = "integer"
    hadamard: bool = False

    look = Look("Quantised", "#999933", "X", "--")
    examples = {
        **{f"int{bits}": _example(bits) for bits in (8, 6, 4, 2)},
        # Two roundings, each by less than a step of the largest entry, which is rounded up.
        **{f"stochastic{bits}": _example(bits, 2 * 1.02 / LEVELS[bits]) for bits in (8, 4, 2)},
        "e4m3": _example(8, format="e4m3"),
        "hadamard4": _example(4, hadamard=True),
        "loco": _example(4, error_decay=0.8, error_reset_every=3),
    }

    def _check(self) -> None:
        super()._check()
        one_of("rounding", self.rounding, ("nearest", "stochastic"))
        self._whole("bits", 1)
        require(self.bits > 1 and self.bits in LEVELS, "bits", self.bits, "use 8, 7, 6, 5, 4 or 2")
        one_of("format", self.format, ("integer", "e4m3"))
        fits = self.format == "integer" or (self.bits == 8 and self.rounding == "nearest")
        require(fits, "format", self.format, "set bits: 8 and rounding: nearest with it")

    def build(self) -> Compressor:
        return self.around(Quantize(self))


class Quantised(Feedback):
    """Quantised by every worker and averaged by :class:`~edgc.compressors.quantization.QuantisedMean`.

    With one worker nothing is sent and so nothing is rounded. Every matrix starts a group of its own.
    """

    hadamard = False

    def __init__(self, config: RoundedConfig, quantiser: Quantiser) -> None:
        super().__init__(config)
        self.quantiser, self.align = quantiser, quantiser.align
        self.draws_at_random = quantiser.stochastic
        self.counts_reductions = quantiser.stochastic or config.error_reset_every > 0
        self.error_decay, self.error_reset_every = config.error_decay, config.error_reset_every

    def waits(self, rank: int | None) -> int:
        return 1 if rank is None else 2

    def _adopt(self, name: str, kept: Tensor, ok: Tensor) -> None:
        last = self.errors.get(name)
        super()._adopt(name, kept, ok)
        if name in self.held:
            return
        if self.error_decay:
            # Where nothing was sent K is E itself, and stays it to the bit.
            torch.lerp(torch.zeros_like(kept) if last is None else last, kept, 1 - self.error_decay, out=kept)
        if self.error_reset_every and self.counts[name] % self.error_reset_every == 0:
            kept.masked_fill_(ok, 0)

    def _average(self, flat: Flat, channel: Channel) -> Generator[None, None, Result]:
        work = flat.work
        if channel.world == 1:
            exact = work.clone()
            work.zero_()
            yield

            def write(out: Tensor) -> None:
                out.copy_(exact)

            return exact.isfinite().all(), write
        mean = flat.buffers.get("mean")
        if mean is None:
            mean = QuantisedMean(len(work), channel.world, self.quantiser, work.device)
            flat.buffers["mean"] = mean
        generator = None
        if self.draws_at_random:
            generator = self._generator(flat.names[0], channel.rank)
            if work.device.type != "cpu":
                generator = torch.Generator(work.device).manual_seed(generator.initial_seed())
        if self.hadamard:
            rotate(work)
        yield from mean.steps(work, channel, residual=work, generator=generator)
        if not self.hadamard:
            return mean.finite(), mean.unpack
        rotate(work)

        def turn_back(out: Tensor) -> None:
            mean.unpack(out)
            rotate(out)

        return mean.finite(), turn_back


class Quantize(Quantised):
    """Blocks of 64 entries; what is rounded at random is the mean on average, and nothing is kept."""

    def __init__(self, config: QuantizeConfig) -> None:
        whole = config.format == "integer"
        super().__init__(config, Blocks(config.bits, stochastic=config.rounding == "stochastic") if whole else Float8())
        self.error_feedback &= not self.draws_at_random
        self.hadamard = config.hadamard


@dataclass(frozen=True, kw_only=True)
class SignConfig(RoundedConfig):
    """One bit an entry with error feedback, as 1-bit Adam (Tang et al., ICML 2021) averages its momentum.

    Signs of blocks of 64, averaged like other quantised vectors: 1.25 bits an entry. The mean of the workers is rounded
    to signs once more by the worker that owns the shard, which keeps what that loses, as 1-bit Adam's server does.
    """

    method: str = "sign"

    look = Look("Sign", "#8C510A", "h", ":")
    examples = {"sign": Example(lambda m, n: m * n * (1 / 8 + 2 / 64))}

    def build(self) -> Compressor:
        return self.around(Quantised(self, Blocks(1)))
