"""MuLoCo: DiLoCo with Muon inside, whose deltas bear few bits, with error feedback that decays.

Source: Therien et al., "MuLoCo: Muon is a practical inner optimizer for DiLoCo" (arXiv 2505.23725), and its codes,
facebookresearch/MuLoCo (475bbf4) and bentherien/muloco-1 (33cc333). The inner optimizer is yours; the paper's is made
by :func:`edgc.optimizers.muon`.

Of the compressed form this is e <- b e + D; sent C(e); e <- e - C(e), with C any method of ``compression`` that has
error feedback; the code's own are blocks or rows of 2 bits to 8, and top-k. Ours differs in two things: the code sends
messages by all-gather, which grows with the replicas, and rounds their mean once more to imitate what really happens
here (:class:`~edgc.compressors.quantization.QuantisedMean`); and it multiplies deltas by the outer rate before it
compresses them and once more in the step, which here is done once, in the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgc.checks import number
from edgc.compressors.base import KeepsErrors
from edgc.compressors.quantization import Blocks
from edgc.errors import UserError
from edgc.lazy import Tensor
from edgc.strategies.base import Asked, Replica, StrategyExample, dense_bytes
from edgc.strategies.diloco import DiLoCo, DiLoCoConfig


def _two_bits(shapes: Sequence[Sequence[int]], world: int) -> float:
    """Bytes a step of the second example: every matrix begins a block of 64; 2 bits and a 16-bit step a block, whole
    groups of blocks a replica; all-to-all and all-gather, every five steps; vectors as they are."""
    blocks = Blocks(2)
    entries = sum(-(-shape[0] * shape[1] // blocks.align) * blocks.align for shape in shapes if len(shape) == 2)
    share = -(-entries // (world * blocks.group)) * blocks.group
    dense = dense_bytes([shape for shape in shapes if len(shape) < 2], world)
    return (2 * (world - 1) * blocks.bytes(share) + dense) / 5


@dataclass(frozen=True, kw_only=True)
class MuLoCoConfig(DiLoCoConfig):
    """Settings of MuLoCo.

    Attributes:
        every: H, inner steps a round. Paper and both codes: 30.
        lr: of the outer step. MuLoCo's config/diloco/2x_4gpu_muloco.py: 0.9; muloco-1: 0.7.
        momentum: of the outer step, Nesterov's. The same files: 0.8; 0.6.
        error_decay: b, share of the error feedback that lives on to the next round. Signature of
            torchtitan/components/quantized_outer_sgd.py: 0.95; its configuration: 0.9.
    """

    name = "muloco"
    examples = {
        "muloco": StrategyExample(lambda shapes, world: dense_bytes(shapes, world) / 5, {"every": 5}),
        "muloco_int2": StrategyExample(_two_bits, {"every": 5}, {"method": "quantize", "bits": 2}),
    }

    lr: float = 0.9
    momentum: float = 0.8
    error_decay: float = 0.95

    def _check(self) -> None:
        super()._check()
        number("error_decay", self.error_decay, 0, 1)

    def build(self, replica: Replica) -> MuLoCo:
        return MuLoCo(self, replica)


class MuLoCo(DiLoCo):
    """DiLoCo whose error feedback decays."""

    config: MuLoCoConfig

    def __init__(self, config: MuLoCoConfig, replica: Replica) -> None:
        if getattr(replica.config, "ef21", False):
            what = "strategy muloco has error feedback that decays, and ef21 has estimates in its place"
            raise UserError(what, fix="set compression.ef21: false")
        super().__init__(config, replica)

    def end_round(self, deltas: dict[str, Tensor]) -> Asked:
        ok = yield from super().end_round(deltas)
        if ok:
            # Before the next delta is added, and not in a void round, which leaves the state as it was.
            for compressor in self.engine.compressors:
                if isinstance(compressor, KeepsErrors):
                    compressor.decay(self.config.error_decay)
        return ok
