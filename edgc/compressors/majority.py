"""Signs with majority vote: one bit an entry each way, and nothing kept.

signSGD with majority vote (Bernstein et al., ICLR 2019, arXiv 1810.05291), with momentum their Signum. For worker w
with gradient G_w, and its velocity under momentum in its place, entry by entry::

    v_w = sign(G_w), sign(0) = 1       packed, eight in a byte: to the worker that owns the entry
    v   = sign(sum_w v_w)              where as many are for it as against, by the vote of the owner; packed, to all
    s   = mean_w(mean |G_w|)           one number a matrix
    G_w = s v                          what every worker's buffer holds afterwards

The paper's step is v itself. With s a gradient keeps its unit, for a loss scale and beside what is sent dense, and that
of zeros is zero; an optimizer that divides by the size of its gradients, as Adam does, hardly sees it. Ties are all
entries that two workers do not agree on; public code takes +1 for them. The result is biased: what few workers have is
outvoted at every step. Method ``sign`` has error feedback.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from edgc.compressors.base import Compressor
from edgc.compressors.bits import pack_bits, unpack_bits
from edgc.compressors.entrywise.feedback import EntrywiseConfig, Feedback, Flat, Result
from edgc.config import Example, Look
from edgc.lazy import Tensor, torch
from edgc.runtime.channel import Channel


@dataclass(frozen=True, kw_only=True)
class MajorityConfig(EntrywiseConfig):
    """Majority vote of signs.

    Attributes:
        error_feedback: none, as in the paper.
        momentum: m of the velocity u <- m u + (1 - m) G whose signs vote (Signum; the paper's 0.9); 0 is off. **The
            optimizer must have no first moment of its own**: SGD without momentum, Adam with beta1 = 0.
    """

    method: str = "majority"
    error_feedback: bool = False

    look = Look("Majority vote", "#44AA99", "1", "--")
    # A vote may go to the other side of the largest entry, at most by its own size and that of the mean.
    examples = {
        "majority": Example(lambda m, n: m * n / 8 + 4, bound=2.0),
        "majority signum": Example(lambda m, n: m * n / 8 + 4, {"momentum": 0.9}, bound=2.0),
    }

    @classmethod
    def idle(cls, values: Mapping[str, Any]) -> dict[str, str]:
        others = {key: fix for key, fix in super().idle(values).items() if key != "momentum"}
        return others | dict.fromkeys(("error_feedback", "ef21"), "use method: sign")

    def build(self) -> Compressor:
        return Majority(self, self.momentum)


class Majority(Feedback):
    """Every worker owns as many bytes of votes, those of all matrices together."""

    align = 8

    def waits(self, rank: int | None) -> int:
        return 1 if rank is None else 2

    def _average(self, flat: Flat, channel: Channel) -> Generator[None, None, Result]:
        work, world = flat.work, channel.world
        # In fp64, in which no sum overflows; not finite if an entry is not.
        means = [part.abs().sum(dtype=torch.float64) / part.numel() for part in flat.parts(work)]
        scales = torch.stack(means).to(torch.float32)
        channel.mean_(scales)
        own = pack_bits(torch.nn.functional.pad(work, (0, -len(work) % (8 * world))) >= 0)
        received = torch.empty((world, len(own) // world), dtype=torch.uint8, device=work.device)
        channel.all_to_all(received, own.view(world, -1))
        yield
        votes = unpack_bits(received).view(world, -1)
        # The owner's vote decides where the others are as many on either side.
        elected = votes.sum(0, dtype=torch.int32).mul_(2).add_(votes[channel.rank]) > world
        result = torch.empty_like(received)
        channel.all_gather(result, pack_bits(elected).view(1, -1))
        yield

        def write(out: Tensor) -> None:
            torch.mul(unpack_bits(result)[: len(out)].to(torch.float32), 2, out=out).sub_(1)
            for part, scale in zip(flat.parts(out), scales, strict=True):
                part.mul_(scale)
            work.sub_(out)

        return scales.isfinite().all(), write
