"""The contract of ``edgc/compressors/base.py`` as laws: several workers of one method, step by step, on any device.

A method is found by the examples in its own file, so a new one is tested without a line here. Each is run in a covering
set of settings (:data:`SETTINGS`) in place of the product of path, type, workers, memory layout and deferral.
"""

from __future__ import annotations

import copy
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from edgc.compressors import Compressor, Gradient, Statistics
from edgc.compressors.base import compressible
from edgc.compressors.powersgd import saves_bytes
from edgc.compressors.powersgd.algorithm import PowerSGD
from edgc.config import EDGCConfig
from edgc.errors import UserError
from edgc.runtime.device import masked_path
from tests import examples
from tests.lockstep import reduce_together, room
from tests.workers import same

CPU = torch.device("cpu")
SMALLEST = 64
# Neighbours of one shape are one batch on a GPU; wide, tall, limited by its columns; what goes dense, empty or scalar.
SHAPES: tuple[tuple[int, ...], ...] = ((40, 24), (40, 24), (17,), (24, 96), (0, 5), (130, 9), (), (3, 5), (31,))
NAMES = [f"p{i}" for i in range(len(SHAPES))]
# Growing, shrinking, above the smaller side of a matrix, uncompressed for a step, and back.
RANKS: tuple[int | None, ...] = (4, 4, 8, 12, 3, None, 4, 4)
SAVED = 2  # steps before the state is saved
BAD = {0: (4, 0, math.inf), 3: (8, 0, math.nan), 5: (None, 5, math.inf), 7: (4, 2, -math.inf)}
"""Given up before these steps: rank, place and value of what is not finite on the last worker."""

EXACT = 2e-6  # sums in fp32
IN_BF16 = 1e-2  # what is added up or kept in bfloat16: 2**-9 an operation
# How far low-rank results of two paths are from each other, of their norm: quantised factors are rounded along another
# basis of the same subspace, which moves what they reach by about their step.
CLOSE = {"fp32": 1e-3, "bf16": 0.05, "int8": 0.1, "int7": 0.15, "int6": 0.2, "int5": 0.3, "int4": 0.4}


@dataclass(frozen=True)
class Setting:
    """How a method is run: W workers, the type of gradients, and the rest of what every method has to bear."""

    masked: bool
    dtype: torch.dtype
    world: int
    layout: str
    zeros: bool = False  # the first gradients
    scale: float = 1.0

    def __str__(self) -> str:
        words = ["masked" if self.masked else "host", str(self.dtype)[6:], f"W{self.world}", self.layout]
        return "-".join([*words, *["zeros first"] * self.zeros, f"{self.scale:g}"])


# Every pair of path and type; every number of workers and layout on both paths.
SETTINGS = (
    Setting(False, torch.float32, 2, "flat"),
    Setting(True, torch.float32, 3, "flat", zeros=True),
    Setting(False, torch.bfloat16, 3, "strided", zeros=True, scale=1e10),
    Setting(True, torch.bfloat16, 2, "transposed"),
    Setting(False, torch.float64, 1, "transposed", zeros=True, scale=1e15),
    Setting(True, torch.float16, 4, "flat"),
    Setting(False, torch.float16, 2, "transposed", scale=4e3),  # what is owed may be above the largest number
    Setting(True, torch.float64, 1, "strided", scale=1e-30),
)


SWITCHES = {"error_feedback": False, "error_dtype": "bf16"}


@cache
def variants() -> Mapping[str, EDGCConfig]:
    """Every example of every method, the first one of each also with its switches turned, and some pairs of these."""
    settings = {name: examples.settings_of(name) for name in examples.FOUND}
    for name in {kind.method: next(iter(kind.examples)) for kind, _ in examples.FOUND.values()}.values():
        kind, _ = examples.FOUND[name]
        known = {field.name: field.default for field in fields(kind)}
        for key, value in SWITCHES.items():
            if name != "edgc" and known.get(key, value) != value:
                settings[f"{name}, {key} {value}"] = {**settings[name], key: value}
    more: tuple[dict[str, Any], ...] = (
        {"one_sided": True, "factor_dtype": "int4"},
        {"factor_dtype": "int8", "error_dtype": "bf16"},
        {"factor_dtype": "bf16", "one_sided": True},
        {"factor_dtype": "int8", "orthonormal_q": False},
        {"ef21": True, "factor_dtype": "int8"},
        {"one_sided": True, "refresh_every": 2},
    )
    for pair in more:
        settings[f"powersgd, {' '.join(map(str, pair.values()))}"] = {**settings["powersgd"], **pair}
    found: dict[str, EDGCConfig] = {}
    for name, values in settings.items():
        try:
            config = EDGCConfig.from_dict({**values, "min_compression_elements": SMALLEST, "seed": 3})
        except UserError:  # a switch that another setting forbids
            continue
        if config not in found.values():
            found[name] = config
    return found


def covering() -> list[Any]:
    """The first example of every method in every setting, the others in turn in one half of them, with both paths each;
    what has a switch turned, in one of each path."""
    firsts = {kind.method: name for name, (kind, _) in reversed(examples.FOUND.items())}.values()
    found = []
    for i, name in enumerate(variants()):
        half = SETTINGS[:4] if i % 2 else SETTINGS[4:]
        chosen = SETTINGS if name in firsts else half if name in examples.FOUND else SETTINGS[:2]
        found += [pytest.param(name, setting, id=f"{name}-{setting}") for setting in chosen]
    return found


def config_of(name: str) -> Any:
    return variants()[name]


@dataclass(frozen=True)
class Traits:
    """What a variant says about itself."""

    entrywise: bool
    low_rank: bool
    remembers: bool  # has error feedback, so that nothing is lost
    exact: bool
    bound: float | None  # of an entry's error, where it is exact on average only
    estimates: bool  # EF21
    decay: float  # of filtered error feedback
    reset_every: int

    @classmethod
    def of(cls, name: str) -> Traits:
        config = config_of(name)
        example = examples.FOUND[name][1] if name in examples.FOUND else None
        entrywise, low_rank = (isinstance(config, kind) for kind in (examples.EntrywiseConfig, examples.LowRankConfig))
        estimates, compressor = getattr(config, "ef21", False), config.build()
        remembers = estimates or getattr(compressor, "error_feedback", False)
        exact = "bf16" not in (config.method, getattr(config, "factor_dtype", ""), getattr(config, "error_dtype", ""))
        filtered = getattr(config, "error_decay", 0.0), getattr(config, "error_reset_every", 0)
        return cls(entrywise, low_rank, remembers, exact, example.bound if example else None, estimates, *filtered)

    @property
    def keeps_all(self) -> bool:
        return self.remembers and not (self.decay or self.reset_every)

    def kept(self, before: Tensor, unsent: Tensor, reductions: int) -> Tensor:
        """What is to be kept, once so many reductions have been, of what was not sent: all of it, or LoCo's share."""
        if self.reset_every and reductions % self.reset_every == 0:
            return torch.zeros_like(unsent)
        return self.decay * before + (1 - self.decay) * unsent


def gradients(step: int, worker: int, setting: Setting, device: torch.device, scale: float = 1.0) -> list[Gradient]:
    """Something in common, of low rank, and noise of each worker's own; the same numbers on every device."""
    common = torch.Generator().manual_seed(step)
    own = torch.Generator().manual_seed(1000 + 10 * step + worker)
    parts = []
    for shape in SHAPES:
        part = 0.3 * torch.randn(shape, generator=own)
        if len(shape) == 2:
            left, right = (torch.randn(side, 4, generator=common) for side in shape)
            part += left @ right.mT
        parts.append((scale * setting.scale * part.double()).to(device, setting.dtype))
    if setting.layout == "flat":
        flat = torch.cat([part.reshape(-1) for part in parts])
        views = flat.split([part.numel() for part in parts])
        parts = [view.view(shape) for view, shape in zip(views, SHAPES, strict=True)]
    elif setting.layout == "transposed":
        parts = [part.mT.contiguous().mT if part.dim() == 2 else part for part in parts]
    else:
        parts = [_strided(part) for part in parts]
    return [Gradient(f"p{i}", part) for i, part in enumerate(parts)]


def _strided(part: Tensor) -> Tensor:
    if not part.dim():
        return part
    wide = torch.zeros((*part.shape[:-1], 2 * part.shape[-1] + 1), dtype=part.dtype, device=part.device)
    return wide[..., 1::2].copy_(part)


def double(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().to(CPU, torch.float64, copy=True) for tensor in tensors]


def norm(parts: Sequence[Tensor]) -> float:
    """Of all together; without overflow."""
    top = max((float(part.abs().max()) for part in parts if part.numel()), default=0.0)
    return top * float(torch.stack([(part / top).norm() for part in parts]).norm()) if top > 0 else 0.0


def as_saved(state: dict[str, Any], to: torch.device | None = None) -> dict[str, Any]:
    """A state after a way through a file; its tensors on the device ``to``, or where they were."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, map_location=to, weights_only=True)
    return loaded


class Team:
    """W workers of one variant in one process, in lockstep."""

    def __init__(self, name: str, setting: Setting, device: torch.device = CPU) -> None:
        self.name, self.setting, self.device = name, setting, device
        self.workers: list[Compressor] = [config_of(name).build() for _ in range(setting.world)]
        self.reductions: Counter[str] = Counter()  # of every gradient, with a loss

    @property
    def states(self) -> list[dict[str, Any]]:
        return [worker.state_dict() for worker in self.workers]

    def load(self, states: Sequence[dict[str, Any]], to: torch.device | None = None) -> Team:
        for worker, state in zip(self.workers, states, strict=True):
            worker.load_state_dict(as_saved(state, to))
        return self

    def kept(self) -> list[list[Tensor]]:
        """Error feedback of every worker and gradient in fp64; zeros where there is none."""
        found = []
        for worker in self.workers:
            errors = {name: error.to(CPU, torch.float64) for name, error in worker.kept.items()}
            found.append([errors.get(f"p{i}", torch.zeros(s, dtype=torch.float64)) for i, s in enumerate(SHAPES)])
        return found

    def given(self, step: int, scale: float = 1.0) -> list[list[Gradient]]:
        zeros = 0.0 if self.setting.zeros and step == 0 else 1.0
        everyone = range(self.setting.world)
        return [gradients(step, worker, self.setting, self.device, zeros * scale) for worker in everyone]

    def reduce(self, given: Sequence[Sequence[Gradient]], rank: int | None) -> list[Statistics]:
        with masked_path(self.setting.masked):
            return reduce_together(self.workers, given, rank, settle=False)

    def settle(self, keep: bool = True) -> None:
        with masked_path(self.setting.masked):
            for worker in self.workers:
                worker.settle(keep)

    def advance(self, step: int, rank: int | None, scale: float = 1.0) -> list[Tensor]:
        """A whole step; what is in the buffer of worker 0."""
        given = self.given(step, scale)
        self.reduce(given, rank)
        self.settle()
        return [gradient.tensor.clone() for gradient in given[0]]

    def through(self, gradient: Gradient, rank: int | None) -> bool:
        """Whether a gradient is compressed with a loss at this rank."""
        traits, shape, bits = Traits.of(self.name), gradient.tensor.shape, 8 * gradient.tensor.element_size()
        exact = rank is None or (isinstance(self.workers[0], PowerSGD) and self.workers[0].refreshes(NAMES))
        if exact or not compressible(shape, SMALLEST, bits) or not (traits.entrywise or traits.low_rank):
            return False
        factors = getattr(config_of(self.name), "factor_dtype", "fp32")
        return traits.entrywise or saves_bytes(shape, rank, factors, bits)


# --------------------------------------------------------------------- laws


def step_holds(team: Team, step: int, rank: int | None) -> list[Tensor]:
    """One step: replicas equal bit for bit, sent + kept = input, finite, waits, norms; what the buffers hold."""
    setting, traits = team.setting, Traits.of(team.name)
    given, before, states = team.given(step), team.kept(), copy.deepcopy(team.states)
    brought = [
        [examples.came_in(worker, gradient) + error for gradient, error in zip(own, kept, strict=True)]
        for worker, own, kept in zip(team.workers, given, before, strict=True)
    ]
    known = [examples.known(team.workers[0], gradient) for gradient in given[0]]
    lossy = [team.through(gradient, rank) for gradient in given[0]]
    met = room(setting.world).meetings
    statistics = team.reduce(given, rank)
    if setting.world > 1:
        met, waits = room(setting.world).meetings - met, team.workers[0].waits(rank)
        assert met == waits if any(lossy) else met <= waits
    assert same(team.states, states), "a reduction changes nothing before it is settled"
    team.settle()
    kept = team.kept()

    results = [double([gradient.tensor for gradient in own]) for own in given]
    assert all(same(result, results[0]) for result in results), "replicas differ"
    assert all(bool(part.isfinite().all()) for part in results[0])
    if rank is None:
        # But for what is above the largest number of fp16: that is still owed, as the sum below has it.
        full = setting.dtype == torch.float16 and setting.scale > 1
        assert full or not any(bool(error.any()) for own in kept for error in own), "an exact step sends all"
    owed, left, last = (
        [sum(parts) / setting.world for parts in zip(*every, strict=True)] for every in (brought, kept, before)
    )
    for place, compressed in enumerate(lossy):
        team.reductions[given[0][place].name] += compressed
        size = max(norm([own[place]]) for own in brought)
        if not size:
            assert not results[0][place].any()
            continue
        assert results[0][place].any(), "nothing gets across"
        unsent = owed[place] - results[0][place]
        if compressed:
            unsent = traits.kept(last[place], unsent, team.reductions[given[0][place].name])
        missing = left[place] - unsent
        if compressed and not traits.remembers:
            if traits.bound is not None and rank is not None:
                top = max(float(own[place].abs().max()) for own in brought)
                assert float(missing.abs().max()) <= (traits.bound + IN_BF16) * top
            continue
        # An estimate is in fp32, so that what a narrow result cannot hold of it is never owed.
        narrow = setting.dtype in (torch.bfloat16, torch.float16) and (not compressed or traits.estimates)
        limit = EXACT if traits.exact and not narrow else IN_BF16
        assert norm([missing]) <= limit * size, (place, norm([missing]) / size)
    for statistic, own, error, was in zip(statistics, brought, kept, given, strict=True):
        assert int(statistic.skipped) == 0
        squares = [norm([m - h]) ** 2 for m, h, compressed in zip(own, known, lossy, strict=True) if compressed]
        assert math.isclose(float(statistic.input_sq), sum(squares), rel_tol=1e-3, abs_tol=1e-300), was[0].name
        if traits.keeps_all:
            squares = [norm([e]) ** 2 for e, compressed in zip(error, lossy, strict=True) if compressed]
            limit = 1e-3 if traits.exact and setting.dtype in (torch.float32, torch.float64) else 0.05
            wrong = abs(float(statistic.error_sq) - sum(squares))
            assert wrong <= limit * sum(squares) + 1e-6 * float(statistic.input_sq)
    return results[0]


def given_up(team: Team, step: int) -> None:
    """A number on one worker that is not finite: seen by all, and nothing of it stays."""
    (rank, place, bad), traits = BAD[step], Traits.of(team.name)
    before, given = copy.deepcopy(team.states), team.given(90 + step)
    given[-1][place].tensor[(0,) * given[-1][place].tensor.dim()] = bad
    protects = traits.entrywise or traits.low_rank
    lossy = any(team.through(gradient, rank) for gradient in given[0])
    statistics = team.reduce(given, rank)
    for own in given:
        assert not bool(own[place].tensor.isfinite().all()), "one worker does not see it"
        if lossy or protects:
            assert not any(bool(gradient.tensor.isfinite().any()) for gradient in own), "some of it went through"
    for statistic in statistics:
        assert int(statistic.skipped) == (lossy or protects)
        assert float(statistic.input_sq) == float(statistic.error_sq) == 0
    team.settle(keep=False)
    assert same(before, team.states), "it left traces"


def course_holds(name: str, setting: Setting, device: torch.device = CPU) -> None:
    """Steps with changing ranks, steps that are given up or dropped, a saved state; beside runs that never met those.

    What goes on from the saved state, and what never met a bad number, ends with the same bits; on the other path with
    the same bits where each entry is computed alone, else nearly so.
    """
    team = Team(name, setting, device)
    if not setting.zeros:
        given_up(team, 0)  # the first gradient of all
    for step in range(SAVED):
        step_holds(team, step, RANKS[step])
    saved = team.states
    pristine = copy.deepcopy(saved)
    twins = [Team(name, setting, device).load(saved)]
    other = Setting(**{**vars(setting), "masked": not setting.masked})
    if not (device.type != "cpu" and getattr(team.workers[0], "draws_at_random", False)):
        twins.append(Team(name, other, CPU).load(saved, CPU))
    for step in range(SAVED, len(RANKS)):
        if step in BAD:
            given_up(team, step)
        if step == 4:
            before = copy.deepcopy(team.states)
            team.reduce(team.given(80), 4)
            team.settle(keep=False)
            assert same(before, team.states), "a step that was dropped left traces"
        results = step_holds(team, step, RANKS[step])
        for twin in twins:
            others = double(twin.advance(step, RANKS[step]))
            if twin.setting == setting:
                assert same(results, others), f"step {step}: not as if it had never been stopped or disturbed"
            else:
                near(name, results, others, device)
    assert same(saved, pristine), "a saved state changed with the steps after it"
    assert same(team.states, twins[0].states)


def near(name: str, results: Sequence[Tensor], others: Sequence[Tensor], device: torch.device) -> None:
    """The results of both paths: the same bits of entrywise methods on one device, else near in norm."""
    if Traits.of(name).entrywise and device.type == "cpu":
        assert same(results, others), "the paths differ"
        return
    config = config_of(name)
    limit = max(CLOSE[getattr(config, key, "fp32")] for key in ("factor_dtype", "error_dtype"))
    # On another device a level, or with two bits a block's step, may fall to the other side.
    limit = max(limit, 0.1 if Traits.of(name).entrywise else 0.0)
    apart = [one - other for one, other in zip(results, others, strict=True)]
    assert norm(apart) <= limit * norm(others), norm(apart) / norm(others)


def scale_is_followed(name: str, setting: Setting, device: torch.device = CPU) -> None:
    """Gradients and state under a loss scale that falls: the same numbers, scaled."""
    scaled, plain, scale = Team(name, setting, device), Team(name, setting, device), 2.0**16
    for worker in scaled.workers:
        worker.rescale(scale)
    for step, rank in enumerate(RANKS):
        results = [double(team.advance(step, rank, by)) for team, by in ((scaled, scale), (plain, 1.0))]
        for one, other in zip(*results, strict=True):
            # Powers of two change no other bit, but for what looks at absolute sizes.
            assert torch.allclose(one / scale, other, rtol=1e-4, atol=1e-5), (step, rank)
        for worker in scaled.workers:
            worker.rescale(0.25)
        scale *= 0.25
