"""A network that changes while training goes on: when times are measured again, and what follows from it.

Times are simulated: T(r) of every stage is a line, and a window's measured time is T of the rank in use, with noise.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from edgc.control.adaptive import make_controller
from edgc.control.controller import Controller, Decision, Plan
from edgc.control.settings import PolicyConfig
from edgc.measurement.report import Report
from edgc.sections import EntropyConfig
from edgc.timing.change_detector import ChangeDetector
from edgc.timing.stage_times import StageTiming

SHAPES = [(256, 256), (256, 1024)]
NAN = math.nan
WINDOW = 10


@dataclass(frozen=True)
class Network:
    """Seconds: T(r) = fixed + slope * r per stage, the uncompressed time, and t_b of every stage."""

    slope: tuple[float, ...] = (0.01, 0.01, 0.01)
    fixed: float = 0.1
    dense: tuple[float, ...] = (2.0, 2.0, 2.0)
    backward: tuple[float, ...] = (0.04, 0.06, 0.3)

    def slower(self, factor: float) -> Network:
        """The same with ``factor`` times the transfer times; what is computed stays."""
        grown = tuple(factor * s for s in self.slope), tuple(factor * d for d in self.dense)
        return replace(self, slope=grown[0], dense=grown[1])

    def seconds(self, stage: int, rank: int | None) -> float:
        return self.fixed + self.slope[stage] * rank if rank else self.dense[stage]


def measured(**overrides: Any) -> PolicyConfig:
    """Those of the settings that the policy and the alignment can use."""
    values: dict[str, Any] = {
        "method": "edgc",
        "policy": "fixed",
        "rank": 16,
        "r_max": 64,
        "window": WINDOW,
        "alignment": "measured",
        "search_start": 1,
        "search_repeats": 1,
        "warmup_fraction": 0.001,
        "entropy": EntropyConfig(iteration_rate=1.0),
        **overrides,
    }
    return PolicyConfig.from_record(values)


class Run:
    """Drives a controller through a network that depends on the iteration."""

    def __init__(
        self,
        controller: Controller,
        network: Callable[[int], Network],
        *,
        noise: Callable[[], float] = lambda: 1.0,
        entropy: Callable[[int], float] = lambda iteration: 1.0,
        step: Callable[[float], float] = lambda seconds: seconds,
    ) -> None:
        self.controller, self.network, self.noise = controller, network, noise
        self.entropy, self.step = entropy, step
        self.plans: list[Plan] = []
        self.decisions: list[Decision] = []

    def to(self, stop: int, start: int = 1) -> Run:
        controller, stages = self.controller, range(self.controller.stages)
        for iteration in range(start, stop + 1):
            plan, network, seconds = controller.plan(iteration), self.network(iteration), None
            self.plans.append(plan)
            if not plan.exchange:
                continue
            if controller.watches(iteration):
                times = (network.seconds(stage, plan.ranks[stage]) for stage in stages)
                seconds = tuple(self.step(time) * self.noise() for time in times)
            probe = plan.probe_rank
            report = Report(
                (self.entropy(iteration),) * controller.stages,
                None if probe is None else tuple(network.seconds(stage, probe) for stage in stages),
                network.backward[: controller.stages],
                reduction_seconds=seconds,
            )
            decision = controller.observe(iteration, report)
            self.decisions += [decision] if decision is not None else []
        return self

    @property
    def measurements(self) -> list[int]:
        """The iterations in which a measurement ended."""
        return [decision.iteration for decision in self.decisions if decision.timing]

    @property
    def probed(self) -> list[int]:
        return [i for i, plan in enumerate(self.plans, start=1) if plan.probe_rank is not None]


def by_formula(
    timing: Sequence[StageTiming], first: int, r_min: int, r_max: int, multiple: int = 4
) -> tuple[int | None, ...]:
    """r_i = T_i^-1(T_0(r_0) + sum of t_b of the stages before), from the timed points alone."""
    fits = [np.polyfit(*zip(*stage.timed, strict=True), 1) for stage in timing]
    ranks: list[int | None] = [first]
    for stage in range(1, len(timing)):
        head_start = sum(float(before.backward_seconds or 0) for before in timing[:stage])
        budget = np.polyval(fits[0], first) + head_start
        real = (budget - fits[stage][1]) / fits[stage][0]
        if budget > timing[stage].seconds_uncompressed or real > r_max + 1e-6:
            ranks.append(None)
        else:
            ranks.append(min(r_max, max(r_min, math.floor(real / multiple + 1e-6) * multiple)))
    return tuple(ranks)


def test_a_drop_of_bandwidth_is_measured_once_and_the_ranks_follow() -> None:
    before, after = Network(), Network().slower(3.0)
    run = Run(make_controller(measured(), [SHAPES] * 3, 2000), lambda i: before if i <= 1000 else after).to(2000)
    first, second = [d for d in run.decisions if d.timing]
    assert first.iteration < 10 and 1010 < second.iteration < 1030
    # One window with the new times, then one probe per rank of the schedule; nothing before and nothing after.
    assert run.probed == [*range(1, 7), *range(1011, 1017)]
    assert all(plan.ranks == (16, 20, 24) for plan in run.plans[20:1016]), "training goes on compressed"
    assert run.plans[1016].ranks == run.plans[-1].ranks == (16, 16, 16 + 4 * (0.1 / 0.03 >= 4))
    for decision in (first, second):
        network = before if decision is first else after
        for stage, timing in enumerate(decision.timing):
            times = timing.seconds_per_rank, timing.seconds_fixed, timing.residual
            assert times == pytest.approx((network.slope[stage], 0.1, 0), abs=1e-9)
            assert timing.seconds_uncompressed == network.dense[stage]
            assert timing.backward_seconds == network.backward[stage]
    for decision in run.decisions:
        if decision.phase == "active":
            timing = first.timing if decision.iteration < second.iteration else second.timing
            assert decision.ranks == by_formula(timing, 16, 16, 64)
    # Timings are logged where a measurement ends, measured and predicted times at every window end that has them.
    trigger = next(d for d in run.decisions if "measured anew" in d.reason)
    assert trigger.iteration == 1010
    assert trigger.reduction_seconds == pytest.approx([0.58, 0.7, 0.82])
    assert trigger.predicted_seconds == pytest.approx([0.26, 0.3, 0.34])
    assert "stage 0 measured 0.58 s, predicted 0.26 s at rank 16" in trigger.reason
    assert "stage 2 measured 0.82 s, predicted 0.34 s at rank 24" in trigger.reason
    assert "times have changed" in second.reason and "ranks 16/20/24 -> 16/16/16" in second.reason


@pytest.mark.parametrize("policy", ["cqm", "spectral"])
def test_while_even_the_lowest_rank_is_slower_nothing_is_compressed(policy: str) -> None:
    """And so it is where other settings go on in between."""
    good = Network(dense=(0.7,) * 3)
    bad = replace(good, dense=(0.05,) * 3)

    def network(iteration: int) -> Network:
        return bad if 200 < iteration <= 600 else good

    # Stage 0's compressed times did not change; it is noticed because they did for a moment.
    noise = iter([*[1.0] * 54, *[2.0] * 6, *[1.0] * 2000]).__next__
    trunk = make_controller(measured(policy="cqm", r_max=None), [SHAPES] * 3, 1000)
    run = Run(trunk, network, noise=noise).to(400)
    paused = next(d for d in run.decisions if "nothing is compressed until" in d.reason)
    assert paused.phase == "active" and paused.ranks == (None,) * 3 and "even rank 4 is slower" in paused.reason
    assert any("compression would not pay" in d.reason for d in run.decisions)
    state = json.loads(json.dumps(trunk.state_dict()))
    other = make_controller(measured(policy=policy, r_max=None, step_limit=4), [SHAPES] * 3, 1000)
    other.load_state_dict(state, iteration=400, changed_settings=True)
    for controller in (trunk, other):
        later = Run(controller, network, noise=noise).to(1000, start=401)
        again = next(d for d in later.decisions if d.timing)
        assert again.iteration > 600 and all(p.ranks == (None,) * 3 for p in later.plans[: again.iteration - 400])
        why = " ".join(d.reason for d in later.decisions if d.iteration < again.iteration)
        assert "stage 0 measured 0.7 s, predicted 0.05 s at no compression" in why
        assert again.ranks[0] is not None
        assert again.ranks[0] == run.plans[paused.iteration - 1].ranks[0] or controller is other


@pytest.mark.parametrize("policy", ["cqm", "released", "spectral"])
def test_ranks_follow_the_policy_and_the_new_times(policy: str) -> None:
    before, after = Network(), Network().slower(3.0)
    settings_ = measured(policy=policy, r_min=8, target_error=0.2)
    controller = make_controller(settings_, [SHAPES] * 3, 400)
    run = Run(controller, lambda i: before if i <= 200 else after, entropy=lambda i: 1.0 - 0.002 * i).to(400)
    timing: Sequence[StageTiming] = ()
    active = 0
    for decision in run.decisions:
        timing = decision.timing or timing
        if decision.phase == "active":
            active += 1
            first = decision.ranks[0]
            assert first is not None and decision.r_min is not None and decision.r_max is not None
            assert decision.ranks == by_formula(timing, first, decision.r_min, decision.r_max)
    assert active > 20 and len(run.measurements) == 2


@pytest.mark.parametrize("overlapped", [False, True])
def test_noise_never_starts_a_measurement(overlapped: bool) -> None:
    generator = random.Random(0)
    controller = make_controller(measured(), [SHAPES] * 3, 1002 * WINDOW, overlapped=overlapped)
    # Compared with a window that is itself noisy, two times may differ by 1.1 / 0.9; its share is one of T.
    noise = 0.1 if not overlapped else 0.09
    run = Run(controller, lambda i: Network(), noise=lambda: generator.uniform(1 - noise, 1 + noise))
    run.to(1002 * WINDOW)
    assert len(run.measurements) == 1
    assert sum(bool(d.reduction_seconds) for d in run.decisions) == 1000


def test_a_step_that_always_takes_longer_is_measured_once_more_and_then_compared_with_itself() -> None:
    change = 600

    def network(iteration: int) -> Network:
        return Network() if iteration <= change else Network().slower(3.0)

    run = Run(make_controller(measured(), [SHAPES] * 3, 900), network, step=lambda seconds: 1.3 * seconds).to(900)
    first, confirmed, found, again = (d for d in run.decisions if d.timing)
    assert confirmed.iteration < 50 and "times have not changed" in confirmed.reason
    assert "times have not changed" in again.reason, "and so after every change"
    assert found.iteration > change and "times have changed" in found.reason
    assert "predicted 0.338 s at rank 16" in next(
        d.reason for d in run.decisions if change < d.iteration and "anew" in d.reason
    )
    assert first.ranks == (None,) * 3
    assert confirmed.ranks == run.plans[change - 1].ranks == (16, 20, 24)
    assert run.plans[-1].ranks == (16, 16, 16)


def test_overlapped_runs_are_compared_with_their_own_first_window() -> None:
    settings_ = measured(policy="cqm", r_min=8)

    def entropy(iteration: int) -> float:
        return 1.0 if iteration <= 60 else 0.0  # ranks fall by 8 a window

    def drive(hidden: Callable[[float], float], slow_from: int) -> Run:
        return Run(
            make_controller(settings_, [SHAPES] * 2, 400, overlapped=True),
            lambda i: Network().slower(3.0 if i > slow_from else 1.0),
            step=hidden,
            entropy=entropy,
        ).to(400)

    # Whatever is hidden, all or some or nothing, a moving rank alone is no change of the network.
    for hidden in (lambda t: 0.01, lambda t: max(0.01, t - 0.4), lambda t: t, lambda t: 0.5 * t):
        run = drive(hidden, 1000)
        assert len({plan.ranks for plan in run.plans}) > 4
        assert len(run.measurements) == 1
    # A drop that shows is seen; one that stays hidden does no harm and is left alone.
    assert len(drive(lambda t: max(0.01, t - 0.2), 300).measurements) == 2
    assert len(drive(lambda t: 0.01, 300).measurements) == 1


def test_times_that_are_not_known_are_not_judged() -> None:
    detector = ChangeDetector(0.2, 3, calibrates=False)
    assert not detector.judge([NAN, 9.0, 9.0], [1.0, NAN, 0.0])
    assert list(detector.judge([1.3, 0.7, 1.0], [1.0, 1.0, 1.0])) == [0, 1]
    assert not detector.judge([1.2, 0.8, 1.0], [1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("overrides", "stages"),
    [
        ({}, 1),
        ({"alignment": "off", "policy": "cqm"}, 3),
        ({"alignment": "off", "policy": "spectral"}, 2),
    ],
)
def test_one_stage_and_no_alignment_measure_nothing(overrides: dict[str, Any], stages: int) -> None:
    controller = make_controller(measured(**overrides), [SHAPES] * stages, 200)
    run = Run(controller, lambda i: Network().slower(1.0 if i < 100 else 9.0)).to(200)
    assert run.probed == [] == run.measurements
    assert not any(d.reduction_seconds for d in run.decisions)
    assert all(len(set(plan.ranks)) == 1 for plan in run.plans), "alignment is the identity"
    assert run.plans[-1].ranks[0] is not None


@pytest.mark.parametrize(("alignment", "stages"), [("measured", 1), ("off", 1), ("off", 3)])
def test_a_searched_r_max_alone_depends_on_stage_0(alignment: str, stages: int) -> None:
    before = Network(dense=(0.7,) * 3)

    def drive(after: Network) -> Run:
        settings_ = measured(policy="cqm", r_max=None, alignment=alignment)
        controller = make_controller(settings_, [SHAPES] * stages, 400)
        return Run(controller, lambda i: before if i <= 200 else after).to(400)

    slower = drive(replace(before, slope=(0.02, 0.01, 0.01)))
    assert [d.r_max for d in slower.decisions if d.timing] == [60, 28]
    assert slower.plans[-1].ranks == (28,) * stages
    if stages > 1:
        assert len(drive(replace(before, slope=(0.01, 0.02, 0.02))).measurements) == 1
