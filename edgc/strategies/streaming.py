"""Streaming DiLoCo: fragments of the model end their rounds one after another, and the exchange hides behind steps.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication" (arXiv 2501.18512), Algorithm 2. Where the
paper leaves something to the code, MaxText (e591f30) is followed.

With P fragments one of them comes every H/P steps. Its delta is measured and its exchange begins at step t; the
outer step is made and used at t + delay, when this replica's own weights are L:

    theta_p <- (1 - alpha) anchor_p + alpha L

That is the paper's order and MaxText's. torchft's is the same but for its clock, which stands ``delay`` steps later:
there a fragment is measured at t - delay and used at t, so that every first round is shorter. An outer step depends on
delta and anchor alone, so it does not matter that MaxText makes it at t and only uses it later.

Collectives are started at t and waited for at t + delay; those of a method with two of them in turn, at the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgc.checks import need, number, require
from edgc.compressors.base import Steps
from edgc.lazy import Tensor
from edgc.strategies.base import Replica, StrategyExample, all_finite, dense_bytes, gradients_of
from edgc.strategies.diloco import DiLoCo, DiLoCoConfig
from edgc.strategies.fragments import fragments_of
from edgc.strategies.local_updates import copy_all


@dataclass(frozen=True, kw_only=True)
class StreamingConfig(DiLoCoConfig):
    """Settings of streaming DiLoCo. Replicas are equal never, but their anchors are.

    Attributes:
        every: H, inner steps between two turns of a fragment; a multiple of ``fragments``. Paper: 100.
        lr: of the outer step. Paper: 0.4.
        fragments: P (:func:`~edgc.strategies.fragments.fragments_of`). The paper's have 3 layers each: 4 of 12 layers.
        delay: steps from measurement to use, fewer than from one fragment to the next. Paper: 1 to 5, torchft and
            MaxText: 0.
        alpha: share of a replica's own weights that stays. Paper: 0.5; torchft and MaxText: 0.
    """

    name = "streaming_diloco"
    equal = "never"
    examples = {
        "streaming_diloco": StrategyExample(
            lambda shapes, world: dense_bytes(shapes, world) / 6, {"every": 6, "fragments": 2, "delay": 1}
        ),
        "streaming_diloco_powersgd": StrategyExample(
            lambda shapes, world: dense_bytes([[(s[0] + s[1]) * 4] if len(s) == 2 else s for s in shapes], world) / 6,
            {"every": 6, "fragments": 2, "delay": 0, "alpha": 0.0},
            {"method": "powersgd", "rank": 4},
        ),
    }

    every: int = 100
    lr: float = 0.4
    fragments: int = 4
    delay: int = 1
    alpha: float = 0.5

    def _check(self) -> None:
        super()._check()
        self._whole("fragments", 1)
        self._whole("delay", 0)
        number("alpha", self.alpha, 0, 1)
        require(self.every % self.fragments == 0, "every", self.every, f"use a multiple of fragments={self.fragments}")
        require(self.delay < self.interval, "delay", self.delay, f"use less than every / fragments = {self.interval}")

    @property
    def interval(self) -> int:
        """Steps from one fragment to the next."""
        return self.every // self.fragments

    def build(self, replica: Replica) -> Streaming:
        return Streaming(self, replica)


class Streaming(DiLoCo):
    """Rounds of fragments.

    What is on its way when a state is saved is exchanged anew when that is loaded; among another number of replicas it
    is dropped, and the fragment waits for its next turn.

    Attributes:
        engines: of the fragments; ``engine`` is that of the last one.
        measured: deltas of this replica that are on their way; empty if none are.
    """

    config: StreamingConfig

    def __init__(self, config: StreamingConfig, replica: Replica) -> None:
        super().__init__(config, replica)
        self.fragments = fragments_of(self.parameters, config.fragments)
        members = [{name: self.parameters[name] for name in names} for names in self.fragments]
        rounds = config.rounds(replica.iterations)
        self.engines = [replace(replica, parameters=each).engine(rounds) for each in members]
        self.engine = self.engines[0]
        self.measured: dict[str, Tensor] = {}
        self._means: dict[str, Tensor] = {}
        self._exchange: Steps | None = None

    def after_local_step(self, taken: int) -> Steps:
        turn, late = divmod(taken, self.config.interval)
        if turn and late == 0:
            self._exchange, names = None, self.fragments[self._fragment(taken)]
            self.measured = {name: self.anchor[name] - self.parameters[name].detach() for name in names}
        if self.measured:
            yield from self._advance(taken, ends=late == self.config.delay)

    def _fragment(self, taken: int) -> int:
        """The fragment that is on its way, or was last, after so many local steps."""
        return (taken // self.config.interval - 1) % self.config.fragments

    def _advance(self, taken: int, ends: bool) -> Steps:
        if self._exchange is None:
            self.engine = self.engines[self._fragment(taken)]
            self._means = {name: delta.clone() for name, delta in self.measured.items()}
            self._exchange = self.engine.exchange(gradients_of(self._means), self.replica.group)
        if not ends:
            next(self._exchange, None)
            return
        yield from self._exchange
        means, self.measured, self._means, self._exchange = self._means, {}, {}, None
        ok = all_finite(means)
        self.engine.end_iteration(skipped=not ok)
        if not ok:
            # All fragments: what is not finite is in the whole of that replica by now.
            self.replica.mend_optimizer()
            copy_all(self.parameters, self.anchor)
            return
        self.outer.step(means)
        for name in means:
            self.parameters[name].detach().lerp_(self.anchor[name], 1 - self.config.alpha)

    def own_state(self) -> dict[str, Any]:
        return {"engines": [engine.state_dict() for engine in self.engines], "measured": self.measured}

    def load_state(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        super().load_state(shared, None)
        self.measured, self._exchange = {}, None
        if own is not None:
            need(own, ("engines", "measured"), "own")
            for engine, state in zip(self.engines, own["engines"], strict=True):
                engine.load_state_dict(state)
            self.measured = {name: delta.to(self.anchor[name].device) for name, delta in own["measured"].items()}
