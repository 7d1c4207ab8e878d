"""Every entry of every matrix in 8, 4 or 2 bits: to the nearest with error feedback, or stochastic without (QSGD)."""

from __future__ import annotations

from collections.abc import Generator

from edgc.compressors.channel import Channel
from edgc.compressors.entrywise.feedback import Feedback, Flat, Result
from edgc.compressors.quantization.blocks import Blocks
from edgc.compressors.quantization.mean import QuantisedMean
from edgc.lazy import Tensor, torch


class Quantize(Feedback):
    """Quantised by every worker and averaged by :class:`~edgc.compressors.quantization.mean.QuantisedMean`.

    With one worker nothing is sent and so nothing is rounded. Every matrix starts a block of its own.

    Args:
        bits: 8, 4, 2 or 1.
        rounding: ``nearest``, with error feedback, or ``stochastic``: each worker on its own, the result is the mean
            on average, nothing is kept.
        min_elements, error_feedback, seed: see :class:`~edgc.compressors.entrywise.feedback.Feedback`.

    Raises:
        ValueError: see :class:`~edgc.compressors.quantization.blocks.Blocks`.
    """

    def __init__(
        self,
        bits: int = 8,
        rounding: str = "nearest",
        *,
        min_elements: int = 1024,
        error_feedback: bool = True,
        seed: int = 0,
    ) -> None:
        stochastic = rounding == "stochastic"
        super().__init__(
            min_elements=min_elements, error_feedback=error_feedback and not stochastic, seed=seed
        )
        self.blocks = Blocks(bits, stochastic=stochastic)
        self.align = self.blocks.size
        self.draws_at_random = stochastic

    def waits(self, rank: int | None) -> int:
        return 1 if rank is None else 2

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
            mean = QuantisedMean(len(work), channel.world, self.blocks, work.device)
            flat.buffers["mean"] = mean
        generator = None
        if self.draws_at_random:
            generator = self._generator(flat.names[0], channel.rank)
            if work.device.type != "cpu":
                generator = torch.Generator(work.device).manual_seed(generator.initial_seed())
        yield from mean.steps(work, channel, residual=work, generator=generator)
        return mean.finite(), mean.unpack
