"""The ranks of a run that was never trained: the controller on recorded or made-up entropies."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgc.config import EDGCConfig
from edgc.control.adaptive import make_controller
from edgc.control.policies.base import Ranks
from edgc.control.settings import PolicyConfig
from experiments.analyse.entropy_trend import grouped, trajectories
from experiments.analyse.runs import load_run
from experiments.simulation import rank_trace
from experiments.simulation.cost import Cost, Model, step
from experiments.simulation.inputs import load_cluster
from experiments.simulation.placement import GPTShape, build
from experiments.simulation.rank_trace import Course, Recorded, Trace, follow, recorded, stable_after
from experiments.verdicts import archive

REFERENCE = Path(__file__).parents[2] / "results" / "reference" / "workstation" / "entropy_trend"
SHAPE = GPTShape(layers=4, hidden=256, heads=4, sequence_length=32, vocab_size=500, tensor=1, pipeline=2, data=4)
CONFIG = EDGCConfig(method="edgc", policy="cqm", alignment="measured", remeasure_above=None, window=50)
ITERATIONS = 5000
STILL = Recorded((1.0,), (-6.0,))


def toy(gbits: float = 1.0) -> Model:
    model = Model(SHAPE, build(SHAPE), load_cluster("gpt2_2p5b_v100"), 1, 4, 8, gbits)
    # Launches of kernels would be all that such small matrices take.
    return model.assuming("gpu", "seconds_per_matrix", 1e-7)


def whole(model: Model, iterations: int = ITERATIONS) -> Course:
    """A run in which nothing changes."""
    return Course(((iterations, model),))


def line(change: float, start: float = 0.1) -> Recorded:
    """Constant until ``start``, then linear to ``change`` nats more at the end."""
    return Recorded((start, 1.0), (-6.0, -6.0 + change))


def test_the_recorded_entropies_are_those_of_the_kept_runs(tmp_path: Path) -> None:
    trends = []
    for name in archive.unpack(REFERENCE, tmp_path):
        run = load_run(tmp_path / name)
        trends.append(trajectories(grouped(run.tensors)).assign(variant=run.variant, seed=run.seed))
    trend = pd.concat(trends, ignore_index=True)
    first = trend["seed"] == trend.groupby("variant")["seed"].transform("min")
    trend = trend[(trend["group"] == "<layers>") & first]
    share = trend["iteration"] / trend.groupby("variant")["iteration"].transform("max")
    found = pd.DataFrame({"run": trend["variant"], "share": share.round(6), "entropy": trend["entropy_histogram"]})
    kept = pd.read_csv(rank_trace.PATH)
    assert set(kept["run"]) == set(found["run"]) == set(recorded())
    assert set(found.groupby("run").size()) == {len(found) // found["run"].nunique()}, "one seed of each"
    both = kept.merge(found, on=["run", "share"], how="outer", suffixes=("", "_found"))
    assert len(both) == len(kept) == len(found)
    assert (both["entropy"] - both["entropy_found"]).abs().max() < 1e-5


@given(st.floats(0.0, 0.9), st.floats(0.01, 0.1))
def test_a_mean_of_a_window_is_the_integral(start: float, length: float) -> None:
    entropy = Recorded((0.2, 0.4, 1.0), (1.0, 3.0, 0.0))
    at = np.linspace(start, start + length, 20001)
    expected = float(np.interp(at, entropy.shares, entropy.entropy).mean())
    assert entropy.mean(start, start + length) == pytest.approx(expected, abs=1e-3)


def test_constant_entropy_keeps_the_largest_rank_that_pays() -> None:
    model = toy()
    trace = follow(whole(model), STILL, CONFIG)
    expected = model.largest_useful_rank()
    assert expected is not None and trace.r_max is not None and trace.r_min is not None
    # The search interpolates between ranks that double; times grow a little faster than a line.
    assert 0.8 * expected <= trace.r_max <= expected
    assert sum(trace.spent.values()) == ITERATIONS
    assert trace.share(0, None) == pytest.approx(CONFIG.warmup_fraction)
    assert trace.share(0, trace.r_max) == pytest.approx(1 - CONFIG.warmup_fraction)
    assert trace.mean_rank(0) == trace.r_max


def test_ranks_follow_entropy_and_so_do_bytes_and_seconds() -> None:
    model = toy()
    traces = [follow(whole(model), line(change), CONFIG) for change in (0.0, -0.2, -2.0)]
    ranks = [trace.mean_rank(0) for trace in traces]
    assert ranks[0] > ranks[1] > ranks[2]
    assert traces[2].share(0, traces[2].r_min) > 0.4
    for stage in model.stages:
        costs = [trace.mean_cost(stage) for trace in traces]
        assert costs[0].bytes > costs[1].bytes > costs[2].bytes
    for overlap in (False, True):
        seconds = [trace.mean_seconds(overlap=overlap) for trace in traces]
        assert seconds[0] > seconds[1] > seconds[2]
    rising = follow(whole(model), line(2.0), CONFIG)
    assert rising.spent == traces[0].spent, "above r_max there is nothing"


@settings(deadline=None, max_examples=15)
@given(st.floats(-1.0, 1.0), st.integers(3, 12), st.integers(300, 1501))
def test_jumps_between_windows_change_nothing(change: float, windows: int, iterations: int) -> None:
    """A controller that is asked in every iteration, over links that are slow for a while, gives the same."""
    config = replace(CONFIG, window=max(20, iterations // (10 * windows)), remeasure_above=0.2)
    course = Course(((iterations // 2, toy()), (iterations * 3 // 4, toy(gbits=0.2)), (iterations, toy())))
    trace = follow(course, line(change), config)
    controller = make_controller(config, [stage.matrices for stage in course.stages], iterations)
    spent: Counter[tuple[int, Ranks]] = Counter()
    for iteration in range(1, iterations + 1):
        plan, part = controller.plan(iteration), course.part(iteration)
        spent[part, plan.ranks] += 1
        if plan.exchange:
            start = (iteration - 1) // config.window * config.window
            value = line(change).mean(start / iterations, iteration / iterations)
            controller.observe(iteration, rank_trace.report(course.parts[part][1], controller, iteration, value))
    assert spent == trace.spent


def test_warm_up_ends_with_the_first_windows_that_agree() -> None:
    # By 0.3 nats in every twentieth up to half of the run, then still.
    assert isinstance(CONFIG, PolicyConfig)
    falling = Recorded((0.0, 0.5, 1.0), (-6.0, -9.0, -9.0))
    assert stable_after(falling, CONFIG, 20) == 0.5, "warmup_limit_fraction"
    assert stable_after(falling, replace(CONFIG, warmup_limit_fraction=1.0), 20) == 0.6
    assert stable_after(falling, replace(CONFIG, stability_tolerance=0.31), 20) == CONFIG.warmup_fraction
    assert stable_after(falling, CONFIG, 200) == CONFIG.warmup_fraction, "none differs much from the next"


def test_a_trace_at_one_rank_costs_what_the_fixed_rank_costs() -> None:
    model = toy()
    course = whole(model, 10)
    trace = Trace(course, {(0, (8, 12)): 10}, 4, 16)
    assert same(trace.mean_cost(model.stages[1]), model.powersgd(model.stages[1], 12))
    ranks = dict(enumerate((8, 12)))
    fixed = step(model, lambda s: model.powersgd(s, ranks[s.stage]), overlap=True)
    assert trace.mean_seconds(overlap=True) == pytest.approx(fixed.seconds)
    half = Trace(course, {(0, (None, None)): 5, (0, (8, 12)): 5}, 4, 16)
    dense = model.none(model.stages[0])
    mixed = model.powersgd(model.stages[0], 8).times(0.5) + dense.times(0.5)
    assert same(half.mean_cost(model.stages[0]), mixed)


def same(one: Cost, other: Cost) -> bool:
    return all(math.isclose(getattr(one, key), getattr(other, key)) for key in ("bytes", "communication", "compress"))
