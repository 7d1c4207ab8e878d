"""1-bit Adam: a dense stage of Adam, then a frozen variance, and momenta that are averaged by their signs.

Source: Tang et al., "1-bit Adam" (arXiv 2102.02888), Algorithm 1; defaults and details of its code, DeepSpeed at
edaa722, ``runtime/fp16/onebit/adam.py`` and ``runtime/comm/nccl.py``. Without bias correction, as there::

    first stage:   m, v <- Adam's moments of the averaged gradient
    second stage:  v stays;  m_i <- beta1 m + (1 - beta1) g_i
                   c_i <- sign(m_i + e_i);  e_i <- m_i + e_i - c_i                    # to the owner of each part
                   m <- sign(mean of c_i + f), of which each owner keeps the rest f   # from it to all
    both:          weights <- weights - rate m / (sqrt(v) + eps)

Signs are those of :class:`~edgc.compressors.quantization.Blocks`: 64 entries share a scale, their mean magnitude in
bfloat16, 1.25 bits an entry, where the code has one root mean square for a parameter and 1 bit: 3.9 % of an fp32
all-reduce at any W, not 3.1 %. Both errors are the paper's. They are dropped in a run of another number of replicas.
An entry that had no gradient in the first stage, as of tokens that did not come, has v = 0, and a sign of 0 / 0 to
follow; it stays as it is from then on, and keeps no error (the code has the user give a mask of such entries).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from edgc.checks import number
from edgc.compressors.entrywise.feedback import Flat
from edgc.compressors.quantization import Blocks
from edgc.lazy import Tensor, torch
from edgc.strategies.base import Asked, Replica, StrategyConfig, StrategyExample, all_finite, dense_bytes, gradients_of
from edgc.strategies.momentum import MomentumStrategy


def _sent(shapes: Sequence[Sequence[int]], world: int) -> float:
    """Bytes a step, of one step of either stage."""
    blocks = sum(math.ceil(math.prod(shape) / 64) for shape in shapes)
    signs = 2 * (world - 1) * math.ceil(blocks / (8 * world)) * (8 * 64 // 8 + 8 * 2)
    return (dense_bytes(shapes, world) + signs) / 2


@dataclass(frozen=True, kw_only=True)
class OneBitAdamConfig(StrategyConfig):
    """Settings of 1-bit Adam.

    Attributes:
        warmup_steps: of the first stage. By default a fifth of the run: DeepSpeed's tutorial advises 15 to 25 %; its
            code's ``freeze_step`` is 100 000.
        beta1, beta2, eps: Adam's. Code: 0.9, 0.999, 1e-8.
    """

    name = "onebit_adam"
    equal = "step"
    directs = True
    examples = {"onebit_adam": StrategyExample(_sent, {"warmup_steps": 1})}

    warmup_steps: int | None = None
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def _check(self) -> None:
        self._whole("warmup_steps", 1, optional=True)
        number("beta1", self.beta1, 0, 1, open_high=True)
        number("beta2", self.beta2, 0, 1, open_high=True)
        number("eps", self.eps, 0, open_low=True)

    def build(self, replica: Replica) -> OneBitAdam:
        return OneBitAdam(self, replica)


class OneBitAdam(MomentumStrategy):
    """Adam, whose momenta lose all but signs and scales once its variance is frozen.

    Attributes:
        warmup: steps of the first stage.
    """

    def __init__(self, config: OneBitAdamConfig, replica: Replica) -> None:
        super().__init__(config.name, replica)
        self.config, self.blocks = config, Blocks(1)
        self.warmup = config.warmup_steps or math.ceil(replica.iterations / 5)
        self.shared["mean"], self.shared["variance"] = self.zeros(), self.zeros()
        self.flat = Flat.of(gradients_of(self.parameters), Blocks.align, momentum=False)
        work, world = self.flat.work, replica.channel().world
        self.part = math.ceil(len(work) / (world * self.blocks.group)) * self.blocks.group
        self.own["errors"] = {"worker": torch.zeros_like(work), "server": work.new_zeros(self.part)}

    def reduces(self, step: int) -> bool:
        return step <= self.warmup

    def before_step(self, gradients: Mapping[str, Tensor]) -> Asked:
        config, mean, variance = self.config, self.shared["mean"], self.shared["variance"]
        if self.reduces(self.step + 1):
            if not all_finite(gradients):
                return False
            for name, gradient in gradients.items():
                gradient = gradient.to(mean[name].dtype)
                mean[name].mul_(config.beta1).add_(gradient, alpha=1 - config.beta1)
                variance[name].mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
        else:
            work, spare = self.flat.work, self.flat.spare
            for name, part in zip(self.flat.names, self.flat.parts(work), strict=True):
                part.copy_(gradients[name].reshape(-1)).mul_(1 - config.beta1)
                part.add_(mean[name].view(-1), alpha=config.beta1)
            work.add_(self.own["errors"]["worker"])
            for name, part in zip(self.flat.names, self.flat.parts(work), strict=True):
                part.mul_(variance[name].view(-1) > 0)
            self.flat.clear_gaps()
            rest = yield from self._average(work, spare)
            if not all_finite({"": spare}):
                return False
            self.own["errors"]["worker"].copy_(work)
            self.own["errors"]["server"].copy_(rest)
            for name, part in zip(self.flat.names, self.flat.parts(spare), strict=True):
                mean[name].copy_(part.view(mean[name].shape)).mul_(variance[name] > 0)
        for name, gradient in gradients.items():
            moved = mean[name] / variance[name].sqrt().add_(config.eps)
            gradient.copy_(moved.mul_(variance[name] > 0))
        return True

    def _average(self, vector: Tensor, out: Tensor) -> Generator[None, None, Tensor]:
        """Write the mean by signs of flat fp32 ``vector`` to ``out``, the same on all replicas; it becomes what this
        one did not get across. What is not finite makes all 512 entries around it NaN.

        Returns:
            What is to be kept of the mean of this replica's part.
        """
        channel, blocks = self.replica.channel(), self.blocks
        parts = [slice(rank * self.part, (rank + 1) * self.part) for rank in range(channel.world)]
        sent = torch.empty((channel.world, blocks.bytes(self.part)), dtype=torch.uint8, device=vector.device)
        received = torch.empty_like(sent)
        for message, part in zip(sent, parts, strict=True):
            blocks.pack(vector[part], message, residual=vector[part])
        channel.all_to_all(received, sent)
        yield
        channel.finish()
        mean = self.own["errors"]["server"].clone()
        for message in received:
            blocks.unpack(message, mean, weight=1 / channel.world, add=True)
        blocks.pack(mean, sent[0], residual=mean)
        channel.all_gather(received, sent[:1])
        yield
        channel.finish()
        for message, part in zip(received, parts, strict=True):
            blocks.unpack(message, out[part])
        return mean
