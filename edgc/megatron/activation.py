"""Low-rank compression of matrices that go from one sender to one receiver, with the sender's error feedback.

For the activation gradients between pipeline stages: compressed backpropagation with lazy error propagation
(Optimus-CC: Song et al., ASPLOS 2023). A sender has one stream of matrices, or several with a name each. One matrix G
of a stream is one warm-started power iteration and one message::

    M  = G + E
    P  = orthonormal basis of M Q
    Q  = M^T P
    G^ = P Q^T        what the receiver makes of the message [P | Q]
    E  = M - G^       goes with the stream's next matrix

G^ is what got across, so its rounding to the gradient's type is in E, and the sum of what was received plus E is the
sum of what was to be sent. Factors and E are fp32 whatever the type of G.

A matrix whose factors would not be smaller is sent as it is; both ends see that from its shape and type alone. If M is
not finite the whole message is NaN, so that the receiver's gradients are not finite either, and E and Q stay as they
were; so it is where a factor of a finite M would not be. Equal bits in give equal bits out: copies of a gradient on
tensor-parallel ranks stay equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgc.compressors.base import Statistics, clones, square_sums, within
from edgc.compressors.powersgd.passes import Batched, RowBlocks
from edgc.compressors.powersgd.state import of_rank, random_factor
from edgc.errors import UserError
from edgc.runtime.channel import mark
from edgc.runtime.device import host_decides


@dataclass(frozen=True)
class Layout:
    """Layout of a matrix's message: P, rows x rank, and then Q, columns x rank, flat and in fp32."""

    rows: int
    columns: int
    rank: int

    @property
    def size(self) -> int:
        """Entries of the message."""
        return self.rank * (self.rows + self.columns)

    def empty(self, device: torch.device) -> Tensor:
        """A message to be filled."""
        return torch.empty(self.size, dtype=torch.float32, device=device)

    def split(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """P and Q as views."""
        p, q = message.split([self.rank * self.rows, self.rank * self.columns])
        return p.view(self.rows, self.rank), q.view(self.columns, self.rank)

    @torch.no_grad()
    def reconstruct(self, message: Tensor, out: Tensor) -> None:
        """Write P Q^T into ``out``, contiguous and of any shape that holds the matrix, within the range of its type."""
        p, q = self.split(message)
        matrix = out.detach().view(self.rows, self.columns)
        if matrix.dtype == torch.float32:
            torch.mm(p, q.mT, out=matrix)
        else:
            matrix.copy_(within(torch.mm(p, q.mT), matrix.dtype))


@dataclass
class Traffic:
    """Backward traffic of one rank in one iteration.

    Attributes:
        sent, received: gradients.
        sent_compressed, received_compressed: those of them that were compressed.
        dense_bytes: of the gradients that were sent, as Megatron would send them.
        statistics: ``bytes`` that were sent, norms of what was compressed, its times, and how often a gradient was
            not finite.
    """

    sent: int = 0
    received: int = 0
    sent_compressed: int = 0
    received_compressed: int = 0
    dense_bytes: int = 0
    statistics: Statistics = field(default_factory=Statistics)


class ActivationCompressor:
    """Compressor of streams of matrices; the receiving end needs no state.

    Args:
        rank: None compresses nothing.
        seed: of the first Q; the same on both ends of tensor parallelism.

    Attributes:
        errors: E of each stream, rows x columns, fp32.
        factors: Q^T of each stream, rank x columns, fp32, with a norm of about one.
        always_factor: also factor where that sends more bytes than the matrix (for tests).
    """

    always_factor = False

    def __init__(self, rank: int | None, seed: int = 0) -> None:
        self.rank, self.seed = rank, seed
        self.errors: dict[str, Tensor] = {}
        self.factors: dict[str, Tensor] = {}
        self._before: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        self._on_cpu, self._on_gpu = RowBlocks(), Batched()
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")

    def begin_iteration(self) -> None:
        """Remember the state, for :meth:`give_up`: what is there now is not written to any more."""
        self._before = dict(self.errors), dict(self.factors)

    def give_up(self) -> None:
        """Go back to the state at the beginning of the iteration, whose gradients are thrown away."""
        self.errors, self.factors = self._before

    def layout(self, shape: Sequence[int], dtype: torch.dtype) -> Layout | None:
        """Layout of the message for a gradient of this shape, last dimension by all others, and type; None: as is."""
        if self.rank is None:
            return None
        rows, columns = math.prod(shape[:-1]), shape[-1]
        layout = Layout(rows, columns, min(self.rank, rows, columns))
        smaller = 4 * layout.size < rows * columns * dtype.itemsize
        return layout if smaller or self.always_factor else None

    @torch.no_grad()
    def compress(self, name: str, gradient: Tensor, layout: Layout, statistics: Statistics) -> Tensor:
        """The message of the next matrix of a stream; ``gradient`` is only read.

        Args:
            statistics: norms, ``skipped`` and the time are added to it.

        Raises:
            UserError: the stream's state is of matrices of another shape or rank.
        """
        started = mark(gradient.device)
        message = self._compress(name, gradient, layout, statistics)
        statistics.compress.add(started, mark(gradient.device))
        return message

    def _compress(self, name: str, gradient: Tensor, layout: Layout, statistics: Statistics) -> Tensor:
        way = self._on_cpu if host_decides(gradient.device) else self._on_gpu
        error, factor = self._state(name, gradient.device, layout)
        g, size = gradient.reshape(layout.rows, layout.columns), gradient.numel()
        if self._scratch.numel() < size or self._scratch.device != g.device:  # which all streams share
            self._scratch = torch.empty(size, dtype=torch.float32, device=g.device)
        m = self._scratch[:size].view(g.shape).copy_(g)
        gradient_sq = square_sums([m[None]])[0][0]
        input_sq = square_sums([m.add_(error)[None]])[0][0]
        message, ok = layout.empty(g.device), input_sq.isfinite()
        p, q = layout.split(message)
        if not way.decides or ok:
            projected = m @ factor.mT
            basis = torch.empty_like(projected)
            way.orthonormalise([projected[None]], [basis[None]])
            p.copy_(basis)
            right = p.mT @ m
            q.copy_(right.mT)
            ok = ok & message.isfinite().all()
        if way.decides and not ok:
            statistics.skipped += 1
            return message.fill_(math.nan)
        received = torch.empty_like(g, memory_format=torch.contiguous_format)
        layout.reconstruct(message, received)
        error_sq = square_sums([m.sub_(received)[None]])[0][0]
        errors, factors = self._before
        kept = torch.empty_like(error) if error is errors.get(name) else error
        self.errors[name] = torch.where(ok, m, error, out=kept)
        factor = factor.clone() if factor is factors.get(name) else factor
        way.keep([right[None]], [factor[None]], ok)
        self.factors[name] = factor
        norms = gradient_sq, input_sq, error_sq
        statistics.add_norms(*(float(x) if way.decides else torch.where(ok, x, 0.0) for x in norms))
        if not way.decides:
            message.masked_fill_(~ok, math.nan)
            statistics.skipped = statistics.skipped + (~ok).int()
        return message

    def decompress(self, message: Tensor, layout: Layout, out: Tensor, statistics: Statistics) -> None:
        """Reconstruct a matrix as :meth:`Layout.reconstruct`, timed."""
        started = mark(out.device)
        layout.reconstruct(message, out)
        statistics.decompress.add(started, mark(out.device))

    def _state(self, name: str, device: torch.device, layout: Layout) -> tuple[Tensor, Tensor]:
        """E and Q^T of a stream, on the gradient's device."""
        rows, columns, rank = layout.rows, layout.columns, layout.rank
        factor, error = self.factors.get(name), self.errors.get(name)
        if factor is None or (factor.shape[1] == columns and factor.shape[0] != rank):
            # The first time; else the one of a run that goes on with another rank.
            fresh = partial(random_factor, self.seed, int(factor is not None), name, columns)
            factor = of_rank(None if factor is None else factor.mT, rank, fresh).mT.contiguous()
        if error is None:
            error = torch.zeros(rows, columns, dtype=torch.float32, device=device)
        for kind, tensor, shape in (("error feedback", error, (rows, columns)), ("factor", factor, (rank, columns))):
            if tensor.shape != shape:
                message = f"the {kind} of {name} is {tuple(tensor.shape)}, but should be {shape}"
                raise UserError(message, fix="load the state of this very model, micro-batch size and rank")
        return error.to(device), factor.to(device)

    def rescale(self, factor: float) -> None:
        """Multiply error feedback by ``factor``, as gradients are from now on."""
        for error in self.errors.values():
            error.mul_(factor)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the error feedback and the warm start of every stream."""
        return {"errors": clones(self.errors), "factors": clones(self.factors)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.errors, self.factors = clones(state["errors"]), clones(state["factors"])
