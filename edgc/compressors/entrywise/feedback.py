"""Error feedback of the entrywise methods (topk, randomk, quantize, sign, natural), and steps that are given up.

Every matrix with enough entries goes through the method, in one flat fp32 vector a call; vectors and small matrices
go dense in messages of their own at the same time. For worker w with gradient G_w and error E_w::

    M_w = G_w + E_w
    the method averages M_w as far as it gets it across: result R, the same on all workers, and K_w not sent
    G_w = R in the gradient's type ;  E_w = K_w + (R - G_w)

so that mean_w(G_w + E_w) after equals mean_w(G_w + E_w) before. The second term is zero for fp32; for narrower types
it keeps the rounding of the result from being lost. What goes dense takes its E along in the gradient's own type; E is
empty then, but for what is above the largest number of fp16. If anything in the result is not finite, every worker sees
so: the gradients of the call become NaN and the state stays as it was.

Of an unused gradient (:class:`~edgc.compressors.base.Gradient`) a worker sends zeros, and K_w is all of M_w.

Under momentum correction (:class:`Velocities`) the worker's velocity stands for
G_w on the right, in whatever way a gradient goes; that of an unused one stays as it is.

On a GPU nobody looks whether the result is finite (:mod:`edgc.runtime.device`): everything is written under a mask.
What stays as it was is E, and an E that has been sent stays, too, as zeros. Not so the count of a parameter's
reductions, a number of the host's that random draws and a density that falls depend on: there it counts those that
were given up, too, which then have had a draw of their own. It is the same on every rank, and saved, so that a resumed
run draws what the first one would have drawn.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from edgc.checks import need
from edgc.compressors.base import (
    Gradient,
    KeepsErrors,
    Statistics,
    Steps,
    clones,
    compressible,
    finite,
    kept_of,
    seeded,
    square_sums,
    within,
)
from edgc.compressors.dense import dense_steps
from edgc.compressors.ef21 import EstimatingConfig
from edgc.lazy import Tensor, torch
from edgc.runtime.channel import Channel
from edgc.runtime.device import host_decides


@dataclass(frozen=True, kw_only=True)
class EntrywiseConfig(EstimatingConfig):
    """Settings that the entrywise methods have in common.

    Attributes:
        error_feedback: off only for ablations, and for methods that are unbiased without.
    """

    error_feedback: bool = True


@dataclass
class Flat:
    """The gradients of a call end to end in flat fp32 vectors, each at a multiple of ``align``.

    Attributes:
        buffers: whatever else a method wants to keep from call to call.
        work: M; what is kept, afterwards.
        spare: the errors of last time.
        result: what all workers have instead of M, afterwards.
        velocity: under momentum correction, the velocities of this step; None without.
        last_velocity: those of the step before.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    offsets: tuple[int, ...]
    buffers: dict[str, Any]
    work: Tensor
    spare: Tensor
    result: Tensor
    velocity: Tensor | None = None
    last_velocity: Tensor | None = None

    @classmethod
    def of(cls, gradients: Sequence[Gradient], align: int, momentum: bool) -> Flat:
        sizes = [-(-g.tensor.numel() // align) * align for g in gradients]
        *offsets, total = accumulate(sizes, initial=0)
        shapes = tuple(g.tensor.shape for g in gradients)
        device = gradients[0].tensor.device
        room = [torch.empty(total, dtype=torch.float32, device=device) for _ in range(5 if momentum else 3)]
        return cls(tuple(g.name for g in gradients), shapes, tuple(offsets), {}, *room)

    def parts(self, vector: Tensor) -> list[Tensor]:
        """Flat views of the gradients' own parts of ``work``, ``spare`` or a vector like them."""
        return [
            vector[offset : offset + shape.numel()] for offset, shape in zip(self.offsets, self.shapes, strict=True)
        ]

    @property
    def velocities(self) -> dict[str, Tensor]:
        """The parts of ``velocity`` by name, in the gradients' shapes; empty without momentum."""
        parts = [] if self.velocity is None else self.parts(self.velocity)
        named = zip(self.names, self.shapes, parts, strict=False)
        return {name: part.view(shape) for name, shape, part in named}

    def swap(self) -> None:
        """Keep the rest in ``work`` until the next call has brought what follows from it."""
        self.work, self.spare = self.spare, self.work
        self.velocity, self.last_velocity = self.last_velocity, self.velocity

    def clear_gaps(self) -> None:
        """Zeros between the gradients of ``work``."""
        for offset, shape, end in zip(self.offsets, self.shapes, [*self.offsets[1:], len(self.work)], strict=True):
            self.work[offset + shape.numel() : end].zero_()


class Velocities:
    """The velocities u of one worker's gradients G (Deep Gradient Compression, Lin et al., ICLR 2018, section 3.2)::

        u <- m u + (1 - m) G

    The paper's has no factor 1 - m. With it u has the scale of G, as Adam's first moment has, so that a limit on the
    gradients' norm and a learning rate keep their meaning.

    Args:
        momentum: m, at least 0 and below 1; with 0 nothing is kept and gradients stay as they are.

    Attributes:
        tensors: u by parameter name, in the gradients' shapes and in fp32 or, of fp64, in that.
    """

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        self.tensors: dict[str, Tensor] = {}

    def advance(self, gradient: Gradient, out: Tensor) -> Tensor:
        """Write the next velocity of a gradient to ``out`` and return it; the last one stays as it is."""
        out.copy_(gradient.tensor).mul_(1 - self.momentum)
        if gradient.name in self.tensors:
            out.add_(kept_of(self.tensors, gradient, "the velocity"), alpha=self.momentum)
        return out

    def replace(self, gradients: Iterable[Gradient]) -> dict[str, Tensor]:
        """Put the next velocities in the places of all gradients but unused ones; returns them by name."""
        advanced: dict[str, Tensor] = {}
        for gradient in gradients:
            if self.momentum and not gradient.unused:
                dtype = torch.promote_types(torch.float32, gradient.tensor.dtype)
                advanced[gradient.name] = self.advance(gradient, torch.empty_like(gradient.tensor, dtype=dtype))
                gradient.tensor.copy_(advanced[gradient.name])
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


#: Whether the result is finite, the same on every rank, and what writes it to a vector laid out like ``Flat.work``.
Result = tuple[Tensor, Callable[[Tensor], object]]


class Feedback(KeepsErrors):
    """A method that sends a part of every entry or every part of some, and keeps the rest as error feedback."""

    align = 1
    draws_at_random = False

    def __init__(self, config: EntrywiseConfig, momentum: float = 0.0) -> None:
        self.config = config
        self.velocities = Velocities(momentum)
        self.counts_reductions = self.draws_at_random
        self.min_elements = config.min_compression_elements
        self.error_feedback = config.error_feedback
        self.seed = config.seed
        self.errors: dict[str, Tensor] = {}
        self.held = {}
        self.counts: dict[str, int] = {}
        self._flats: dict[tuple[Any, ...], Flat] = {}

    @abstractmethod
    def _average(self, flat: Flat, channel: Channel) -> Generator[None, None, Result]:
        """Average ``flat.work``, and leave in it what this worker did not get across; yields at least once.

        An entry that is not finite on one worker must make the result not finite on all of them.
        """

    def steps(self, gradients: Sequence[Gradient], channel: Channel, rank: int | None, statistics: Statistics) -> Steps:
        lossy: list[Gradient] = []
        dense: list[Gradient] = []
        for gradient in gradients:
            self.held.pop(gradient.name, None)
            through = rank is not None and self.compresses(gradient.tensor, rank)
            (lossy if through else dense).append(gradient)
        drained = self._owed(dense)
        advanced = self.velocities.replace(dense)
        rests = self._add_errors(drained)
        messages = dense_steps([gradient.tensor for gradient in dense], channel) if dense else iter(())
        next(messages, None)
        if not lossy:
            yield
            next(messages, None)
            ok = finite(_tensors(dense), gradients[0].tensor.device)
            if self._settle_dense(gradients, dense, advanced, ok, statistics):
                self._forget(drained, rests, ok)
            return
        flat = self._load(lossy, channel.world, statistics)
        advanced |= flat.velocities
        held = self._hold(lossy, flat)
        arrived, write = yield from self._average(flat, channel)
        for _, part, own in held:
            part.add_(own)
        self._keep_unused(lossy, advanced)
        next(messages, None)
        # The same bits on every worker, and so the same decision.
        ok = arrived & finite(_tensors(dense), arrived.device)
        if self._settle_dense(gradients, dense, advanced, ok, statistics):
            self._forget(drained, rests, ok)
            self._finish(lossy, flat, write, ok, statistics)

    def compresses(self, tensor: Tensor, rank: int) -> bool:
        return compressible(tensor.shape, self.min_elements, 8 * tensor.element_size())

    def _settle_dense(
        self,
        gradients: Sequence[Gradient],
        dense: Sequence[Gradient],
        advanced: dict[str, Tensor],
        ok: Tensor,
        statistics: Statistics,
    ) -> bool:
        """Adopt the velocities ``advanced``, or give up ``gradients``; whether to go on."""
        if host_decides(ok.device):
            if not ok:
                for gradient in gradients:
                    gradient.tensor.fill_(math.nan)
                statistics.gradient_sq = statistics.input_sq = 0.0
                statistics.skipped += 1
                return False
            self._then(partial(self.velocities.adopt, advanced))
            return True
        self.velocities.keep_old(advanced, ok)
        self._then(partial(self.velocities.adopt, advanced))
        for gradient in dense:
            gradient.tensor.masked_fill_(~ok, math.nan)
        statistics.gradient_sq, statistics.input_sq = (
            torch.where(ok, norm, 0.0) if isinstance(norm, torch.Tensor) else norm
            for norm in (statistics.gradient_sq, statistics.input_sq)
        )
        statistics.skipped = statistics.skipped + (~ok).int()
        return True

    def _load(self, gradients: Sequence[Gradient], world: int, statistics: Statistics) -> Flat:
        """M = G + E, leaving E alone."""
        key = (world, *((g.name, g.tensor.shape, g.tensor.device) for g in gradients))
        flat = self._flats.get(key)
        if flat is None:
            # Names that are now called in other company do not come back in the old one.
            names = {gradient.name for gradient in gradients}
            self._flats = {old: other for old, other in self._flats.items() if names.isdisjoint(other.names)}
            flat = self._flats[key] = Flat.of(gradients, self.align, self.velocities.momentum > 0)
        flat.clear_gaps()
        advanced = flat.velocities
        for gradient, part in zip(gradients, flat.parts(flat.work), strict=True):
            m = part.view(gradient.tensor.shape)
            m.copy_(gradient.tensor)
            statistics.gradient_sq += _square_sum(part)
            if gradient.name in advanced and not gradient.unused:
                m.copy_(self.velocities.advance(gradient, advanced[gradient.name]))
            if gradient.name in self.errors:
                m.add_(self._error(gradient))
            statistics.input_sq += _square_sum(part)
        return flat

    def _hold(self, gradients: Sequence[Gradient], flat: Flat) -> list[tuple[Gradient, Tensor, Tensor]]:
        """Zeros for the M of unused gradients, which are returned, each with its part of ``flat.work`` and a copy of
        that; what is not finite is sent."""
        if not any(map(self._holds, gradients)):
            return []
        parts = zip(gradients, flat.parts(flat.work), strict=True)
        held = [(gradient, part, part.clone()) for gradient, part in parts if self._holds(gradient)]
        for _, part, _ in held:
            part.mul_(0)
        return held

    def _keep_unused(self, gradients: Iterable[Gradient], advanced: Mapping[str, Tensor]) -> None:
        """The velocities of unused gradients stay as they were: zeros where there was none."""
        for gradient in gradients:
            if gradient.unused and gradient.name in advanced:
                velocity = advanced[gradient.name].zero_()
                if gradient.name in self.velocities.tensors:
                    velocity.copy_(kept_of(self.velocities.tensors, gradient, "the velocity"))

    def _finish(
        self,
        gradients: Sequence[Gradient],
        flat: Flat,
        write: Callable[[Tensor], object],
        ok: Tensor,
        statistics: Statistics,
    ) -> None:
        decides = host_decides(ok.device)
        if not decides and self.error_feedback:
            for gradient, part in zip(gradients, flat.parts(flat.work), strict=True):
                if gradient.name in self.errors:
                    error = part.view(gradient.tensor.shape)
                    torch.where(ok, error, self._error(gradient), out=error)
                else:
                    part.masked_fill_(~ok, 0)
        write(flat.result)
        for gradient, part, result in zip(gradients, flat.parts(flat.work), flat.parts(flat.result), strict=True):
            tensor, shape = gradient.tensor, gradient.tensor.shape
            kept, mean = part.view(shape), result.view(shape)
            if tensor.dtype == torch.float32:
                tensor.copy_(mean)
            else:
                tensor.copy_(within(mean.clone(), tensor.dtype))
                mean.sub_(tensor)
                kept.add_(mean if decides else mean.masked_fill_(~ok, 0))
            error_sq = _square_sum(part)
            if not decides:
                tensor.masked_fill_(~ok, math.nan)
                error_sq = torch.where(ok, error_sq, 0.0)
            statistics.error_sq += error_sq
            if self._holds(gradient):
                self._then(partial(self.held.__setitem__, gradient.name, ok))
            self._then(partial(self._adopt, gradient.name, kept, ok))
        self._then(flat.swap)

    def _adopt(self, name: str, kept: Tensor, ok: Tensor) -> None:
        if self.error_feedback:
            self.errors[name] = kept
        if self.counts_reductions:
            self.counts[name] = self.counts.get(name, 0) + 1

    def _generator(self, name: str, *parts: object) -> torch.Generator:
        """Random numbers of this method, step, name and ``parts``; the same wherever those are."""
        return seeded(type(self).__name__, self.seed, self.counts.get(name, 0), name, *parts)

    def _drain(self, gradients: Sequence[Gradient]) -> None:
        self._then(partial(self.velocities.adopt, self.velocities.replace(gradients)))
        super()._drain(gradients)

    def rescale(self, factor: float) -> None:
        super().rescale(factor)
        for velocity in self.velocities.tensors.values():
            velocity.mul_(factor)

    def state_dict(self) -> dict[str, Any]:
        velocities = {"velocities": clones(self.velocities.tensors)} if self.velocities.momentum else {}
        return {"errors": clones(self.errors), "counts": dict(self.counts), **velocities}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        need(state, ("errors", "counts"), "compressor")
        self.errors = clones(state["errors"]) if self.error_feedback else {}
        self.counts, self.held = dict(state["counts"]), {}
        # None in a state of settings without momentum, which may be changed: velocities then begin.
        self.velocities.tensors = clones(state.get("velocities", {})) if self.velocities.momentum else {}


def _square_sum(vector: Tensor) -> float | Tensor:
    """The squared norm of a flat fp32 vector; on a GPU a tensor, so that nobody waits for it."""
    total = square_sums([vector.view(1, 1, -1)])[0][0]
    return float(total) if host_decides(vector.device) else total


def _tensors(gradients: Iterable[Gradient]) -> Iterable[Tensor]:
    return (gradient.tensor for gradient in gradients)
