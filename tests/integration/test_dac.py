"""DAC under Megatron-Core over links with injected delays: stage 0's is slower, and later all of them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest

from edgc.control.controller import Decision
from edgc.timing.stage_times import StageTiming
from experiments.bench import stages
from tests.integration import dac_cases
from tests.unit.test_network_change import by_formula
from tests.workers import run_workers

# Over 20 s: injected delays are waited for, and times have to be measured again after they change.
pytestmark = pytest.mark.slow

Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results() -> Results:
    per_rank = run_workers(4, dac_cases.all_cases)
    return {case: [rank[case] for rank in per_rank] for case in per_rank[0]}


def decisions_of(results: Results, case: str) -> list[Decision]:
    return list(results[case][0]["decisions"])


def test_every_rank_takes_the_same_decisions(results: Results) -> None:
    for case, ranks in results.items():
        for other in ranks[1:]:
            assert repr(other["decisions"]) == repr(ranks[0]["decisions"]), case


def test_the_times_of_every_stage_are_measured_and_fitted(results: Results) -> None:
    [measured] = [d for d in decisions_of(results, "dac") if d.timing][:1]
    slow, fast = measured.timing
    for timing in (slow, fast):
        assert timing.backward_seconds is not None and timing.backward_seconds > 0
        assert timing.residual is not None and 0 <= timing.residual < 1
        assert [rank for rank, _ in timing.timed][:4] == [4, 8, 16, 32]
    assert slow.seconds_per_rank is not None and fast.seconds_per_rank is not None
    # Injected: a quarter of the bandwidth on stage 0; its matrices are those of stage 1 and the positions.
    assert slow.seconds_uncompressed > fast.seconds_uncompressed
    # Nothing is timed with equal ranks, or without compression.
    assert not any(d.timing for case in ("none", "equal") for d in decisions_of(results, case))


def test_ranks_are_those_of_the_formula(results: Results) -> None:
    for case in ("dac", "drop"):
        timing, checked = (), 0
        for decision in decisions_of(results, case):
            timing = decision.timing or timing
            if decision.phase == "active":
                assert decision.r_min is not None and decision.r_max is not None
                expected = by_formula(timing, dac_cases.PLAN.rank, decision.r_min, decision.r_max)
                assert decision.ranks == expected, case
                checked += 1
        assert checked > 2, case
    first, second = next(d for d in decisions_of(results, "dac") if d.phase == "active").ranks
    assert first == dac_cases.PLAN.rank
    assert second is None or second > first, "the stage with the faster link and the head start sends more"


def head_starts(timing: Sequence[StageTiming]) -> list[float]:
    return [sum(float(before.backward_seconds or 0) for before in timing[:stage]) for stage in range(len(timing))]


def test_by_the_measured_times_stages_finish_closer_together_than_with_equal_ranks(results: Results) -> None:
    decisions = decisions_of(results, "dac")
    timing = next(d.timing for d in decisions if d.timing)
    ranks = next(d.ranks for d in decisions if d.phase == "active")

    def spread(chosen: Sequence[int | None]) -> float:
        ends = []
        for stage, rank, head_start in zip(timing, chosen, head_starts(timing), strict=True):
            line = np.polyfit(*zip(*stage.timed, strict=True), 1)
            seconds = stage.seconds_uncompressed if rank is None else float(np.polyval(line, rank))
            ends.append(seconds - head_start)
        return max(ends) - min(ends)

    assert spread(ranks) < spread([ranks[0]] * 2)


def test_stages_finish_closer_together_than_with_equal_ranks(results: Results) -> None:
    found = pd.concat([stages.rows(case, results[case]) for case in stages.VARIANTS], ignore_index=True)
    steady = found.groupby(["variant", "stage"]).tail(dac_cases.PLAN.steps)
    # This table is of the iterations alone.
    data = stages.Measurements(steady, {}, steady, steady)
    table = stages.tables(dac_cases.PLAN, data)["stages"].set_index("variant")
    print("\n" + table.to_string(float_format=lambda value: f"{value:.4f}"))
    assert (table["iterations"] >= 3).all()
    assert table.loc["equal", "ranks"] == "8/8"
    assert table.loc["none", "ranks"] == "dense/dense"
    delays = {
        rank["stage"]: rank["iterations"][-1]["bytes"] / dac_cases.PLAN.bandwidths[rank["stage"]]
        for rank in results["equal"]
    }
    compared = table.loc[["equal", "dac"]]
    noise, injected = float((compared["spread_q3"] - compared["spread_q1"]).max()), delays[0] - delays[1]
    assert injected > 0
    if noise > injected / 2:
        pytest.skip(f"the machine is too busy: spreads vary by {noise:.3f} s, delays by {injected:.3f} s")
    assert table.loc["dac", "spread_seconds"] < table.loc["equal", "spread_seconds"]


def test_a_drop_of_bandwidth_is_noticed_and_measured(results: Results) -> None:
    decisions = decisions_of(results, "drop")
    before = next(d for d in decisions if d.timing and d.iteration < dac_cases.DROP)
    trigger = [d for d in decisions if "measured anew" in d.reason][-1]
    after = [d for d in decisions if d.timing][-1]
    assert after.iteration > dac_cases.DROP and trigger.iteration < after.iteration
    assert re.search(r"stage \d measured [\d.]+ s, predicted [\d.]+ s at", trigger.reason)
    assert after.timing[0].seconds_uncompressed > before.timing[0].seconds_uncompressed
    # Training went on compressed, and the ranks of every stage hold for all its replicas.
    for rank in results["drop"]:
        during = [
            i["rank"]
            for i in rank["iterations"]
            if trigger.iteration < i["iteration"] <= after.iteration and rank["stage"] == 0
        ]
        assert all(value == dac_cases.PLAN.rank for value in during)
    logged = [d for d in decisions if d.reduction_seconds]
    assert logged and all(
        math.isfinite(value) for d in logged for value in (*d.reduction_seconds, *d.predicted_seconds)
    )
