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
stands for what of it got across (:class:`Wire`), so E_w keeps the rest.

One-sided, a step sends only one factor and the other is the orthonormalised one of the step before: Q^ known and
P_w = M_w Q^ sent, E_w = M_w - P_w Q^^T; then P^ known and Q_w = M_w^T P^ sent; and so on in turn.

The statistics ||E_w||^2 = ||M_w||^2 - ||Q_w||^2 and the singular values of M^, which are those of Q, cost no pass over
a matrix.

Of an unused matrix (:class:`~edgc.compressors.base.Gradient`) a worker sends M_w Q = 0 and Q_w = 0, so E_w = M_w.

PowerSGD+ averages every T-th M_w as it is, and Q becomes the leading right singular vectors of that mean.

E and Q change after the last message, and only if everything in the call's messages was finite: otherwise the call's
gradients all become NaN, on every worker, and the state is as it was.
"""

from __future__ import annotations

import math
from collections.abc import Container, Generator, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from edgc.compressors.base import Gradient, KeepsErrors, Statistics, Steps, compressible, finite, square_sums
from edgc.compressors.dense import Dense
from edgc.compressors.powersgd import QUANTISED_BITS, LowRankConfig, saves_bytes
from edgc.compressors.powersgd.passes import LEFT, RIGHT, Batched, Group, Members, RowBlocks, Spectrum
from edgc.compressors.powersgd.state import State
from edgc.compressors.quantization import Blocks, QuantisedMean
from edgc.runtime.channel import Channel
from edgc.runtime.device import host_decides

Tensors = Sequence[Tensor]
Arrived = Generator[None, None, Tensor]


class PowerSGD(KeepsErrors):
    """Low-rank reduction of matrices; vectors, small matrices and ranks that save nothing go dense.

    Args:
        refresh_every: T, of which one reduction is exact; 0 for none.

    Attributes:
        errors: E by name, m x n.
        always_factor: also factor where that sends more bytes than the matrix (for tests).
    """

    always_factor = False
    has_rank = True

    def __init__(self, config: LowRankConfig, refresh_every: int = 0) -> None:
        self.config, self.refresh_every = config, refresh_every
        self.one_sided, self.error_feedback = config.one_sided, config.error_feedback
        self._state = State(config)
        self.errors = self._state.errors
        self.held = {}
        self._workspaces: dict[str, Workspace] = {}
        self._last: dict[str, tuple[Group, int]] = {}
        self._on_cpu, self._on_gpu = RowBlocks(), Batched()

    @property
    def factors(self) -> dict[str, Tensor]:
        """Q by name, n x r (one-sided: or P, m x r), with a norm of about one."""
        return self._state.factors

    def waits(self, rank: int | None) -> int:
        if rank is None:
            return 1
        return (1 if self.one_sided else 2) * (2 if self.config.factor_dtype in QUANTISED_BITS else 1)

    def steps(self, gradients: Sequence[Gradient], channel: Channel, rank: int | None, statistics: Statistics) -> Steps:
        refreshes = rank is not None and self.refreshes(gradient.name for gradient in gradients)
        work = self._workspace(gradients, None if refreshes else rank)
        for gradient in gradients:
            self._last.pop(gradient.name, None)
            self.held.pop(gradient.name, None)
        plain = [gradients[i] for i in work.plain]
        drained = self._owed(plain)
        rests = self._add_errors(drained)
        dense = [gradient.tensor for gradient in plain]
        if work.groups:
            members = [[gradients[i] for i in places] for places in work.factored]
            average = self._one_sided if self.one_sided else self._two_sided
            ok = yield from average(work, members, dense, channel)
            self._finish(work, members, ok, statistics)
        else:
            work.dense.start(dense, channel)
            yield
            ok = finite(work.dense.messages, work.device)
        if work.passes.decides and not ok:
            for gradient in gradients:
                gradient.tensor.fill_(math.nan)
            statistics.skipped += 1
            return
        if not work.passes.decides:
            for message in work.dense.messages:
                message.masked_fill_(~ok, math.nan)
            statistics.skipped = statistics.skipped + (~ok).int()
        if plain:
            work.dense.unpack()
        self._forget(drained, rests, ok)
        if refreshes and rank is not None:
            matrices = [gradient for gradient in gradients if self.compresses(gradient.tensor, rank)]
            self._then(partial(self._state.renew, [g.name for g in gradients], self._state.leading(matrices, rank, ok)))

    def refreshes(self, names: Iterable[str]) -> bool:
        """True if the next reduction of these together is exact, and renews their warm starts."""
        return self.refresh_every > 0 and any(self._state.since.get(n, 0) >= self.refresh_every - 1 for n in names)

    def _two_sided(self, work: Workspace, members: Members, dense: Tensors, channel: Channel) -> Arrived:
        """Send both factors; returns if the messages were finite. If the first was not, there is no second."""
        passes = work.passes
        for at in work.together:
            groups, gradients = work.groups[at], members[at]
            apart = [group for group in groups if group.start is not group.right]
            if apart:
                # Quantised, the columns of P are to be of one scale.
                passes.orthonormalise([g.right.mT for g in apart], [g.start.mT for g in apart])
            passes.load(groups, gradients)
            self._hold(gradients, [group.summed for group in groups])
        ok = finite((yield from self._first_message(work, work.first, dense, channel)), work.device)
        if passes.decides and not ok:
            return ok
        # Backwards: what was loaded last is still in the cache.
        for at in reversed(work.together):
            groups = work.groups[at]
            passes.orthonormalise([group.summed for group in groups], [group.basis for group in groups])
            for group in groups:
                passes.right_factor(group)
            self._hold(members[at], [group.own for group in groups])
        work.second.copy_(work.own)
        if work.wire is None:
            channel.mean_(work.second)
            yield
        else:
            yield from work.wire.mean(work.second, channel)
        return ok & finite([work.second], work.device)

    def _one_sided(self, work: Workspace, members: Members, dense: Tensors, channel: Channel) -> Arrived:
        """Send the factor that the known one gives; returns if the message was finite."""
        passes, size = work.passes, work.lay_out_one_sided()
        for at in work.together:
            groups, gradients = work.groups[at], members[at]
            # Columns are orthonormal, which those of a right factor are rows of.
            turned = [group.side == RIGHT for group in groups]
            passes.orthonormalise(
                [f.mT if t else f for f, t in zip((g.factor(g.side) for g in groups), turned, strict=True)],
                [g.basis.mT if t else g.basis for g, t in zip(groups, turned, strict=True)],
            )
            passes.load(groups, gradients)
            for group in groups:
                if group.side == LEFT:
                    passes.right_factor(group)
            self._hold(gradients, [group.own for group in groups])
        message = work.first[:size].copy_(work.own[:size])
        return finite((yield from self._first_message(work, message, dense, channel)), work.device)

    def _first_message(
        self, work: Workspace, factors: Tensor, dense: Tensors, channel: Channel
    ) -> Generator[None, None, Tensors]:
        """Average everything dense and, in the same message if they are sent in fp32, the first factors; returns the
        messages."""
        if work.wire is None:
            work.dense.start(dense, channel, factors.numel())
            yield
            return work.dense.messages
        work.dense.start(dense, channel)
        yield from work.wire.mean(factors, channel)
        return [*work.dense.messages, factors]

    def _hold(self, members: Members, factors: Tensors) -> None:
        """This worker's part in the factors of unused matrices is zero, so that E = M; what is not finite is sent."""
        for group, factor in zip(members, factors, strict=True):
            for i, gradient in enumerate(group):
                if self._holds(gradient):
                    factor[i].mul_(0)

    def _finish(self, work: Workspace, members: Members, ok: Tensor, statistics: Statistics) -> None:
        """Write M^ and E, count, and keep the factor for the next step, if all messages were finite."""
        passes = work.passes
        if passes.decides and not ok:
            return
        if not passes.decides:
            # So the products are not finite on any worker, without anybody looking.
            work.second.masked_fill_(~ok, math.nan)
        own_sq = square_sums([group.own for group in work.groups])
        remaining_sq = [group.input_sq - sent_sq for group, sent_sq in zip(work.groups, own_sq, strict=True)]
        if work.wire is not None:
            # What rounding kept of this worker's factor was not sent.
            lost = [work.wire.kept_of(group.own) for group in work.groups]
            for group, rounding, error_sq, sq in zip(work.groups, lost, remaining_sq, square_sums(lost), strict=True):
                error_sq.add_(sq)
                group.own.sub_(rounding)
        for at in work.together:
            groups = work.groups[at]
            errors_sq = passes.store(groups, [sq.clamp_(min=0) for sq in remaining_sq[at]], ok)
            norms = [[g.gradient_sq for g in groups], [g.input_sq for g in groups], errors_sq]
            sums = torch.stack([torch.cat(list(sq)).sum() for sq in norms])
            statistics.add_norms(*(sums.tolist() if passes.decides else torch.where(ok, sums, 0.0).unbind()))
        for group in work.groups:
            self._last |= {name: (group, i) for i, name in enumerate(group.names)}
        self._then(partial(self._adopt, work, ok))
        held = {gradient.name: ok for group in members for gradient in group if self._holds(gradient)}
        if held:
            self._then(partial(self.held.update, held))

    def _adopt(self, work: Workspace, ok: Tensor) -> None:
        """Error feedback and warm start of the step become those of the next one."""
        for group in work.groups:
            if group.error is not None and group.spare is not None:
                group.error, group.spare = group.spare, group.error
                self.errors.update(zip(group.names, group.error, strict=True))
        factors = [group.factor(group.sent) for group in work.groups]
        replaced = work.passes.keep([group.mean for group in work.groups], factors, ok)
        if self.one_sided:
            # The next step begins with the other factor only if there is one: after a gradient of zeros or one that is
            # not finite there may be none yet.
            for group, flags in zip(work.groups, replaced, strict=True):
                group.turn(flags.all())
        if not work.registered:
            self._state.commit(work.groups)
            work.registered = True
        if self.refresh_every:
            self._state.count(work.groups)

    def _workspace(self, gradients: Sequence[Gradient], rank: int | None) -> Workspace:
        key = (rank, *((g.name, g.tensor.shape, g.tensor.dtype, g.tensor.device) for g in gradients))
        work = self._workspaces.get(gradients[0].name)
        if work is None or work.key != key:
            names = {gradient.name for gradient in gradients}
            self._discard(names)
            factored = [g for g in gradients if rank is not None and self.compresses(g.tensor, rank)]
            passes = self._on_cpu if host_decides(gradients[0].tensor.device) else self._on_gpu
            groups = self._state.groups(factored, rank or 1, batched=not passes.decides)
            work = Workspace(gradients, groups, self.config, passes, key)
            self._workspaces |= dict.fromkeys(names, work)
        return work

    def compresses(self, tensor: Tensor, rank: int) -> bool:
        bits = 8 * tensor.element_size()
        if not compressible(tensor.shape, self.config.min_compression_elements, bits):
            return False
        return self.always_factor or saves_bytes(tensor.shape, rank, self.config.factor_dtype, bits)

    def _discard(self, names: set[str]) -> None:
        """A name has one workspace: those with any of these names are of buckets, ranks or errors that are gone."""
        gone = {id(self._workspaces[name]) for name in names & self._workspaces.keys()}
        self._state.release([name for name, work in self._workspaces.items() if id(work) in gone])
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
        return square_sums([group.mean[i : i + 1]])[0][0]

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


class Workspace:
    """Memory of the reductions of the same gradients at the same rank: allocated at the first, the same at later ones.

    Several reductions may be under way at once; they share no names and so no workspace.

    Args:
        gradients: of the first such call.
        groups: of the gradients that are sent as factors, in the order of their messages.
        key: what the workspace depends on: names, shapes, types and ranks.

    Attributes:
        registered: whether the compressor's state refers to this workspace for good.
        together: which groups the passes are given at once: on a CPU one, which then is in the cache, on a GPU all.
        dense: messages of the gradients that are not factored, :attr:`plain` their positions; :attr:`factored` those of
            every group.
        wire: what factors are sent through; None where they are sent as they are, in fp32.
        first, second: flat messages of factors; one-sided the same one.
        basis, own: flat buffers of bases, and of this worker's part of the second message, laid out like it.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        groups: Sequence[Group],
        config: LowRankConfig,
        passes: RowBlocks,
        key: object,
    ) -> None:
        self.groups, self.passes, self.key = groups, passes, key
        self.registered = False
        ends = range(len(groups) + 1) if passes.decides else (0, len(groups))
        self.together = [slice(*pair) for pair in pairwise(ends)]
        places = {gradient.name: i for i, gradient in enumerate(gradients)}
        self.factored = [[places[name] for name in group.names] for group in groups]
        members = {i for group in self.factored for i in group}
        self.plain = [i for i in range(len(gradients)) if i not in members]
        device = self.device = gradients[0].tensor.device
        lefts, rights = [LEFT] * len(groups), [RIGHT] * len(groups)
        sizes = self._sizes(lefts), self._sizes(rights)
        # One-sided, every matrix may have either of its factors sent.
        first, second = [sum(map(max, *sizes))] * 2 if config.one_sided else map(sum, sizes)

        def flat(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.float32, device=device)

        in_message = config.factor_dtype == "fp32"
        self.dense = Dense([gradients[i].tensor for i in self.plain], first if in_message else 0, device)
        self.first = self.dense.room if in_message and groups else flat(first)
        self.second = self.first if config.one_sided else flat(second)
        self.basis, self.own = flat(first), flat(second)
        bits = QUANTISED_BITS.get(config.factor_dtype)
        # Blocks of a quantiser run down the columns of a factor.
        self._by_columns = bits is not None
        self.wire = None if in_message else Wire(max(first, second), device, Blocks(bits) if bits else None)
        if config.one_sided:
            return
        self._carve("summed", self.first, lefts)
        self._carve("basis", self.basis, lefts)
        self._carve("own", self.own, rights)
        self._carve("mean", self.second, rights)
        if bits if config.orthonormal_q is None else config.orthonormal_q:
            self._carve("start", flat(second), rights)
        else:
            for group in groups:
                group.start = group.right

    def lay_out_one_sided(self) -> int:
        """Place what the sides that are next need; returns the size of the message."""
        sent = [group.sent for group in self.groups]
        self._carve("basis", self.basis, [group.side for group in self.groups])
        self._carve("own", self.own, sent)
        self._carve("mean", self.first, sent)
        for group in self.groups:
            group.start, group.summed = group.basis, group.own
        return sum(self._sizes(sent))

    def _sizes(self, sides: Sequence[int]) -> list[int]:
        return [len(g.names) * g.rank * g.shape[side] for g, side in zip(self.groups, sides, strict=True)]

    def _carve(self, name: str, flat: Tensor, sides: Sequence[int]) -> None:
        """Give every group its part of a flat buffer, one after another."""
        sizes = self._sizes(sides)
        for group, side, part in zip(self.groups, sides, flat[: sum(sizes)].split(sizes), strict=True):
            count, rank, length = len(group.names), group.rank, group.shape[side]
            if side == RIGHT:
                view = part.view(count, rank, length)
            elif self._by_columns:
                view = part.view(count, rank, length).mT
            else:
                view = part.view(count, length, rank)
            setattr(group, name, view)


class Wire:
    """The mean of flat fp32 vectors of up to ``elements`` entries, sent in bf16 or, with ``blocks``, quantised.

    What a worker contributes is then its vector rounded to that type; the rounding goes to ``kept``. bf16 is
    all-reduced, and the reduction itself rounds too, its partial sums and the mean: by at most 2^-8 of each sum,
    unbiased and the same on all workers, known to nobody and therefore kept by nobody. It is lost once and does not
    pile up. Quantised factors are summed in fp32 and lose nothing: whoever owns a shard of the sum keeps what rounding
    the mean once more costs (:mod:`edgc.compressors.quantization`).

    All buffers live as long as the object.

    Attributes:
        kept: what this worker's vector had and did not get across, after :meth:`mean`.
    """

    def __init__(self, elements: int, device: torch.device, blocks: Blocks | None) -> None:
        self.blocks = blocks
        self.kept = torch.empty(elements, dtype=torch.float32, device=device)
        self._half = torch.empty(elements if blocks is None else 0, dtype=torch.bfloat16, device=device)
        self._means: dict[tuple[int, int], QuantisedMean] = {}

    def mean(self, vector: Tensor, channel: Channel) -> Steps:
        """``vector``, contiguous fp32, becomes the mean over the ranks of what they contribute.

        Quantised, with one rank, nothing is sent and so nothing is rounded.
        """
        kept = self.kept[: vector.numel()]
        if self.blocks is None:
            half = self._half[: vector.numel()]
            half.copy_(vector)
            torch.sub(vector, kept.copy_(half), out=kept)
            channel.mean_(half)
            yield
            vector.copy_(half)
            return
        if channel.world == 1:
            kept.zero_()
            return
        key = (vector.numel(), channel.world)
        if key not in self._means:
            self._means[key] = QuantisedMean(*key, self.blocks, vector.device)
        yield from self._means[key].steps(vector, channel, kept)
        self._means[key].unpack(vector)

    def kept_of(self, view: Tensor) -> Tensor:
        """The part of ``kept`` that lies as ``view`` does in the vector of the last :meth:`mean`."""
        return self.kept.as_strided(view.shape, view.stride(), view.storage_offset())
