"""PowerSGD with error feedback as its papers write it: one matrix, all workers in one process, no tricks.

The reference that tests compare :class:`edgc.compressors.powersgd.algorithm.PowerSGD` with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SimplePowerSGD:
    """Low-rank averaging of one matrix over W workers (Vogels et al., NeurIPS 2019, algorithms 1 and 2).

    Args:
        start: Q of the first step, n x r.

    Attributes:
        factor: what the next step begins with, Q, n x r.
        errors: E_w of every worker, m x n; empty before the first step.
    """

    def __init__(self, start: Tensor) -> None:
        self.factor = start
        self.errors: list[Tensor] = []

    def reduce(self, gradients: Sequence[Tensor]) -> Tensor:
        """Average ``gradients`` (W of them, m x n); keeps what each worker did not send.

        Returns:
            M^ of rank r, m x n, the same on every worker.
        """
        errors = self.errors or [torch.zeros_like(gradient) for gradient in gradients]
        inputs = [gradient + error for gradient, error in zip(gradients, errors, strict=True)]
        parts = self.project(inputs)
        self.errors = [m - part for m, part in zip(inputs, parts, strict=True)]
        return mean(parts)

    def project(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Low-rank part of every worker's M_w (m x n); their mean is what is averaged to."""
        basis = torch.linalg.qr(mean([m @ self.factor for m in inputs])).Q  # m x r, the same on all workers
        rights = [m.T @ basis for m in inputs]
        self.factor = mean(rights)
        return [basis @ right.T for right in rights]


class SimpleOneSided(SimplePowerSGD):
    """Half an iteration a step, on either side in turn (ACP-SGD: Zhang et al., ICDCS 2023)."""

    turned = False

    def project(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        basis = torch.linalg.qr(self.factor).Q
        factors = [(m.T if self.turned else m) @ basis for m in inputs]
        parts = [basis @ f.T if self.turned else f @ basis.T for f in factors]
        self.factor, self.turned = mean(factors), not self.turned
        return parts


def mean(messages: Sequence[Tensor]) -> Tensor:
    """All-reduce."""
    return torch.stack(list(messages)).mean(0)
