"""EF21: what is compressed is not the gradient but how far it is from an estimate that everybody has.

Richtarik et al. (NeurIPS 2021, arXiv 2106.05203); with momentum EF21-SGDM (Fatkhullin et al., NeurIPS 2023). For worker
w with gradient G_w, its velocity u_w, an estimate h_w of its own and the shared h = mean_w(h_w), any compressor C::

    u_w = m u_w + (1 - m) G_w          the first one is G_w itself; m = 0: u_w = G_w
    c_w = C(u_w - h_w) ;  h_w += c_w
    h  += mean_w(c_w)                  what every worker's buffer holds afterwards

h_w is never stored: a compressor with error feedback that is given x_w = u_w - (u_w of the step before) compresses
x_w + E_w and leaves E_w = u_w - h_w, so it is the C above. Any method serves as it is, and sent + kept = what came in
reads mean_w(buffer + E_w) = mean_w(u_w). Norms in the statistics are those of x_w, x_w + E_w and E_w.

An exact reduction gives mean_w(u_w). After it estimates begin from zero: who has a shard of the mean does not know h.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from edgc.checks import number, require
from edgc.compressors.base import Compressor, Gradient, KeepsErrors, Statistics, Steps, clones, within
from edgc.config import ConstantConfig
from edgc.errors import UserError
from edgc.lazy import Tensor, torch
from edgc.runtime.channel import Channel

STATE = ("velocities", "estimates", "started")  # the first a replica's own, as errors are


@dataclass(frozen=True, kw_only=True)
class EstimatingConfig(ConstantConfig):
    """Settings of the methods with error feedback.

    Attributes:
        ef21: send what an estimate of the gradient lacks, in place of adding what was not sent to the next gradient.
        momentum: m of the velocity u <- m u + (1 - m) G in the gradient's place, at least 0 and below 1 (EF21-SGDM's
            1 - eta). Mini-batches need it: without it the estimate stalls at their noise. **The optimizer must have no
            first moment of its own**: SGD without momentum, Adam with beta1 = 0.
    """

    ef21: bool = False
    momentum: float = 0.0

    def _check(self) -> None:
        super()._check()
        number("momentum", self.momentum, 0)
        require(self.momentum < 1, "momentum", self.momentum, "use a number of at least 0 and below 1")

    @classmethod
    def idle(cls, values: Mapping[str, Any]) -> dict[str, str]:
        on = "set error_feedback: true" if not values["error_feedback"] else ""
        moving = {} if values["ef21"] else {"momentum": on or "set ef21: true"}
        return super().idle(values) | ({"ef21": on} if on else {}) | moving

    def around(self, compressor: KeepsErrors) -> Compressor:
        """Return what sends estimates through ``compressor``, if these settings say so, else that."""
        return Estimates(compressor, self.momentum) if self.ef21 else compressor


class Estimates(Compressor):
    """Any method with error feedback as the C of EF21.

    Attributes:
        method, velocities: C, and u_w of what was compressed, with momentum of all, in fp32 at least.
        estimates, started: h, and 0 of one that begins from zero, else 1.
    """

    def __init__(self, method: KeepsErrors, momentum: float) -> None:
        self.method, self.momentum, self.has_rank = method, momentum, method.has_rank
        self.velocities, self.estimates, self.started = (dict[str, Tensor]() for _ in STATE)

    def waits(self, rank: int | None) -> int:
        return self.method.waits(rank)

    @property
    def kept(self) -> Mapping[str, Tensor]:
        return self.method.kept

    def steps(self, gradients: Sequence[Gradient], channel: Channel, rank: int | None, statistics: Statistics) -> Steps:
        lossy = {g.name for g in gradients if rank is not None and self.method.compresses(g.tensor, rank)}
        given, velocities = self._differences(gradients, lossy)
        yield from self.method.steps(given, channel, rank, statistics)
        if isinstance(statistics.skipped, torch.Tensor) or not statistics.skipped:
            self._add(gradients, velocities, lossy, statistics.skipped)

    def scattered(self, gradients: Sequence[Gradient], channel: Channel, statistics: Statistics) -> Steps:
        given, velocities = self._differences(gradients, set())
        yield from self.method.scattered(given, channel, statistics)
        self._add(gradients, velocities, set(), 0)

    def _differences(self, gradients: Sequence[Gradient], lossy: set[str]) -> tuple[list[Gradient], dict[str, Tensor]]:
        """Put x_w in the gradients' places, for the method; and u_w by name, where it is to be kept."""
        given, velocities = list(gradients), {}
        for i, gradient in enumerate(gradients):
            name, tensor, last = gradient.name, gradient.tensor, self.velocities.get(gradient.name)
            known, through = name in self.estimates, name in lossy
            if not (known or through or self.momentum):
                continue
            value = new = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
            last = torch.zeros_like(new) if last is None else last.to(tensor.device)
            if gradient.unused:  # nothing is sent but what is not finite, or of an exact mean what is there
                value, new = (new * 0 + last if through else new), last
            elif self.momentum and name in self.velocities:
                torch.lerp(last, new, 1 - self.momentum, out=new)
            base = last * self.started[name].to(tensor.device) if known else torch.zeros_like(new)
            # A bound hides infinity, 0 times it does not. What a narrow type cannot hold of x comes with the next one.
            x, narrow = value - base, tensor.dtype != new.dtype
            tensor.copy_(within(x, tensor.dtype).add_(value * 0) if narrow else x)
            velocities[name] = base + tensor if narrow and through else new
            if not through:
                given[i] = Gradient(name, tensor)  # what is kept is sent with an exact mean, too
        return given, velocities

    def _add(self, gradients: Sequence[Gradient], new: dict[str, Tensor], lossy: set[str], bad: int | Tensor) -> None:
        """Put h in the gradients' places, and let it and the ``new`` u_w be the next ones, unless that was given up."""
        for name, tensor in ((g.name, g.tensor) for g in gradients if g.name in new):
            through, estimate = name in lossy, self.estimates.get(name)
            if through or estimate is not None:
                total = (tensor + (0 if estimate is None else estimate.to(tensor.device))).to(torch.float32)
                tensor.copy_(total if tensor.dtype == total.dtype else within(total.clone(), tensor.dtype))
                started = torch.full((), float(through), dtype=torch.float32, device=tensor.device)
                self._set(self.estimates, name, total if through else torch.zeros_like(total), bad)
                self._set(self.started, name, started, bad)
            if not through:  # what fp16 did not hold of an exact mean is in the next difference, which begins from zero
                self._then(partial(self._drop_error, name, bad))
            self._set(self.velocities, name, new[name], bad)

    def _drop_error(self, name: str, bad: int | Tensor) -> None:
        error = self.method.errors.get(name)
        if error is not None:
            _ = error.masked_fill_(bad == 0, 0) if isinstance(bad, torch.Tensor) else error.zero_()

    def _set(self, state: dict[str, Tensor], name: str, value: Tensor, bad: int | Tensor) -> None:
        if isinstance(bad, torch.Tensor):  # and nobody has looked
            last = state[name].to(value.device) if name in state else torch.zeros_like(value)
            value = torch.where(bad == 0, value, last)
        self._then(partial(state.__setitem__, name, value))

    def rescale(self, factor: float) -> None:
        self.method.rescale(factor)
        for tensor in [*self.velocities.values(), *self.estimates.values()]:
            tensor.mul_(factor)

    def settle(self, keep: bool) -> None:
        self.method.settle(keep)
        super().settle(keep)

    def state_dict(self) -> dict[str, Any]:
        return self.method.state_dict() | {key: clones(getattr(self, key)) for key in STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "estimates" not in state:  # of what was not sent there estimates would be wrong by for ever
            raise UserError("the saved state is of settings without ef21", fix="register with ef21: false")
        self.method.load_state_dict(state)
        self.velocities, self.estimates, self.started = (clones(state[key]) for key in STATE)
