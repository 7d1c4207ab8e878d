"""What a soak does, drawn from its seed: cases, each a method or a strategy for some steps, and what a step brings."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from edgc.config import EDGCConfig
from edgc.strategies import StrategyConfig
from tests.examples import FOUND, POLICIES, settings_of
from tests.integration.ddp_runs import EDGC, METHODS, SMALL, TYPES
from tests.strategy_cases import EXAMPLES

LONG = 130  # steps of a case in which what is alive is compared over MARKS
MARKS = (70, 130)
QUIET = 50  # step of such a case from which on nothing is broken: what was lost by that is made again
_OF_POLICY: dict[str, dict[str, Any]] = {
    "fixed": {"rank": 4},
    "schedule": {"schedule": [[0, 6], [0.3, 2], [0.6, 4]]},
    "spectral": {"window": 4},
}


@dataclass(frozen=True)
class Subject:
    """A method or a strategy with settings.

    Attributes:
        timed: whether what it does depends on times that it measures, so that no two runs are the same.
    """

    name: str
    compression: Mapping[str, Any]
    strategy: StrategyConfig | None = None
    timed: bool = False

    @property
    def config(self) -> EDGCConfig:
        return EDGCConfig.from_dict(EDGCConfig.usable(self.compression))

    @property
    def equal(self) -> str:
        """When replicas hold the same bits."""
        return self.strategy.equal if self.strategy is not None else "step"

    @property
    def period(self) -> int:
        return self.strategy.period if self.strategy is not None else 1


@cache
def subjects() -> dict[str, Subject]:
    """Every example of every method, EDGC with each policy, and every example of every strategy, by name."""
    methods = {name: {**settings_of(name), **SMALL} for name in FOUND if name != "edgc"}
    methods |= {name: METHODS[name] for name in ("search", "gate", "topk_dgc")}
    for policy in POLICIES:
        own = EDGC if policy not in ("fixed", "schedule") else {"method": "edgc", "window": 2, **SMALL}
        methods[f"edgc {policy}"] = {**own, "policy": policy, **_OF_POLICY.get(policy, {})}
    found = {name: Subject(name, settings, timed=name in ("search", "gate")) for name, settings in methods.items()}
    for name, (kind, example) in EXAMPLES.items():
        if kind.name != "every_step":  # that is what methods do
            compression = {"min_compression_elements": 1, **example.compression}
            name = f"strategy {name}"
            found[name] = Subject(name, compression, kind.from_dict(example.settings))
    return found


@dataclass(frozen=True)
class Event:
    """What happens in a step.

    Attributes:
        uses: of every rank, for every pass, whether a layer is used that need not be.
        broken: rank and pass whose input is not a number.
        slow: rank that is late in its backward, and by how many seconds.
        to_none: whether gradients are dropped before it, or made zero.
    """

    uses: tuple[tuple[bool, ...], ...]
    broken: tuple[int, int] | None
    slow: tuple[int, float] | None
    to_none: bool

    @property
    def passes(self) -> int:
        return len(self.uses[0])


@dataclass(frozen=True)
class Case:
    """A model that is trained with one subject.

    Attributes:
        number: of the case in a soak of this seed and world.
        poisoned: whether fresh memory that torch gives is filled with what is not a number.
        saved: step before which state is saved, for another run that goes on from it; None is never.
        renewed: step before which the handle is removed, to be registered anew after it, or at once where replicas take
            steps of their own; None is never.
        keeps: whether its state is loaded then.
    """

    seed: int
    world: int
    number: int
    subject: Subject
    steps: int
    dtype: str
    unused: bool
    view: bool
    masked: bool
    scaled: bool
    momentum: bool
    poisoned: bool
    saved: int | None = None
    renewed: int | None = None
    keeps: bool = False

    @property
    def name(self) -> str:
        options = [name for name in ("unused", "view", "masked", "scaled", "poisoned") if getattr(self, name)]
        return f"{self.subject.name}, {' '.join([self.dtype, *options])}"

    @property
    def again(self) -> str:
        """The command that does it again."""
        return f"python -m tests.soak --seed {self.seed} --world {self.world} --case {self.number}"

    def event(self, step: int) -> Event:
        """What happens in a step, the same draw on every rank."""
        draw = random.Random(f"{self.seed} {self.world} {self.number} {step}")
        passes = draw.choice((1, 1, 2, 3))
        uses = tuple(tuple(draw.random() < 0.6 for _ in range(passes)) for _ in range(self.world))
        broken = (draw.randrange(self.world), draw.randrange(passes)) if draw.random() < 0.08 else None
        if self.steps == LONG and step >= QUIET:
            broken = None
        slow = (draw.randrange(self.world), draw.random() * 0.02) if draw.random() < 0.15 else None
        # What another run goes on from has no gradients.
        return Event(uses, broken, slow, draw.random() < 0.8 or step == self.saved)


def case_of(seed: int, world: int, number: int, *, longest: int = LONG) -> Case:
    """A case by its number: each subject comes once before any comes again.

    Args:
        longest: steps of a case at most.
    """
    names = sorted(subjects())
    turn, place = divmod(number, len(names))
    random.Random(f"{seed} {world} {turn}").shuffle(names)
    subject, draw = subjects()[names[place]], random.Random(f"{seed} {world} {number}")
    is_long = draw.random() < 0.1
    steps = min(longest, LONG if is_long else draw.randint(8, 24))
    saved = renewed = None
    if not is_long:
        if draw.random() < 0.4 and not subject.timed and steps > 5:
            saved = draw.randrange(3, steps - 1)
        # A strategy begins anew where replicas are equal.
        places = [step for step in range(3, steps - 1) if step % subject.period == 0]
        # A handle that is not there has no state; and right after one was loaded DDP has not settled its buckets, so
        # that sums of plain steps would be rounded in other ways.
        places = [step for step in places if saved is None or not -1 <= step - saved <= 2]
        renewed = draw.choice(places) if places and draw.random() < 0.3 else None
    return Case(
        seed=seed,
        world=world,
        number=number,
        subject=subject,
        steps=steps,
        dtype=draw.choice(sorted(TYPES)),
        unused=draw.random() < 0.5,
        view=draw.random() < 0.3,
        masked=draw.random() < 0.25,
        scaled=subject.strategy is None and draw.random() < 0.4,
        momentum=draw.random() < 0.5,
        poisoned=draw.random() < 0.3,
        saved=saved,
        renewed=renewed,
        keeps=draw.random() < 0.5 or subject.equal == "never",
    )
