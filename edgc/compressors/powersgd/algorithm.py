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
differences between workers would pile up in the errors and never drain. Where factors are sent in fewer bits, Q_w
stands for what of it got across (:mod:`edgc.compressors.powersgd.messages`), so E_w keeps the rest.

One-sided, a step sends only one factor and the other is the orthonormalised one of the step before: Q^ known and
P_w = M_w Q^ sent, E_w = M_w - P_w Q^^T; then P^ known and Q_w = M_w^T P^ sent; and so on in turn.

The statistics ||E_w||^2 = ||M_w||^2 - ||Q_w||^2 and the singular values of M^, which are those of Q, cost no pass over
a matrix.

E and Q change after the last message, and only if everything in the call's messages was finite: otherwise the call's
gradients all become NaN, on every worker, and the state is as it was. Under reduced precision of fp32 products
(``torch.backends.mkldnn.matmul.fp32_precision``) P^ Q^T and P^ Q_w^T are rounded too, and sent plus kept is what came
in only up to that.
"""

from __future__ import annotations

import math
from collections.abc import Container, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgc.compressors.base import Compressor, Gradient, Statistics, Steps
from edgc.compressors.channel import Channel
from edgc.compressors.norms import square_sums
from edgc.compressors.powersgd import FACTOR_BITS, FACTOR_DTYPES
from edgc.compressors.powersgd.matrices import Batched, Passes, RowBlocks
from edgc.compressors.powersgd.messages import blocks_of
from edgc.compressors.powersgd.orthogonal import Orthonormal
from edgc.compressors.powersgd.state import State, keep
from edgc.compressors.powersgd.workspace import RIGHT, Group, Workspace, grouped, signature
from edgc.compressors.tensors import compressible, finite
from edgc.errors import UserError
from edgc.measurement.spectral import MatrixSpectrum
from edgc.runtime.device import host_decides

_ERROR_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def mean_bits(matrices: Iterable[tuple[Sequence[int], int]]) -> float:
    """Mean bits of an entry of matrices of these shapes and bits; 32 without any."""
    entries = bits = 0
    for (rows, columns), each in matrices:
        entries, bits = entries + rows * columns, bits + rows * columns * each
    return bits / entries if entries else 32


def saves_bytes(
    shape: Sequence[int], rank: int, factor_dtype: str = "fp32", gradient_bits: float = 32
) -> bool:
    """Whether the two factors of this rank, scales included, are smaller than the matrix in its own type."""
    factors = min(rank, *shape) * (shape[0] + shape[1]) * FACTOR_BITS[factor_dtype]
    return factors < shape[0] * shape[1] * gradient_bits


class PowerSGD(Compressor):
    """Low-rank reduction of matrices; vectors, small matrices and ranks that save nothing go dense.

    Args:
        min_elements: matrices with fewer entries are sent dense.
        error_feedback, warm_start: off only to show what they are worth.
        always_factor: also factor where that sends more bytes than the matrix (for tests).
        seed: of the first Q and of columns appended when the rank grows; must agree on all workers.
        factor_dtype: what P and Q are sent in: ``fp32``, ``bf16``, ``int8`` or ``int4``.
        one_sided: send P and Q in turn, one reduction a step.
        error_dtype: what E is kept in: ``fp32`` or ``bf16``, rounded to nearest.

    Raises:
        UserError: an option has another value.
    """

    def __init__(
        self,
        *,
        min_elements: int = 1024,
        error_feedback: bool = True,
        warm_start: bool = True,
        always_factor: bool = False,
        seed: int = 0,
        factor_dtype: str = "fp32",
        one_sided: bool = False,
        error_dtype: str = "fp32",
    ) -> None:
        for key, value, allowed in (
            ("factor_dtype", factor_dtype, FACTOR_DTYPES),
            ("error_dtype", error_dtype, tuple(_ERROR_DTYPES)),
        ):
            if value not in allowed:
                raise UserError(f"{key} = {value!r} is not valid", fix=f"use one of {', '.join(allowed)}")
        self.min_elements = min_elements
        self.always_factor = always_factor
        self.factor_dtype = factor_dtype
        self.one_sided = one_sided
        self._state = State(
            error_dtype=_ERROR_DTYPES[error_dtype] if error_feedback else None,
            warm_start=warm_start,
            seed=seed,
            one_sided=one_sided,
        )
        self._workspaces: dict[str, Workspace] = {}
        self._last: dict[str, tuple[Group, int]] = {}
        self._orthonormal = Orthonormal()
        self._on_cpu, self._on_gpu = RowBlocks(), Batched()

    @property
    def errors(self) -> dict[str, Tensor]:
        """E by name, m x n."""
        return self._state.errors

    @property
    def factors(self) -> dict[str, Tensor]:
        """Q by name, n x r (one-sided: or P, m x r), with a norm of about one."""
        return self._state.factors

    @property
    def kept(self) -> Mapping[str, Tensor]:
        return self.errors

    def sent_sq(self, name: str) -> Tensor | None:
        """||M^||^2, that of the averaged factor; up to the rounding of factors M^ is a projection."""
        if name not in self._last:
            return None
        group, i = self._last[name]
        return square_sums(group.mean[i : i + 1])[0]

    def waits(self, rank: int | None) -> int:
        if rank is None:
            return 1
        return (1 if self.one_sided else 2) * (2 if blocks_of(self.factor_dtype) else 1)

    def steps(
        self, gradients: Sequence[Gradient], channel: Channel, rank: int | None, statistics: Statistics
    ) -> Steps:
        work = self._workspace(gradients, rank)
        for gradient in gradients:
            self._last.pop(gradient.name, None)
        plain = [gradients[i] for i in work.plain]
        drained = [gradient for gradient in plain if gradient.name in self.errors]
        self._add_errors(drained)
        dense = [gradient.tensor for gradient in plain]
        if work.groups:
            work.bind(gradients)
            reduce = self._one_sided if self.one_sided else self._two_sided
            ok = yield from reduce(work, dense, channel, statistics)
        else:
            work.dense.start(dense, channel, 0)
            yield
            # Without a state to protect, what is not finite may go where it goes.
            ok = finite(work.dense.messages if drained or self.deferred else ())
        if self._gives_up(ok):
            for gradient in gradients:
                gradient.tensor.fill_(math.nan)
            statistics.skipped += 1
            return
        if not self._decides(ok.device):
            for message in work.dense.messages:
                message.masked_fill_(~ok, math.nan)
            statistics.skipped = statistics.skipped + (~ok).int()
        work.dense.unpack()
        self._forget(drained, ok)

    def _drain(self, gradients: Sequence[Gradient]) -> None:
        drained = [gradient for gradient in gradients if gradient.name in self.errors]
        self._add_errors(drained)
        self._forget(drained, finite(()))
        self._discard({gradient.name for gradient in drained})

    def _add_errors(self, gradients: Sequence[Gradient]) -> None:
        for gradient in gradients:
            # A state may have been loaded on another device.
            error = self.errors[gradient.name] = self.errors[gradient.name].to(gradient.tensor.device)
            gradient.tensor.add_(error)

    def _forget(self, gradients: Sequence[Gradient], ok: Tensor) -> None:
        """What was kept of ``gradients`` has been sent, if ``ok``."""
        for gradient in gradients:
            if self.deferred or self._decides(ok.device):
                self._then(partial(self._state.forget, gradient.name))
            else:
                self.errors[gradient.name].masked_fill_(ok, 0)

    def rescale(self, factor: float) -> None:
        for error in self.errors.values():
            error.mul_(factor)

    def adopt_errors(self, errors: Mapping[str, Tensor]) -> None:
        """Copy what another method has kept of gradients that this one has nothing of; it is sent from now on."""
        if self._state.error_dtype is not None:
            dtype = self._state.error_dtype
            self._discard(set(errors))
            self.errors.update({name: tensor.to(dtype, copy=True) for name, tensor in errors.items()})

    def _two_sided(
        self, work: Workspace, dense: Sequence[Tensor], channel: Channel, statistics: Statistics
    ) -> Generator[None, None, Tensor]:
        passes = self._passes(work.first.device)
        for group in work.groups:
            if group.start is not group.factors[RIGHT]:
                # Quantised, the columns of P are to be of one scale.
                self._orthonormalise(group.factor(RIGHT).mT, group.start.mT)
            passes.load(group.x, group.start, group.summed)
        yield from work.send_first(dense, work.first, channel)
        ok = work.first_finite(work.first)
        if self._gives_up(ok):
            return ok
        # Backwards: what was loaded last is still in the cache.
        for group in reversed(work.groups):
            self._orthonormalise(group.summed, group.basis)
            passes.right_factor(group.x, group.basis, group.own)
        left_over = [group.x.input_sq - square_sums(group.own) for group in work.groups]
        work.second.copy_(work.own)
        yield from work.wire.mean(work.second, channel)
        ok = ok & finite([work.second])
        if self._gives_up(ok):
            return ok
        self._finish(work, left_over, ok, statistics)
        return ok

    def _one_sided(
        self, work: Workspace, dense: Sequence[Tensor], channel: Channel, statistics: Statistics
    ) -> Generator[None, None, Tensor]:
        passes = self._passes(work.first.device)
        message, sent = work.lay_out_one_sided()
        for group in work.groups:
            factor = group.factor(group.side)
            if group.side == RIGHT:
                self._orthonormalise(factor.mT, group.basis.mT)
                passes.load(group.x, group.basis, group.own)
            else:
                self._orthonormalise(factor, group.basis)
                passes.load(group.x, None, None)
                passes.right_factor(group.x, group.basis, group.own)
        left_over = [group.x.input_sq - square_sums(group.own) for group in work.groups]
        message.copy_(sent)
        yield from work.send_first(dense, message, channel)
        ok = work.first_finite(message)
        if self._gives_up(ok):
            return ok
        self._finish(work, left_over, ok, statistics)
        return ok

    def _finish(
        self, work: Workspace, left_over: Sequence[Tensor], ok: Tensor, statistics: Statistics
    ) -> None:
        """Write M^ and E, count, and keep the factor for the next step."""
        decides = self._decides(ok.device)
        work.subtract_kept(left_over)
        for group, error_sq in zip(work.groups, left_over, strict=True):
            own, mean, side = (group.basis, group.own), (group.basis, group.mean), group.side
            if self.one_sided:
                own, mean = (own[::-1], mean[::-1]) if side == RIGHT else (own, mean)
                side = group.other
            error_sq = self._passes(ok.device).store(group.x, own, mean, error_sq.clamp_(min=0), ok)
            for key, norms in (
                ("gradient_sq", group.x.gradient_sq),
                ("input_sq", group.x.input_sq),
                ("error_sq", error_sq),
            ):
                total = torch.where(ok, norms.sum(), 0.0)
                setattr(statistics, key, getattr(statistics, key) + (float(total) if decides else total))
            self._then(partial(_adopt, group, side, ok, decides))
            self._last |= {name: (group, i) for i, name in enumerate(group.x.names)}
        self._then(partial(self._state.commit, work))

    # On a CPU the host looks whether a message is finite, and decides. On a GPU it would have to wait; there
    # everything goes on, and writes are masked.

    def _decides(self, device: torch.device) -> bool:
        return host_decides(device)

    def _gives_up(self, ok: Tensor) -> bool:
        return self._decides(ok.device) and not ok

    def _passes(self, device: torch.device) -> Passes:
        return self._on_cpu if self._decides(device) else self._on_gpu

    def _orthonormalise(self, x: Tensor, out: Tensor) -> None:
        if self._decides(x.device):
            self._orthonormal(x, out)
        else:
            self._orthonormal.without_decisions(x, out)

    def _workspace(self, gradients: Sequence[Gradient], rank: int | None) -> Workspace:
        work = self._workspaces.get(gradients[0].name)
        if work is None or work.signature != signature(gradients, rank):
            names = {gradient.name for gradient in gradients}
            self._discard(names)
            factored = [g for g in gradients if rank is not None and self._factors(g.tensor, g.rank or rank)]
            batches = not self._decides(gradients[0].tensor.device)
            members = grouped(factored, batches, self._state.side)
            groups = [
                self._state.group(group, group[0].rank or rank or 1, self.deferred) for group in members
            ]
            work = Workspace(gradients, rank, groups, self.factor_dtype, self.one_sided)
            self._workspaces |= dict.fromkeys(names, work)
        elif not self._state.warm_start:
            for group in work.groups:
                self._state.begin(group)
        return work

    def _discard(self, names: set[str]) -> None:
        """A name has one workspace: those with any of these names are of buckets, ranks or errors that are gone."""
        gone = {id(self._workspaces[name]) for name in names & self._workspaces.keys()}
        self._workspaces = {n: w for n, w in self._workspaces.items() if id(w) not in gone}

    def _factors(self, gradient: Tensor, rank: int) -> bool:
        if not compressible(gradient.shape, self.min_elements):
            return False
        bits = 8 * gradient.element_size()
        return self.always_factor or saves_bytes(gradient.shape, rank, self.factor_dtype, bits)

    def spectra(self, names: Container[str] | None = None) -> dict[str, MatrixSpectrum]:
        """Spectra of the mean of the matrices that were factored in their last reduction, of all or of ``names``;
        computed when asked for.

        The singular values are those of M^, from the averaged factor, the same on all workers. ``input_sq`` adds to
        their squares what this worker's own approximation leaves of its M_w: with error feedback it is for the caller
        to put what is missing of the mean in its place (:mod:`edgc.measurement.mean_error`), which is less.

        What they are computed from is overwritten by the next reduction of the same gradients. In alphabetical order:
        sums over them are to repeat after a resume, whichever matrix was seen first.
        """
        found = {}
        for name, (group, i) in sorted(self._last.items(), key=lambda item: item[0]):
            if names is None or name in names:
                mean = group.mean[i].double()
                gram = mean.mT @ mean if mean.shape[1] == group.x.rank else mean @ mean.mT
                values = torch.linalg.eigvalsh(gram).clamp(min=0).flip(0).tolist()
                left = float(group.x.input_sq[i] - square_sums(group.own[i : i + 1])[0])
                found[name] = MatrixSpectrum(group.x.shape, values, math.fsum(values) + max(0.0, left))
        return found

    def state_dict(self) -> dict[str, Any]:
        return self._state.to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state.load(state)
        self._workspaces, self._last = {}, {}


def _adopt(group: Group, side: int, ok: Tensor, decides: bool) -> None:
    """Error feedback and warm start of the step become those of the next one."""
    x = group.x
    if x.spare is not None:
        x.error, x.spare = x.spare, x.error
    replaced = keep(group.mean, group.factor(side), ok, decides)
    # One-sided, the next step begins with the other factor only if there is one: after a gradient of zeros or one that
    # is not finite there may be none yet.
    if side != group.side:
        group.turn(replaced)
