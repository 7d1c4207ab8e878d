"""Momentum correction: the velocity that a worker keeps of its own gradient and sends in its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edgc.compressors.base import Gradient, kept_of
from edgc.lazy import Tensor, torch


class Velocities:
    """The velocities u of one worker's gradients G (Deep Gradient Compression, Lin et al., ICLR 2018, section 3.2)::

        u <- m u + (1 - m) G

    The paper's has no factor 1 - m. With it u has the scale of G, as Adam's first moment has, so that a limit on the
    gradients' norm and a learning rate keep their meaning.

    Args:
        momentum: m, at least 0 and below 1; with 0 nothing is kept and gradients stay as they are.

    Attributes:
        tensors: u by parameter name, fp32, in the gradients' shapes.
    """

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        self.tensors: dict[str, Tensor] = {}

    def advance(self, gradient: Gradient, out: Tensor) -> Tensor:
        """Write the next velocity of a gradient to ``out``, fp32, and return it; the last one stays as it is."""
        out.copy_(gradient.tensor).mul_(1 - self.momentum)
        if gradient.name in self.tensors:
            out.add_(kept_of(self.tensors, gradient, "the velocity"), alpha=self.momentum)
        return out

    def replace(self, gradients: Iterable[Gradient]) -> dict[str, Tensor]:
        """Put the next velocities in the gradients' places; returns them by name, to be adopted."""
        if not self.momentum:
            return {}
        advanced: dict[str, Tensor] = {}
        for gradient in gradients:
            room = torch.empty(gradient.tensor.shape, dtype=torch.float32, device=gradient.tensor.device)
            advanced[gradient.name] = self.advance(gradient, room)
            gradient.tensor.copy_(room)
        return advanced

    def keep_old(self, advanced: Mapping[str, Tensor], ok: Tensor) -> None:
        """The last velocities take the place of ``advanced`` unless ``ok``, which the host does not read."""
        for name, new in advanced.items():
            if name in self.tensors:
                torch.where(ok, new, self.tensors[name], out=new)
            else:
                new.masked_fill_(~ok, 0)

    def adopt(self, advanced: Mapping[str, Tensor]) -> None:
        self.tensors.update(advanced)
