"""edgc.control.controller as a state machine: phases, limits, resume, and equal decisions from equal numbers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgc.config import EDGCConfig
from edgc.control.adaptive import make_controller
from edgc.control.controller import Controller, Decision, Plan
from edgc.control.policies.spectral import SpectralConfig
from edgc.control.rank_model import StageModel, next_rank
from edgc.control.settings import GivenConfig, PolicyConfig
from edgc.errors import UserError
from edgc.measurement.report import Report
from edgc.sections import EntropyConfig
from edgc.timing.benchmark import GateVerdict
from tests import examples

SHAPES = [(256, 256), (256, 1024)]
NAN = math.nan
Probe = Callable[[int], float]
Curves = Callable[[int, Sequence[int]], Any]


def config(**overrides: Any) -> PolicyConfig:
    """Those of the settings that the policy can use."""
    values: dict[str, Any] = {"method": "edgc", "window": 10, "r_max": 64, **overrides}
    return PolicyConfig.from_record(values)


def drive(
    controller: Controller,
    entropies: Sequence[float],
    *,
    probe: Probe = lambda rank: 1.0,
    start: int = 1,
    stop: int | None = None,
    backward: float | None = 0.04,
    curves: Curves | None = None,
    jumpy: int | None = None,
) -> tuple[list[Plan], list[Decision]]:
    """Run ``start..stop``; window k reports ``entropies[k]`` for stage 0, 1 nat more per further stage.

    ``curves(k, grid)`` is window k's error curve per stage; a cost gate that is due gets one verdict per stage.
    With a seed ``jumpy`` times of reductions jump about, and some times are missing.
    """
    plans, decisions = [], []
    window = controller.config.window
    for iteration in range(start, (stop or controller.iterations) + 1):
        plan = controller.plan(iteration)
        assert plan == controller.plan(iteration), "planning changes nothing"
        plans.append(plan)
        if not plan.exchange:
            continue
        entropy = entropies[min((iteration - 1) // window, len(entropies) - 1)]
        chance, seconds, reductions = random.Random(f"{jumpy} {iteration}"), None, None
        if plan.probe_rank is not None:
            missing = jumpy is not None and chance.random() < 0.1
            seconds = (NAN if missing else probe(plan.probe_rank),) * controller.stages
        if jumpy is not None and controller.watches(iteration):
            reductions = tuple(chance.choice([0.0, 0.1, 0.1, 1.0, NAN]) for _ in range(controller.stages))
        grid = controller.rank_grid
        report = Report(
            tuple(entropy + stage for stage in range(controller.stages)),
            seconds,
            None if backward is None else (backward,) * controller.stages,
            error_curve=curves((iteration - 1) // window, grid) if curves and grid else None,
            gate=tuple(GateVerdict(s, "w", 1.0, 2.0, True) for s in range(controller.stages)) if plan.gate else (),
            reduction_seconds=reductions,
            loss=3 * entropy if math.isfinite(entropy) else math.inf,  # told, not finite
        )
        decision = controller.observe(iteration, report)
        if decision is not None:
            decisions.append(decision)
    return plans, decisions


def linear(dense: float) -> Probe:
    return lambda rank: 0.01 * rank + 0.1 if rank else dense


# Per scenario: settings, entropy of each window, then the rank from the next window on (None: warm-up).
SCENARIOS: list[tuple[str, dict[str, Any], list[float], list[int | None]]] = [
    ("stable at once", {}, [1] * 10, [None, 64, 64, 64, 64, 64, 64, 64, 64, 64]),
    ("until stable", {}, [5, 3, 2, 1.95] + [1.95] * 6, [None, None, None, 64, 64, 64, 64, 64, 64, 64]),
    ("never stable: half of the run", {}, list(range(10, 0, -1)), [None] * 4 + [64, 56, 48, 40, 32, 24]),
    ("a whole number of windows", {"warmup_fraction": 0.3}, [1] * 10, [None] * 2 + [64] * 8),
    ("nan at the limit waits", {}, [9, 8, 7, 6, NAN, NAN] + [1] * 4, [None] * 6 + [64] * 4),
    ("fall: at most 8 a window", {}, [1, 1] + [0] * 8, [None, 64, 56, 48, 40, 32, 24, 16, 16, 16]),
    ("there and back", {}, [1, 1, 0, 0, 0, 2, 2, 2, 2, 2], [None, 64, 56, 48, 40, 48, 56, 64, 64, 64]),
    (
        "inf while active",
        {},
        [1, 1, 0, math.inf, 0, 0, 0, 0, 0, 0],
        [None, 64, 56, 56, 48, 40, 32, 24, 16, 16],
    ),
    ("huge entropies", {}, [0, 0, -1e300, 1e300, 0, 0, 0, 0, 0, 0], [None, 64, 56] + [64] * 7),
    ("r_min", {"r_min": 48}, [1, 1] + [0] * 8, [None, 64, 56] + [48] * 7),
    ("step 11 is 8", {"step_limit": 11}, [1, 1] + [0] * 8, [None, 64, 56, 48, 40, 32, 24, 16, 16, 16]),
    ("fixed", {"policy": "fixed", "rank": 6, "r_max": None}, [1, 1] + [0] * 8, [None] + [6] * 9),
    ("fixed needs no entropy", {"policy": "fixed", "rank": 6}, [NAN] * 10, [None] * 4 + [6] * 6),
    # |dH| / |H_2 - H_1| = 1, .5, 0, .25, then a change beyond the first one; r_min = 16, r_max = 64
    (
        "released",
        {"policy": "released", "stability_tolerance": 0.4, "step_limit": 100},
        [1, 1.4, 1.0, 1.2, 1.2, 1.3, 5, 5, 5, 4.8],
        [None, 64, 64, 40, 16, 28, 64, 16, 16, 40],
    ),
    (
        "schedule: no limit on a step, no entropy after warm-up",
        {"policy": "schedule", "schedule": [[0.2, 24], [0.5, 6], [0.8, 12]], "r_max": None},
        [1, 1] + [NAN] * 8,
        [None, 24, 24, 24, 6, 6, 6, 12, 12, 12],
    ),
    # Warm-up and its end follow the entropy, the ranks the loss, which drive() makes 3 times the entropy.
    (
        "loss",
        {"policy": "loss", "stability_tolerance": 0.4, "step_limit": 100},
        [1, 1.4, 1.0, 1.2, 1.2, 1.3, 5, 5, 5, 4.8],
        [None, 64, 64, 40, 16, 28, 64, 16, 16, 40],
    ),
    ("released, no first change", {"policy": "released"}, [1, 1, 2, 2, 2, 2, 2, 2, 2, 2], [None] + [64] * 9),
    (
        "released, nan breaks the chain",
        {"policy": "released", "stability_tolerance": 0.4, "step_limit": 8},
        [1, 1.4, 1.4, NAN, 1.4, 1.4, 1.4, 1.4, 1.4, 1.4],
        [None, 64, 56, 56, 56, 48, 40, 32, 24, 16],
    ),
]


@pytest.mark.parametrize(
    ("overrides", "entropies", "expected"), [s[1:] for s in SCENARIOS], ids=[s[0] for s in SCENARIOS]
)
def test_state_machine(overrides: dict[str, Any], entropies: list[float], expected: list[int | None]) -> None:
    plans, decisions = drive(make_controller(config(**overrides), [SHAPES], 100), entropies)
    assert [d.iteration for d in decisions] == list(range(10, 101, 10))
    assert [d.ranks[0] for d in decisions] == expected
    assert [d.phase for d in decisions] == ["warmup" if rank is None else "active" for rank in expected]
    # Iterations 1-10 are uncompressed; the others follow the decision at the end of the window before.
    assert [p.ranks[0] for p in plans] == [rank for rank in [None, *expected[:-1]] for _ in range(10)]
    assert [p.exchange for p in plans] == [i % 10 == 0 for i in range(1, 101)]
    assert all(p.probe_rank is None for p in plans)
    assert all(d.reason for d in decisions)


def test_rank_follows_the_model_when_no_limit_binds() -> None:
    model, change = StageModel(SHAPES), -0.012
    wanted = next_rank(model, 64, 0.0, change)
    assert 56 < wanted < 63
    _, decisions = drive(make_controller(config(), [SHAPES], 100), [0.0, 0.0, change])
    assert decisions[-1].ranks[0] == 4 * round(wanted / 4)
    assert f"{wanted:.1f}" in decisions[-1].reason
    assert decisions[-1].target == pytest.approx(wanted)
    assert decisions[0].target is None, "warm-up asks for nothing"


def power_law(exponents: Sequence[Sequence[float | None]]) -> Curves:
    """Squared error (1 + rank)^-e, e per window and stage; None: no spectra. ``e`` = 1 meets 0.201 at rank 24."""

    def curves(window: int, grid: Sequence[int]) -> Any:
        row = exponents[min(window, len(exponents) - 1)]
        return tuple(None if e is None else tuple((1 + rank) ** -e for rank in grid) for e in row)

    return curves


# Per scenario: settings, exponent per window and stage from the third window on, then the ranks of windows 3, 4, ...
# Warm-up ends after two windows of equal entropy; the target 0.201 asks for rank 24 at e = 1, 40 at e = .87 and 8 at
# e = 1.5.
SPECTRAL: list[tuple[str, dict[str, Any], list[Any], list[tuple[int | None, ...]]]] = [
    ("down to the target", {}, [[1.0]], [(64,), (56,), (48,), (40,), (32,), (24,), (24,), (24,)]),
    ("step limit", {"step_limit": 100}, [[1.0]], [(64,)] + [(24,)] * 7),
    (
        "monotone",
        {"step_limit": 100, "monotone": True},
        [[0.87], [1.0], [1.0], [0.5]],
        [(64,), (40,), (32,), (28,)] + [(28,)] * 4,
    ),
    ("no spectra once", {}, [[1.0], [None], [1.0]], [(64,), (56,), (56,), (48,), (40,), (32,), (24,), (24,)]),
    ("stages on their own", {"step_limit": 100}, [[1.0, 0.87]], [(64, 64)] + [(24, 40)] * 7),
    ("one stage unknown", {"step_limit": 100}, [[1.0, None]], [(64, 64)] + [(24, 64)] * 7),
]


@pytest.mark.parametrize(
    ("overrides", "exponents", "expected"), [s[1:] for s in SPECTRAL], ids=[s[0] for s in SPECTRAL]
)
def test_spectral(overrides: dict[str, Any], exponents: list[Any], expected: list[tuple[int | None, ...]]) -> None:
    settings_ = config(policy="spectral", target_error=0.201, **overrides)
    controller = make_controller(settings_, [SHAPES] * len(exponents[0]), 100)
    # Entropy is not needed once warm-up is over.
    _, decisions = drive(controller, [1.0, 1.0, NAN], curves=power_law([[9.0] * len(exponents[0])] * 2 + exponents))
    assert [d.ranks for d in decisions[1:9]] == expected
    assert all(d.phase == "active" for d in decisions[1:])


@pytest.mark.parametrize("name", examples.CONSTANT)
def test_other_methods_compress_from_the_first_iteration(name: str) -> None:
    config = examples.config_of(name)
    controller = make_controller(config, [[], []], 30)
    assert controller.plan(1) == Plan("active", (config.fixed_rank or 1,) * 2, None, False)
    assert (config.fixed_rank == 8) == (config.method == "powersgd")


def test_the_cost_gate_measures_again_when_the_rank_has_changed() -> None:
    settings_ = config(cost_gate=True, gate_interval=25)
    plans, decisions = drive(make_controller(settings_, [SHAPES], 100), [1.0, 1.0, 0.0, 0.0, 1.0])
    # Active from 21; the rank moves at 30 and 40 and back up at 50 and 60; 86 is 25 after 61.
    assert [d.ranks[0] for d in decisions if d.iteration % 10 == 0][1:6] == [64, 56, 48, 56, 64]
    assert [i for i, plan in enumerate(plans, start=1) if plan.gate] == [21, 31, 41, 51, 61, 86]
    assert all(plan.exchange for plan in plans if plan.gate)
    assert all(d.gate == (GateVerdict(0, "w", 1.0, 2.0, True),) for d in decisions if plans[d.iteration - 1].gate)


def test_a_gate_that_compresses_nothing_is_noticed() -> None:
    settings_ = EDGCConfig(method="powersgd", rank=6, cost_gate=True)
    for some in (True, False):
        controller = make_controller(settings_, [SHAPES], 30)
        made = (GateVerdict(0, "w", 2.0, 1.0, False), GateVerdict(0, "v", 2.0, 3.0, some))
        controller.observe(1, Report((NAN,), gate=made))
        assert bool(controller.notice) == (not some)


def test_a_probe_that_was_given_up_is_timed_again() -> None:
    controller = make_controller(config(r_max=None, search_start=1, search_repeats=1), [[(256, 256)]] * 2, 100)
    controller.observe(1, Report((NAN, NAN), (0.5, 0.5)))
    assert controller.plan(2).probe_rank == 4
    assert controller.observe(2, Report((NAN, NAN), (0.1, NAN))) is None
    assert controller.plan(3).probe_rank == 4
    controller.observe(3, Report((NAN, NAN), (0.1, 0.1)))
    assert controller.plan(4).probe_rank == 8


def test_search_probes_then_decides() -> None:
    controller = make_controller(config(r_max=None, search_start=12), [[(256, 256)]], 200)
    plans, decisions = drive(controller, [1.0], probe=linear(dense=0.5))
    probes = {i: p.probe_rank for i, p in enumerate(plans, start=1) if p.probe_rank is not None}
    assert list(probes) == list(range(12, 24))
    assert list(probes.values()) == [0, 0, 4, 4, 8, 8, 16, 16, 32, 32, 64, 64]
    assert all(p.phase == "search" and p.exchange and p.ranks == (None,) for p in plans[11:23])
    assert (controller.r_max, controller.r_min) == (40, 8)  # 0.01 r + 0.1 = 0.5; a quarter in whole multiples
    found = [(d.iteration, d.phase, d.ranks[0]) for d in decisions]
    assert found[:5] == [
        (10, "warmup", None),
        (12, "search", None),
        (20, "search", None),
        (23, "warmup", None),
        (30, "active", 40),
    ]
    assert "r_max = 40" in decisions[3].reason and math.isnan(decisions[3].entropy[0])


def test_compression_that_never_pays_is_disabled() -> None:
    controller = make_controller(config(r_max=None), [SHAPES] * 2, 200)
    plans, decisions = drive(controller, [1.0], probe=linear(dense=0.05))
    assert decisions[-1].phase == "disabled"
    assert decisions[-1].iteration == 13
    assert "even rank 4 is slower" in decisions[-1].reason
    assert all(p == Plan("disabled", (None, None), None, False) for p in plans[13:])
    assert (decisions[-1].r_min, decisions[-1].r_max) == (None, None)
    assert "even rank 4 is slower" in controller.notice
    resumed = make_controller(config(r_max=None), [SHAPES] * 2, 200)
    assert not resumed.notice
    resumed.load_state_dict(controller.state_dict())
    assert resumed.notice, "a resumed run does not compress either"


def test_matrices_that_cannot_shrink_disable_compression() -> None:
    for controller, reason in (
        (make_controller(config(r_max=None), [[(8, 8)]], 100), "saves no bytes"),
        (make_controller(config(), [[], []], 100), "no matrix"),
    ):
        assert controller.plan(1).phase == "disabled"
        assert reason in controller.reason and reason in controller.notice


def test_measured_without_a_backward_time_says_so() -> None:
    settings_ = config(r_max=24, alignment="measured", search_start=1, search_repeats=1)
    _, decisions = drive(make_controller(settings_, [SHAPES] * 2, 100), [1.0], probe=linear(dense=9.0), backward=None)
    assert decisions[-1].ranks == (24, 24)
    assert any("no backward time" in d.reason for d in decisions)


@pytest.mark.parametrize(
    ("overrides", "shapes", "message"),
    [
        ({"window": 9}, SHAPES, "window = 9 is shorter than 1 / entropy.iteration_rate = 10"),
        ({"policy": "spectral", "window": 2, "entropy": {"iteration_rate": 0.3}}, SHAPES, "a window of at least 4"),
        ({"window": 100}, SHAPES, "window = 100 leaves nothing to compress in 100 iterations"),
        ({"step_limit": 2}, SHAPES, "step_limit = 2"),
        ({"r_max": 256}, SHAPES, "r_max = 256 is not below"),
        ({"policy": "fixed", "rank": 68}, SHAPES, "rank = 68 is above r_max"),
        ({"policy": "schedule", "schedule": [[0, 8], [0.5, 68]]}, SHAPES, "schedule: rank = 68 is above r_max"),
        ({}, [], "no matrix to compress"),
    ],
)
def test_settings_that_cannot_work_are_one_line_errors(
    overrides: dict[str, Any], shapes: list[tuple[int, int]], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make_controller(config(**overrides), [shapes, SHAPES], 100)
    assert caught.value.fix and "\n" not in str(caught.value)


def test_refuses_a_state_of_another_run() -> None:
    state = make_controller(config(), [SHAPES] * 2, 100).state_dict()
    timed: dict[str, Any] = {"alignment": "measured"}
    measuring = make_controller(config(**timed), [SHAPES] * 2, 100).state_dict()
    for saved, stages, overrides in (
        (state, 1, {}),
        (state, 2, {"r_max": None}),
        (state, 2, {"policy": "spectral"}),
        ({**state, "format": 99}, 2, {}),
        (measuring, 2, {**timed, "remeasure_above": None}),
        (measuring, 2, {}),
    ):
        with pytest.raises(UserError, match="does not fit"):
            make_controller(config(**overrides), [SHAPES] * stages, 100).load_state_dict(saved)


@dataclass(frozen=True)
class Story:
    """A run, with its entropy per window, a timing function that repeats, and error curves."""

    settings: PolicyConfig
    stages: int
    iterations: int
    entropies: list[float]
    probe: Probe
    curves: Curves
    overlapped: bool

    def controller(self) -> Controller:
        shapes = [SHAPES] * self.stages
        return make_controller(self.settings, shapes, self.iterations, overlapped=self.overlapped)

    def drive(self, controller: Controller, **options: Any) -> tuple[list[Plan], list[Decision]]:
        return drive(controller, self.entropies, probe=self.probe, curves=self.curves, **options)


@st.composite
def stories(draw: st.DrawFn) -> Story:
    multiple = draw(st.sampled_from([1, 2, 4, 8]))
    limits = st.none() | st.integers(1, 200 // multiple).map(lambda k: k * multiple)
    r_max, r_min = draw(limits), draw(limits)
    warmup, window = draw(st.floats(0, 0.5)), draw(st.integers(1, 12))
    ranks = st.integers(1, r_max or 30)
    settings_ = config(
        policy=draw(st.sampled_from(examples.POLICIES)),
        rank=draw(ranks),
        schedule=sorted(draw(st.dictionaries(st.floats(0, 1), ranks, min_size=1)).items()),
        r_max=r_max,
        r_min=min(r_min, r_max) if r_max and r_min else r_min,
        rank_multiple=multiple,
        step_limit=draw(st.integers(multiple, 3 * multiple + 2)),
        window=window,
        warmup_fraction=warmup,
        warmup_limit_fraction=draw(st.floats(warmup, 1)),
        stability_tolerance=draw(st.floats(1e-3, 2)),
        search_start=draw(st.integers(1, 30)),
        search_repeats=draw(st.integers(1, 3)),
        alignment=draw(st.sampled_from(["off", "measured"])),
        entropy=EntropyConfig(iteration_rate=1.0),
        target_error=draw(st.floats(0.01, 1)),
        monotone=draw(st.booleans()),
        cost_gate=draw(st.booleans()),
        gate_interval=draw(st.integers(1, 40)),
        remeasure_above=draw(st.sampled_from([0.05, 0.2, None])),
    )
    near, far = st.floats(-3, 3), st.floats(allow_nan=True, allow_infinity=True)
    dense, slope, stages = draw(st.floats(0, 3)), draw(st.floats(-0.01, 0.05)), draw(st.integers(1, 4))
    exponents = st.lists(st.none() | st.floats(0, 2), min_size=stages, max_size=stages)
    return Story(
        settings_,
        stages,
        draw(st.integers(window + 1, 150)),
        draw(st.lists(st.one_of(near, near, near, far), min_size=1, max_size=30)),
        lambda r: max(0.0, 0.2 + slope * r) if r else dense,
        power_law(draw(st.lists(exponents, min_size=1, max_size=30))),
        draw(st.booleans()),
    )


@settings(max_examples=300, deadline=None)
@given(story=stories())
def test_limits_hold_in_every_run(story: Story) -> None:
    settings_, stages, iterations, controller = story.settings, story.stages, story.iterations, story.controller()
    plans, decisions = story.drive(controller)
    window, multiple = settings_.window, settings_.rank_multiple
    given = settings_.ranks_given if isinstance(settings_, GivenConfig) else ()
    for iteration, plan in enumerate(plans, start=1):
        assert len(plan.ranks) == stages
        if plan.phase != "active":
            assert plan.ranks == (None,) * stages
        if iteration <= round(settings_.warmup_fraction * iterations, 6) or iteration <= window:
            assert plan.ranks == (None,) * stages
        assert plan.exchange or (iteration % window != 0 or plan.phase == "disabled")
    for decision in decisions:
        for stage, rank in enumerate(decision.ranks):
            if rank is None:
                assert decision.phase != "active" or stage > 0
                continue
            assert decision.r_min is not None
            assert decision.r_max is not None
            assert decision.r_min <= rank <= decision.r_max
            assert rank % multiple == 0 or (given and (stage == 0 or rank in (*given, decision.r_max)))
    moves = [d.ranks[0] for d in decisions if d.phase == "active"]
    for old, new in pairwise(moves):
        assert old is not None
        assert new is not None
        assert isinstance(settings_, GivenConfig) or abs(new - old) <= settings_.step_limit
    if moves:
        assert moves[0] in (given or (controller.r_max,))
    if isinstance(settings_, SpectralConfig) and settings_.monotone:
        assert all(new <= old for old, new in pairwise(moves) if old is not None and new is not None)
    gated = [i for i, plan in enumerate(plans, start=1) if plan.gate]
    assert not gated or settings_.cost_gate
    for iteration, plan in enumerate(plans, start=1):
        if settings_.cost_gate and plan.phase == "active":
            last = max((i for i in gated if i <= iteration), default=None)
            assert last is not None
            assert iteration - last < settings_.gate_interval
            assert plans[last - 1].ranks == plan.ranks
    ends = [d.iteration for d in decisions if d.iteration % window == 0]
    if not any(p.phase == "disabled" for p in plans) and controller.phase != "disabled":
        assert ends == list(range(window, iterations + 1, window))


@settings(max_examples=200, deadline=None)
@given(story=stories(), where=st.floats(0, 1), jumpy=st.none() | st.integers(0, 1000))
def test_a_resumed_run_decides_as_one_that_never_stopped(story: Story, where: float, jumpy: int | None) -> None:
    whole = story.drive(story.controller(), jumpy=jumpy)
    for decision in whole[1]:
        low, high = decision.r_min or 0, decision.r_max or 0
        assert all(rank is None or low <= rank <= high for rank in decision.ranks)
    cut = round(where * (story.iterations - 1))
    controller, resumed = story.controller(), story.controller()
    before = story.drive(controller, stop=cut, jumpy=jumpy) if cut else ([], [])
    saved = json.dumps(controller.state_dict(), allow_nan=False)
    resumed.load_state_dict(json.loads(saved))
    assert json.dumps(resumed.state_dict()) == saved
    after = story.drive(resumed, start=cut + 1, jumpy=jumpy)
    assert repr((before[0] + after[0], before[1] + after[1])) == repr(whole)  # repr: nan is equal to itself


def test_a_policy_that_is_told_no_loss_says_so_at_the_first_window() -> None:
    for window, first in ((10, 10), (1, 2)):  # the loss of iteration 1 comes after a window that it ends
        entropy = EntropyConfig(iteration_rate=1.0)
        controller = make_controller(config(policy="loss", window=window, entropy=entropy), [SHAPES], 100)
        if window == 1:
            controller.observe(1, Report((1.0,)))
        with pytest.raises(UserError, match=f"in the first {first} iterations; call add_loss"):
            controller.observe(first, Report((1.0,)))
    # Once it was told any, a window without one leaves the ranks as they are.
    controller = make_controller(config(policy="loss"), [SHAPES] * 2, 100)
    for end, loss in ((10, math.inf), (20, 3.0), (30, 2.5), (40, NAN)):
        decision = controller.observe(end, Report((1.0, 1.0), loss=loss))
    assert decision is not None and "no loss was measured in this window" in decision.reason


@settings(max_examples=60, deadline=None)
@given(entropies=st.lists(st.floats(-8, -6), min_size=12, max_size=12), cut=st.integers(0, 119))
def test_a_schedule_that_takes_over_a_run_has_its_own_ranks_at_once(entropies: list[float], cut: int) -> None:
    """As from the start: a window end that lies behind is looked at, not waited for."""
    limits: dict[str, Any] = {"window": 10, "r_max": 32, "stability_tolerance": 100.0}
    schedule = [[0, 12], [0.3, 28], [0.55, 8], [0.9, 20]]
    trunk = make_controller(config(**limits), [SHAPES], 120)
    drive(trunk, entropies, stop=cut)
    taken = make_controller(config(policy="schedule", schedule=schedule, **limits), [SHAPES], 120)
    if cut:
        taken.load_state_dict(json.loads(json.dumps(trunk.state_dict())), iteration=cut, changed_settings=True)
    own = make_controller(config(policy="schedule", schedule=schedule, **limits), [SHAPES], 120)
    plans, _ = drive(own, entropies)
    after, _ = drive(taken, entropies, start=cut + 1)
    assert repr(after) == repr(plans[cut:])
