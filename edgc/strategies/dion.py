"""Dion with its low-rank synchronisation: replicas average two factors of their momenta, which stay their own.

Source: Ahn, Xu, Abreu, Langford, "Dion: Distributed Orthonormalized Updates" (arXiv 2504.05295); defaults and details
of its code, microsoft/dion at 0a059a4, ``dion_reference.py`` with ``replicate_mesh_grad_sync``. Of a matrix m x n,
transposed where it is wide, with Q of r = fraction min(m, n) columns, the same on every replica::

    M <- M + G                                  # each replica's own
    P <- orthonormalise(mean of M Q);  R <- mean of M^T P
    M <- M - (1 - momentum) P R^T               # the mean R: the mean of M evolves as that of one replica would
    Q <- R, each column divided by its norm;  weights <- weights - rate sqrt(rows / columns) P Q^T

Vectors, embeddings and output layers are averaged in full and normalised as AdamW does; give an output layer a group of
its own with rate / sqrt(n), as the code's README has it. A matrix that its factors would not make smaller,
(m + n) r >= m n, or below ``min_compression_elements`` is averaged in full and updated by the rule above.

The code looks at its own M to see whether it is all zero; a replica whose expert had no token then takes another step
than the rest. Here only means are looked at: along a column of zeros in R nothing moves, and Q keeps its column.
Orthonormalisation is Householder's (``torch.linalg.qr``), not randomised Cholesky; r is not rounded up to a multiple;
factors are sent in the type of M, at least fp32. A run of another number of replicas begins with M = 0 and Q as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgc.checks import number, require
from edgc.compressors.base import seeded
from edgc.lazy import Tensor, torch
from edgc.strategies.base import Asked, Replica, StrategyConfig, StrategyExample, all_finite, as_matrix, dense_bytes
from edgc.strategies.chunks import wide
from edgc.strategies.momentum import MomentumStrategy


def _sent(shapes: Sequence[Sequence[int]], world: int) -> float:
    """Bytes a step of the default settings, of matrices that their factors make smaller."""
    factors = [[(sum(shape) * math.ceil(min(shape) / 4))] if len(shape) == 2 else shape for shape in shapes]
    return dense_bytes(factors, world)


@dataclass(frozen=True, kw_only=True)
class DionConfig(StrategyConfig):
    """Settings of Dion.

    Attributes:
        fraction: r / min(m, n). The code's 1 compresses nothing, nor does 1/2 a square matrix; ours: 1/4.
        momentum: mu. Paper and code: 0.95.
        beta1, beta2, eps: of AdamW, for what is no matrix. Code: 0.9, 0.95, 1e-8.
        heads: modules whose matrices are averaged in full, as embeddings are: parts of dotted names; ours.
        seed: of the first Q.
    """

    name = "dion"
    equal = "step"
    directs = True
    examples = {"dion": StrategyExample(_sent, embeddings_in_full=True)}

    fraction: float = 0.25
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    heads: tuple[str, ...] = ("lm_head", "output_layer")
    seed: int = 0

    def _check(self) -> None:
        number("fraction", self.fraction, 0, 1, open_low=True)
        number("momentum", self.momentum, 0, 1)
        number("beta1", self.beta1, 0, 1, open_high=True)
        number("beta2", self.beta2, 0, 1, open_high=True)
        number("eps", self.eps, 0, open_low=True)
        self._whole("seed", 0)
        heads = (self.heads,) if isinstance(self.heads, str) else self.heads
        names = isinstance(heads, (list, tuple)) and all(isinstance(each, str) for each in heads)
        require(names, "heads", self.heads, "use a list of names of modules")
        object.__setattr__(self, "heads", tuple(heads))

    def build(self, replica: Replica) -> Dion:
        return Dion(self, replica)


class Dion(MomentumStrategy):
    """Orthonormal directions of matrices, of ``ranks`` by name; factors are sent of those that are ``factored``."""

    def __init__(self, config: DionConfig, replica: Replica) -> None:
        super().__init__(config.name, replica)
        self.config = config
        self.ranks, self.factored, least = {}, [], replica.config.min_compression_elements
        for name, p in self.parameters.items():
            if p.dim() > 1 and name not in replica.embeddings and not set(name.split(".")) & set(config.heads):
                (m, n), entries = as_matrix(p).shape, p.numel()
                self.ranks[name] = rank = math.ceil(config.fraction * min(m, n))
                if (m + n) * rank < entries >= least:
                    self.factored.append(name)
        rest = [name for name in self.parameters if name not in self.ranks]
        self.own["momentum"] = self.zeros(self.factored)
        self.shared["momentum"] = self.zeros(name for name in self.parameters if name not in self.factored)
        self.shared["variance"] = self.zeros(rest)
        self.shared["q"] = {name: self._first_q(name) for name in self.ranks}
        self.shared["taken"] = {"steps": torch.zeros((), dtype=torch.float64, device="cpu")}  # that were not void

    def _first_q(self, name: str) -> Tensor:
        p = self.parameters[name]
        shape = (min(as_matrix(p).shape), self.ranks[name])
        generator = seeded("dion", self.config.seed, name)
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(p.device, wide(p))

    def before_step(self, gradients: Mapping[str, Tensor]) -> Asked:
        q, momenta, left = self.shared["q"], {}, {}
        for name in self.factored:
            momenta[name] = _tall(self.own["momentum"][name] + gradients[name])
            left[name] = momenta[name] @ q[name]
        full = {name: gradients[name] for name in gradients if name not in self.factored}
        yield from self.averaged([*left.values(), *full.values()])
        if not all_finite({**left, **full}):
            return False
        for name in self.ranks.keys() - left.keys():
            momenta[name] = _tall(self.shared["momentum"][name] + full[name])
            left[name] = momenta[name] @ q[name]
        left = {name: torch.linalg.qr(left[name]).Q for name in self.ranks}
        right = {name: momenta[name].mT @ left[name] for name in self.ranks}
        yield from self.averaged(right[name] for name in self.factored)
        if not all_finite(right):
            return False
        for name, r in right.items():
            kept = self.own if name in self.factored else self.shared
            norms = torch.linalg.vector_norm(r, dim=0)
            direction = left[name] @ (r / norms.clamp_min(self.config.eps)).mT
            momentum = momenta[name].addmm_(left[name], r.mT, alpha=self.config.momentum - 1)
            q[name].copy_(torch.where(norms > 0, r / norms, q[name]))
            rows, columns = as_matrix(gradients[name]).shape
            for target, tall in ((kept["momentum"][name], momentum), (gradients[name], direction)):
                target.copy_((tall if rows >= columns else tall.mT).reshape(target.shape))
            gradients[name].mul_(math.sqrt(rows / columns))
        self.shared["taken"]["steps"] += 1
        for name in self.shared["variance"]:
            gradients[name].copy_(self._adam(name, full[name]))
        return True

    def _adam(self, name: str, gradient: Tensor) -> Tensor:
        """AdamW's direction for an averaged gradient."""
        config, taken = self.config, float(self.shared["taken"]["steps"])
        mean = self.shared["momentum"][name].mul_(config.beta1).add_(gradient, alpha=1 - config.beta1)
        square, gradient = self.shared["variance"][name], gradient.to(mean.dtype)
        square.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
        root = square.sqrt().div_(math.sqrt(1 - config.beta2**taken)).add_(config.eps)
        return mean / (1 - config.beta1**taken) / root


def _tall(tensor: Tensor) -> Tensor:
    """A parameter's matrix, transposed if it is wide."""
    matrix = as_matrix(tensor)
    return matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
