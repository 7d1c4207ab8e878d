"""EF21: what is compressed is not the gradient but how far it is from an estimate that everybody has.

Richtarik et al. (NeurIPS 2021, arXiv 2106.05203); with momentum EF21-SGDM (Fatkhullin et al., NeurIPS 2023). For worker
w with gradient G_w, its velocity u_w, an estimate h_w of its own and the shared h = mean_w(h_w), any compressor C::

    u_w = m u_w + (1 - m) G_w          the first one is G_w itself; m = 0: u_w = G_w
    c_w = C(u_w - h_w) ;  h_w += c_w
    h  += mean_w(c_w)                  what every worker's buffer holds afterwards

h_w is never stored. A compressor with error feedback that is given x_w = u_w - (u_w of the step before) compresses
x_w + E_w, and E_w = u_w - h_w is what it leaves: it is C above, at every step. So any method serves as it is, and
sent + kept = what came in reads mean_w(buffer + E_w) = mean_w(u_w): nothing that is kept is added to a later result.

An exact reduction gives mean_w(u_w), and estimates begin from zero after it, for whoever has got a shard of the mean
only does not know h. Norms in the statistics are those of x_w, x_w + E_w and E_w.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from edgc.checks import need, number, require
from edgc.compressors.base import Compressor, Gradient, KeepsErrors, Statistics, Steps, within
from edgc.config import ConstantConfig
from edgc.lazy import Tensor, torch
from edgc.runtime.channel import Channel

STATE = ("velocities", "estimates", "started")


@dataclass(frozen=True, kw_only=True)
class EstimatingConfig(ConstantConfig):
    """Settings of the methods with error feedback.

    Attributes:
        ef21: send what is missing of an estimate of the gradient (:mod:`edgc.compressors.ef21`) in place of adding
            what was not sent to the next gradient.
        momentum: m of the velocity u <- m u + (1 - m) G that EF21 sends in the gradient's place, at least 0 and below 1
            (EF21-SGDM's 1 - eta). Gradients of mini-batches need it: without it the estimate stalls at their noise.
            **The optimizer must have no first moment of its own**: SGD without momentum, Adam with beta1 = 0.
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
        fix = {"ef21": on} if on else {}
        return super().idle(values) | fix | ({} if values["ef21"] else {"momentum": on or "set ef21: true"})

    def around(self, compressor: KeepsErrors) -> Compressor:
        """The compressor of these settings, or what sends estimates through it."""
        return Estimates(compressor, self.momentum) if self.ef21 else compressor


class Estimates(Compressor):
    """Any method with error feedback as the C of EF21.

    Attributes:
        method: C; E_w is its error feedback.
        velocities: u_w of every gradient that was compressed, with momentum of all, by name, in fp32 at least.
        estimates: h.
        started: 0 of an h that begins from zero, else 1.
    """

    def __init__(self, method: KeepsErrors, momentum: float) -> None:
        self.method, self.momentum, self.has_rank = method, momentum, method.has_rank
        self.velocities: dict[str, Tensor] = {}
        self.estimates: dict[str, Tensor] = {}
        self.started: dict[str, Tensor] = {}

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
            if gradient.unused:
                # Nothing is sent but what is not finite, or of an exact mean what is there.
                value, new = (new * 0 + last if through else new), last
            elif self.momentum and name in self.velocities:
                torch.lerp(last, new, 1 - self.momentum, out=new)
            base = last * self.started[name].to(tensor.device) if known else torch.zeros_like(new)
            if tensor.dtype == new.dtype:
                torch.sub(value, base, out=tensor)
            else:
                # A bound hides infinity, times 0 it does not. What the type cannot hold of x is left to the next one.
                tensor.copy_(within(value - base, tensor.dtype).add_(value * 0))
                new = base + tensor if through else new
            velocities[name] = new
            if not through:
                given[i] = Gradient(name, tensor)  # what is kept is sent with an exact mean, too
        return given, velocities

    def _add(
        self, gradients: Sequence[Gradient], velocities: dict[str, Tensor], lossy: set[str], given_up: int | Tensor
    ) -> None:
        """Put h in the gradients' places, and let it be the next estimate, unless the reduction was given up."""
        for name, tensor in ((gradient.name, gradient.tensor) for gradient in gradients if gradient.name in velocities):
            through, estimate = name in lossy, self.estimates.get(name)
            if through or estimate is not None:
                total = tensor + (0 if estimate is None else estimate.to(tensor.device))
                total = total.to(torch.float32)
                tensor.copy_(total if tensor.dtype == total.dtype else within(total.clone(), tensor.dtype))
                started = torch.full((), float(through), dtype=torch.float32, device=tensor.device)
                self._set(self.estimates, name, total if through else torch.zeros_like(total), given_up)
                self._set(self.started, name, started, given_up)
            self._set(self.velocities, name, velocities[name], given_up)

    def _set(self, state: dict[str, Tensor], name: str, value: Tensor, given_up: int | Tensor) -> None:
        """Let ``value`` be the state of a name; where nobody looks whether it was given up, only if it was not."""
        if isinstance(given_up, torch.Tensor):
            last = state[name].to(value.device) if name in state else torch.zeros_like(value)
            value = torch.where(given_up == 0, value, last)
        self._then(partial(state.__setitem__, name, value))

    def rescale(self, factor: float) -> None:
        self.method.rescale(factor)
        for tensor in [*self.velocities.values(), *self.estimates.values()]:
            tensor.mul_(factor)

    def settle(self, keep: bool) -> None:
        self.method.settle(keep)
        super().settle(keep)

    def state_dict(self) -> dict[str, Any]:
        # A replica's own are velocities and errors, as of every method: with their means h is that of the h_w.
        own = {key: {name: tensor.clone() for name, tensor in getattr(self, key).items()} for key in STATE}
        return self.method.state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        need(state, STATE, "compressor")
        self.method.load_state_dict(state)
        for key in STATE:
            setattr(self, key, {name: tensor.clone() for name, tensor in state[key].items()})
