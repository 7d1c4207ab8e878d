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
stands for what of it got across (:mod:`edgc.compressors.powersgd.wire`), so E_w keeps the rest.

One-sided, a step sends only one factor and the other is the orthonormalised one of the step before: Q^ known and
P_w = M_w Q^ sent, E_w = M_w - P_w Q^^T; then P^ known and Q_w = M_w^T P^ sent; and so on in turn.

The statistics ||E_w||^2 = ||M_w||^2 - ||Q_w||^2 and the singular values of M^, which are those of Q, cost no pass over
a matrix.

Of an unused matrix (:class:`~edgc.compressors.base.Gradient`) a worker sends M_w Q = 0 and Q_w = 0, so E_w = M_w.

E and Q change after the last message, and only if everything in the call's messages was finite: otherwise the call's
gradients all become NaN, on every worker, and the state is as it was.
"""

from __future__ import annotations

import math
from collections.abc import Container, Generator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgc.compressors.base import Gradient, KeepsErrors, Statistics, Steps, compressible, finite, square_sums
from edgc.compressors.passes import Factors, Members
from edgc.compressors.powersgd import LowRankConfig, saves_bytes
from edgc.compressors.powersgd.state import State
from edgc.compressors.powersgd.wire import blocks_of
from edgc.compressors.powersgd.workspace import RIGHT, Group, Spectrum, Workspace, grouped, ways
from edgc.runtime.channel import Channel

Tensors = Sequence[Tensor]
# Whether the messages before were finite, and the messages to look at.
Sent = Generator[None, None, tuple[Tensor, Tensors]]


class PowerSGD(KeepsErrors):
    """Low-rank reduction of matrices; vectors, small matrices and ranks that save nothing go dense.

    Attributes:
        errors: E by name, m x n.
        always_factor: also factor where that sends more bytes than the matrix (for tests).
    """

    always_factor = False

    def __init__(self, config: LowRankConfig) -> None:
        self.min_elements = config.min_compression_elements
        self.factor_dtype, self.one_sided = config.factor_dtype, config.one_sided
        self._orthonormal_q = config.orthonormal_q
        self._state = State(config)
        self.errors = self._state.errors
        self.held = {}
        self._workspaces: dict[str, Workspace] = {}
        self._last: dict[str, tuple[Group, int]] = {}
        self._on_cpu, self._on_gpu = ways()

    @property
    def factors(self) -> dict[str, Tensor]:
        """Q by name, n x r (one-sided: or P, m x r), with a norm of about one."""
        return self._state.factors

    def waits(self, rank: int | None) -> int:
        if rank is None:
            return 1
        return (1 if self.one_sided else 2) * (2 if blocks_of(self.factor_dtype) else 1)

    def steps(self, gradients: Sequence[Gradient], channel: Channel, rank: int | None, statistics: Statistics) -> Steps:
        work = self._workspace(gradients, rank)
        for gradient in gradients:
            self._last.pop(gradient.name, None)
            self.held.pop(gradient.name, None)
        plain = [gradients[i] for i in work.plain]
        drained = self._owed(plain)
        if drained:
            self._add_errors(drained)
        dense = [gradient.tensor for gradient in plain]
        if work.groups:
            members = [[gradients[i] for i in places] for places in work.factored]
            reduce = self._one_sided if self.one_sided else self._two_sided
            arrived = yield from reduce(work, members, dense, channel)
            ok = self._finish(work, members, *arrived, statistics)
        else:
            work.dense.start(dense, channel)
            yield
            # Without a state to protect, what is not finite may go where it goes.
            ok = finite(work.dense.messages if drained or self.deferred else (), work.device)
        if work.way.decides and not ok:
            for gradient in gradients:
                gradient.tensor.fill_(math.nan)
            statistics.skipped += 1
            return
        if not work.way.decides:
            for message in work.dense.messages:
                message.masked_fill_(~ok, math.nan)
            statistics.skipped = statistics.skipped + (~ok).int()
        if plain:
            work.dense.unpack()
        if drained:
            self._forget(drained, ok)

    def _two_sided(self, work: Workspace, members: Members, dense: Tensors, channel: Channel) -> Sent:
        decides, passes, orthonormalise = work.way
        for at in work.together:
            groups, mine = work.groups[at], members[at]
            apart = [group for group in groups if group.start is not group.right]
            if apart:
                # Quantised, the columns of P are to be of one scale.
                orthonormalise([group.right.mT for group in apart], [group.start.mT for group in apart])
            passes.load(groups, mine, [group.start for group in groups], [group.summed for group in groups])
            self._hold(mine, [group.summed for group in groups])
        ok = finite((yield from self._first_message(work, work.first, dense, channel)), work.device)
        if decides and not ok:
            return ok, ()
        # Backwards: what was loaded last is still in the cache.
        for at in reversed(work.together):
            groups = work.groups[at]
            orthonormalise([group.summed for group in groups], [group.basis for group in groups])
            for group in groups:
                passes.right_factor(group, group.basis, group.own)
            self._hold(members[at], [group.own for group in groups])
        work.second.copy_(work.own)
        if work.wire is None:
            channel.mean_(work.second)
            yield
        else:
            yield from work.wire.mean(work.second, channel)
        return ok, [work.second]

    def _one_sided(self, work: Workspace, members: Members, dense: Tensors, channel: Channel) -> Sent:
        _, passes, orthonormalise = work.way
        message, sent = work.lay_out_one_sided()
        for at in work.together:
            groups, mine = work.groups[at], members[at]
            right = [group.side == RIGHT for group in groups]
            factors = [group.factor(group.side) for group in groups]
            orthonormalise(
                [factor.mT if of else factor for factor, of in zip(factors, right, strict=True)],
                [group.basis.mT if of else group.basis for group, of in zip(groups, right, strict=True)],
            )
            rights = [group.basis if of else None for group, of in zip(groups, right, strict=True)]
            passes.load(groups, mine, rights, [group.own for group in groups])
            for group, of in zip(groups, right, strict=True):
                if not of:
                    passes.right_factor(group, group.basis, group.own)
            self._hold(mine, [group.own for group in groups])
        message.copy_(sent)
        messages = yield from self._first_message(work, message, dense, channel)
        return finite((), work.device), messages

    def _first_message(
        self, work: Workspace, factors: Tensor, dense: Tensors, channel: Channel
    ) -> Generator[None, None, Tensors]:
        """Average everything dense and, in the same message if they are sent in fp32, the first factors; returns what
        has arrived."""
        if work.wire is None:
            work.dense.start(dense, channel, factors.numel())
            yield
            return work.dense.messages
        work.dense.start(dense, channel)
        yield from work.wire.mean(factors, channel)
        return [*work.dense.messages, factors]

    def _holds(self, gradient: Gradient) -> bool:
        return gradient.unused and self._state.error_dtype is not None

    def _hold(self, members: Members, factors: Tensors) -> None:
        """This worker's part in the factors of unused matrices is zero, so that E = M; what is not finite is sent."""
        for group, factor in zip(members, factors, strict=True):
            for i, gradient in enumerate(group):
                if self._holds(gradient):
                    factor[i].mul_(0)

    def _finish(
        self, work: Workspace, members: Members, ok: Tensor, messages: Tensors, statistics: Statistics
    ) -> Tensor:
        """Write M^ and E, count, and keep the factor for the next step, if the last messages are finite, too."""
        owns, means = self._products(work.groups)
        ok = ok & finite(messages, work.device)
        decides, passes, _ = work.way
        if decides and not ok:
            return ok
        if not decides:
            # So the products are not finite on any worker, without anybody looking.
            (work.first if self.one_sided else work.second).masked_fill_(~ok, math.nan)
        sent = passes.square_sums([group.own for group in work.groups])
        left_over = [group.input_sq - own_sq for group, own_sq in zip(work.groups, sent, strict=True)]
        if work.wire is not None:
            # What rounding kept of this worker's factor was not sent.
            lost = [work.wire.kept_of(group.own) for group in work.groups]
            for group, kept, error_sq, kept_sq in zip(
                work.groups, lost, left_over, passes.square_sums(lost), strict=True
            ):
                error_sq.add_(kept_sq)
                group.own.sub_(kept)
        for at in work.together:
            groups = work.groups[at]
            errors_sq = passes.store(groups, owns[at], means[at], [of.clamp_(min=0) for of in left_over[at]], ok)
            norms = [[g.gradient_sq for g in groups], [g.input_sq for g in groups], errors_sq]
            sums = torch.stack([torch.cat(list(of)).sum() for of in norms])
            statistics.add_norms(*(sums.tolist() if decides else torch.where(ok, sums, 0.0).unbind()))
        for group in work.groups:
            self._last |= {name: (group, i) for i, name in enumerate(group.names)}
        self._then(partial(self._adopt, work, ok))
        held = {gradient.name: ok for group in members for gradient in group if self._holds(gradient)}
        if held:
            self._then(partial(self.held.update, held))
        return ok

    def _products(self, groups: Sequence[Group]) -> tuple[list[Factors], list[Factors]]:
        """Left and right factor of what this worker sent and of the mean, of every group."""
        turned = [self.one_sided and group.side == RIGHT for group in groups]
        owns = [(g.own, g.basis) if of else (g.basis, g.own) for g, of in zip(groups, turned, strict=True)]
        means = [(g.mean, g.basis) if of else (g.basis, g.mean) for g, of in zip(groups, turned, strict=True)]
        return owns, means

    def _adopt(self, work: Workspace, ok: Tensor) -> None:
        """Error feedback and warm start of the step become those of the next one."""
        for group in work.groups:
            if group.spare is not None and group.error is not None:
                group.error, group.spare = group.spare, group.error
                self.errors.update(zip(group.names, group.error, strict=True))
        factors = [group.factor(group.other) if self.one_sided else group.right for group in work.groups]
        replaced = work.way.passes.keep([group.mean for group in work.groups], factors, ok)
        if self.one_sided:
            # The next step begins with the other factor only if there is one: after a gradient of zeros or one that is
            # not finite there may be none yet.
            for group, of in zip(work.groups, replaced, strict=True):
                group.turn(of.all())
        if not work.registered:
            self._state.commit(work)

    def _workspace(self, gradients: Sequence[Gradient], rank: int | None) -> Workspace:
        key = (rank, *((g.name, g.tensor.shape, g.tensor.dtype, g.tensor.device, g.rank) for g in gradients))
        work = self._workspaces.get(gradients[0].name)
        if work is None or work.key != key:
            names = {gradient.name for gradient in gradients}
            self._discard(names)
            factored = [g for g in gradients if rank is not None and self._factors(g.tensor, g.rank or rank)]
            way = self._on_cpu if self._decides(gradients[0].tensor.device) else self._on_gpu
            groups = [
                self._state.group(members, members[0].rank or rank or 1, self.deferred)
                for members in grouped(factored, not way.decides, self._state.side)
            ]
            work = Workspace(gradients, groups, self.factor_dtype, self.one_sided, way, key, self._orthonormal_q)
            self._workspaces |= dict.fromkeys(names, work)
        elif not self._state.warm_start:
            for group in work.groups:
                self._state.begin(group)
        return work

    def _factors(self, gradient: Tensor, rank: int) -> bool:
        bits = 8 * gradient.element_size()
        if not compressible(gradient.shape, self.min_elements, bits):
            return False
        return self.always_factor or saves_bytes(gradient.shape, rank, self.factor_dtype, bits)

    def _discard(self, names: set[str]) -> None:
        """A name has one workspace: those with any of these names are of buckets, ranks or errors that are gone."""
        gone = {id(self._workspaces[name]) for name in names & self._workspaces.keys()}
        self._workspaces = {n: w for n, w in self._workspaces.items() if id(w) not in gone}

    def _drain(self, gradients: Sequence[Gradient]) -> None:
        self._discard({gradient.name for gradient in gradients if gradient.name in self.errors})
        super()._drain(gradients)

    def adopt_errors(self, other: KeepsErrors) -> None:
        """Copy what another method has kept of gradients that this one has nothing of; it is sent from now on."""
        if (dtype := self._state.error_dtype) is not None:
            self._discard(set(other.errors))
            self.errors.update({name: tensor.to(dtype, copy=True) for name, tensor in other.errors.items()})
            self.held.update(other.held)

    def sent_sq(self, name: str) -> Tensor | None:
        """||M^||^2, that of the averaged factor; up to the rounding of factors M^ is a projection."""
        if name not in self._last or name in self.held:
            return None
        group, i = self._last[name]
        return square_sums(group.mean[i : i + 1])[0]

    def spectra(self, names: Container[str] | None = None) -> dict[str, Spectrum]:
        """Spectra of the mean of the matrices that were factored in their last reduction, of all or of ``names``;
        computed when asked for, and before the next reduction of the same gradients.

        In alphabetical order: sums over them are to repeat after a resume, whichever matrix was seen first.
        """
        last = sorted(self._last.items(), key=lambda item: item[0])
        return {name: group.spectrum(i) for name, (group, i) in last if names is None or name in names}

    def state_dict(self) -> dict[str, Any]:
        return self._state.to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state.load(state)
        self._workspaces, self._last, self.held = {}, {}, {}
