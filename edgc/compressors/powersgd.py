"""PowerSGD with error feedback that is each worker's own.

One power iteration per step (Vogels et al., NeurIPS 2019), for worker w of W with gradient G_w, error E_w and the
warm-started Q, all matrices of a call sharing two messages::

    M_w = G_w + E_w
    P   = mean_w(M_w Q)                   first message, together with everything that is sent dense
    P^  = orthonormal basis of P          the same bits on every worker
    Q_w = M_w^T P^ ;  Q = mean_w(Q_w)     second message
    M^  = P^ Q^T                          what every worker's buffer holds afterwards
    E_w = M_w - P^ Q_w^T                  what this worker did not send

so that mean_w(M^ + E_w) = mean_w(M_w) at every step. The error uses the worker's own Q_w, not the mean: with M^ the
differences between workers would pile up in the errors and never drain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from edgc.compressors.base import Compressor, Gradient, Statistics, Steps
from edgc.compressors.channel import Channel
from edgc.compressors.none import dense_steps


def compressible(shape: Sequence[int], min_elements: int) -> bool:
    """Whether a parameter of this shape is compressed at all: a matrix with at least ``min_elements`` entries."""
    return len(shape) == 2 and min(shape) > 1 and shape[0] * shape[1] >= min_elements


def saves_bytes(shape: Sequence[int], rank: int) -> bool:
    """Whether the two factors of this rank are smaller than the matrix."""
    return min(rank, *shape) * (shape[0] + shape[1]) < shape[0] * shape[1]


class PowerSGD(Compressor):
    """Low-rank reduction of matrices; vectors, small matrices and ranks that save nothing go dense.

    Args:
        min_elements: matrices with fewer entries are sent dense.
        error_feedback, warm_start: off only to show what they are worth.
        always_factor: also factor where that sends more bytes than the matrix (for tests).
        seed: of the first Q and of columns appended when the rank grows; must agree on all workers.
    """

    def __init__(
        self,
        *,
        min_elements: int = 1024,
        error_feedback: bool = True,
        warm_start: bool = True,
        always_factor: bool = False,
        seed: int = 0,
    ) -> None:
        self.min_elements = min_elements
        self.error_feedback = error_feedback
        self.warm_start = warm_start
        self.always_factor = always_factor
        self.seed = seed
        self.errors: dict[str, Tensor] = {}
        self.factors: dict[str, Tensor] = {}
        self.draws = 0

    def steps(
        self, gradients: Sequence[Gradient], channel: Channel, rank: int | None, statistics: Statistics
    ) -> Steps:
        matrices, dense = [], []
        for gradient in gradients:
            if rank is not None and self._factors(gradient.tensor.shape, rank):
                matrices.append(gradient)
            else:
                self._drain(gradient)
                dense.append(gradient.tensor)
        work = [self._input(gradient, statistics) for gradient in matrices]
        bases = [
            m @ self._start(g.name, m, min(rank or 1, *m.shape)) for g, m in zip(matrices, work, strict=True)
        ]
        yield from dense_steps([*bases, *dense], channel)
        if not matrices:
            return
        bases = [torch.linalg.qr(basis).Q for basis in bases]
        own = [m.mT @ basis for m, basis in zip(work, bases, strict=True)]
        reduced = [factor.clone() for factor in own]
        yield from dense_steps(reduced, channel)
        for gradient, m, basis, mine, mean in zip(matrices, work, bases, own, reduced, strict=True):
            error = m.sub_(basis @ mine.mT)
            statistics.error_sq += float(error.double().square().sum())
            if self.error_feedback:
                self.errors[gradient.name] = error
            gradient.tensor.copy_(basis @ mean.mT)
            if self.warm_start:
                self._keep(gradient.name, mean)

    def _factors(self, shape: Sequence[int], rank: int) -> bool:
        if not compressible(shape, self.min_elements):
            return False
        return self.always_factor or saves_bytes(shape, rank)

    def _drain(self, gradient: Gradient) -> None:
        """A dense reduction sends what an earlier compressed one had kept."""
        error = self.errors.pop(gradient.name, None)
        if error is not None:
            gradient.tensor.add_(error.to(gradient.tensor.dtype))

    def _input(self, gradient: Gradient, statistics: Statistics) -> Tensor:
        """M = G + E in fp32, in memory of its own."""
        m = gradient.tensor.to(torch.float32, copy=True)
        statistics.gradient_sq += float(m.double().square().sum())
        error = self.errors.get(gradient.name)
        if error is not None:
            m.add_(error)
        statistics.input_sq += float(m.double().square().sum())
        return m

    def _start(self, name: str, m: Tensor, rank: int) -> Tensor:
        """The Q to begin with, n x rank: the warm start, cut or extended to the rank."""
        q = self.factors.get(name)
        if q is None:
            return self._random(name, m, rank)
        if q.shape[1] > rank:
            # The left singular vectors of Q are the right singular vectors of the last approximation P^ Q^T.
            u = torch.linalg.svd(q, full_matrices=False).U
            q = u[:, :rank]
        elif q.shape[1] < rank:
            basis = torch.linalg.qr(q).Q
            fresh = self._random(name, m, rank - q.shape[1])
            # Twice is enough: projecting once leaves rounding of the size of eps times the condition number.
            for _ in range(2):
                fresh = torch.linalg.qr(fresh - basis @ (basis.mT @ fresh)).Q
            q = torch.cat([q, fresh], dim=1)
        self.factors[name] = q
        return q

    def _random(self, name: str, m: Tensor, columns: int) -> Tensor:
        """Orthonormal columns, the same on every worker whatever its other random numbers."""
        self.draws += 1
        digest = hashlib.sha256(f"{self.seed}/{self.draws}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        q = torch.randn(m.shape[1], columns, generator=generator, dtype=torch.float32)
        q = torch.linalg.qr(q).Q.to(m.device)
        if self.warm_start:
            self.factors.setdefault(name, q)
        return q

    def _keep(self, name: str, q: Tensor) -> None:
        """Scale Q to a largest entry of one, so that tiny gradients do not underflow in M Q.

        One scale for all columns: their energies decide what is kept when the rank shrinks. A zero gradient leaves
        the old Q in place: from zero it could never recover.
        """
        scale = q.abs().amax()
        self.factors[name] = torch.where(scale > 0, q / scale.where(scale > 0, 1.0), self.factors[name])

    def state_dict(self) -> dict[str, Any]:
        return {
            "errors": {name: tensor.clone() for name, tensor in self.errors.items()},
            "factors": {name: tensor.clone() for name, tensor in self.factors.items()},
            "draws": self.draws,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.errors = {name: tensor.clone() for name, tensor in state["errors"].items()}
        self.factors = {name: tensor.clone() for name, tensor in state["factors"].items()}
        self.draws = int(state["draws"])
