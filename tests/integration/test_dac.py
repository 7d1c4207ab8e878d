"""DAC under Megatron-Core, DP2 x PP2, over links with injected delays: stage 0's is slower, and later all of them."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edgc.compressors import Channel
from edgc.control.controller import Decision
from tests.integration.megatron_cases import configuration, session_of, steps
from tests.unit.test_network_change import by_formula
from tests.workers import run_workers

# Over 20 s: injected delays are waited for, and times have to be measured again after they change.
pytestmark = [pytest.mark.slow, pytest.mark.costly]

WINDOW, RANK = 4, 8
# On a busy machine times seem to change before they do; then nothing is judged for eight windows.
ITERATIONS = 96
DROP = 29  # iteration, the first of a window
FACTOR = 3.0
BANDWIDTHS = (0.5e6, 2e6)  # injected, per stage, in bytes per second
DAC = {
    "method": "edgc",
    "policy": "fixed",
    "rank": RANK,
    "window": WINDOW,
    "warmup_fraction": 0.0,
    "stability_tolerance": 10.0,
    "remeasure_above": 0.2,
    "entropy": {"iteration_rate": 0.25},
    "alignment": "measured",
    "search_start": 2,
    "search_repeats": 1,
}


class SlowChannel(Channel):
    """Whoever waits for collectives sleeps for bytes / bandwidth more."""

    bandwidth = 1.0
    counted = 0

    def finish(self) -> None:
        super().finish()
        waiting = time.perf_counter()
        time.sleep((self.bytes - self.counted) / SlowChannel.bandwidth)
        self.counted = self.bytes
        self.waited.add(waiting, time.perf_counter())


def trained() -> dict[str, Any]:
    train = {"iterations": ITERATIONS, "lr": 1e-3, "eval_interval": ITERATIONS}
    run = configuration("dac", DAC, model={"layers": 4, "hidden": 64}, train=train)
    session = session_of(run)
    engine = session.attachment.engine
    engine.open_channel = SlowChannel
    found: dict[str, Any] = {"stage": session.stage, "iterations": [], "decisions": []}
    for iteration in range(1, ITERATIONS + 1):
        SlowChannel.bandwidth = BANDWIDTHS[session.stage] / (FACTOR if iteration >= DROP else 1.0)
        found["iterations"].append({"iteration": iteration, "rank": engine.plan.ranks[session.stage]})
        steps(session, run, iteration, iteration + 1)
        found["decisions"] += [engine.decision] if engine.decision is not None else []
    session.attachment.remove()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_workers(4, trained)


@pytest.fixture(scope="module")
def decisions(ranks: list[dict[str, Any]]) -> list[Decision]:
    """Those of every rank."""
    first: list[Decision] = ranks[0]["decisions"]
    assert all(repr(other["decisions"]) == repr(first) for other in ranks)
    return first


def test_the_times_of_every_stage_are_measured_and_fitted(decisions: list[Decision]) -> None:
    slow, fast = next(d for d in decisions if d.timing).timing
    for timing in (slow, fast):
        assert timing.backward_seconds is not None and timing.backward_seconds > 0
        assert timing.residual is not None and 0 <= timing.residual < 1
        assert [rank for rank, _ in timing.timed][:4] == [4, 8, 16, 32]
    # Injected: a quarter of the bandwidth on stage 0; its matrices are those of stage 1 and the positions.
    assert slow.seconds_uncompressed > fast.seconds_uncompressed


def test_ranks_are_those_of_the_formula(decisions: list[Decision]) -> None:
    timing, active = (), []
    for decision in decisions:
        timing = decision.timing or timing
        if decision.phase == "active":
            assert decision.r_min is not None and decision.r_max is not None
            assert decision.ranks == by_formula(timing, RANK, decision.r_min, decision.r_max)
            active.append(decision.ranks)
    assert len(active) > 2 and active[0][0] == RANK
    second = active[0][1]
    assert second is None or second > RANK, "the stage with the faster link and the head start sends more"


def test_by_the_measured_times_stages_finish_closer_together_than_with_equal_ranks(decisions: list[Decision]) -> None:
    timing = next(d.timing for d in decisions if d.timing)
    ranks = next(d.ranks for d in decisions if d.phase == "active")

    def spread(chosen: Sequence[int | None]) -> float:
        ends = []
        for index, (stage, rank) in enumerate(zip(timing, chosen, strict=True)):
            line = np.polyfit(*zip(*stage.timed, strict=True), 1)
            seconds = stage.seconds_uncompressed if rank is None else float(np.polyval(line, rank))
            ends.append(seconds - sum(float(before.backward_seconds or 0) for before in timing[:index]))
        return max(ends) - min(ends)

    assert spread(ranks) < spread([ranks[0]] * 2)


def test_a_drop_of_bandwidth_is_noticed_and_measured(ranks: list[dict[str, Any]], decisions: list[Decision]) -> None:
    before = next(d for d in decisions if d.timing and d.iteration < DROP)
    trigger = [d for d in decisions if "measured anew" in d.reason][-1]
    after = [d for d in decisions if d.timing][-1]
    assert after.iteration > DROP and trigger.iteration < after.iteration
    assert re.search(r"stage \d measured [\d.]+ s, predicted [\d.]+ s at", trigger.reason)
    assert after.timing[0].seconds_uncompressed > before.timing[0].seconds_uncompressed
    # Training went on compressed, and the ranks of a stage hold for all its replicas.
    for rank in ranks:
        during = [i for i in rank["iterations"] if trigger.iteration < i["iteration"] <= after.iteration]
        assert rank["stage"] or all(iteration["rank"] == RANK for iteration in during)
    logged = [d for d in decisions if d.reduction_seconds]
    assert logged and all(math.isfinite(x) for d in logged for x in (*d.reduction_seconds, *d.predicted_seconds))
