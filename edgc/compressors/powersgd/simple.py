"""PowerSGD with error feedback as the paper writes it (Vogels et al., NeurIPS 2019, algorithms 1 and 2).

One matrix, all workers in one process, no tricks: the reference that tests compare
:class:`edgc.compressors.powersgd.algorithm.PowerSGD` with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SimplePowerSGD:
    """Low-rank averaging of one matrix over W workers.

    Args:
        start: Q of the first step, n x r.
        workers: W.

    Attributes:
        q: Q that the next step begins with, n x r.
        errors: E_w of every worker, m x n; empty before the first step.
    """

    def __init__(self, start: Tensor, workers: int) -> None:
        self.q = start
        self.workers = workers
        self.errors: list[Tensor] = []

    def reduce(self, gradients: Sequence[Tensor]) -> Tensor:
        """Average ``gradients`` (W of them, m x n); keeps what each worker did not send.

        Returns:
            M^ of rank r, m x n, the same on every worker.
        """
        errors = self.errors or [torch.zeros_like(gradient) for gradient in gradients]
        inputs = [gradient + error for gradient, error in zip(gradients, errors, strict=True)]
        p = self._mean([m @ self.q for m in inputs])
        basis = torch.linalg.qr(p).Q
        rights = [m.T @ basis for m in inputs]
        self.q = self._mean(rights)
        self.errors = [m - basis @ right.T for m, right in zip(inputs, rights, strict=True)]
        return basis @ self.q.T

    def _mean(self, messages: Sequence[Tensor]) -> Tensor:
        """All-reduce."""
        return torch.stack(list(messages)).sum(0) / self.workers
