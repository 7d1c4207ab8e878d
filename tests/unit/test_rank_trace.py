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
from experiments.analyse.entropy_trend import grouped, trajectories
from experiments.analyse.runs import load_run
from experiments.simulation import rank_trace
from experiments.simulation.cluster_model import load_model, sweep
from experiments.simulation.cost import Cost, Model, step
from experiments.simulation.inputs import load_cluster
from experiments.simulation.placement import GPTShape, build
from experiments.simulation.rank_trace import Course, Recorded, Trace, follow, recorded
from experiments.spec import matrix
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
    found = rank_trace.entropies(pd.concat(trends, ignore_index=True))
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


def test_recorded_entropies_come_from_a_table_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("gpt", seed, "<layers>", at, -float(seed)) for seed in (2, 3) for at in (1, 10)]
    trend = pd.DataFrame(rows, columns=["variant", "seed", "group", "iteration", rank_trace.ENTROPY])
    monkeypatch.setattr(rank_trace, "PATH", tmp_path / "recorded.csv")
    with pytest.raises(SystemExit, match="2"):
        rank_trace.main(tmp_path / "trend.csv")
    said = capsys.readouterr().err
    assert "there is no such table" in said and said.count("\n") == 1 and not rank_trace.PATH.exists()
    for name in ("trend.csv", "trend.parquet"):
        trend.to_csv(tmp_path / name, index=False) if name.endswith("csv") else trend.to_parquet(tmp_path / name)
        rank_trace.main(tmp_path / name)
        assert recorded() == {"gpt": Recorded((0.1, 1.0), (-2.0, -2.0))}, "the first seed alone"


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
    phases = []
    for iteration in range(1, iterations + 1):
        plan, part = controller.plan(iteration), course.part(iteration)
        spent[part, plan.ranks] += 1
        phases.append((plan.phase, plan.ranks))
        if plan.exchange:
            start = (iteration - 1) // config.window * config.window
            value = line(change).mean(start / iterations, iteration / iterations)
            controller.observe(iteration, rank_trace.report(course.parts[part][1], controller, iteration, value))
    assert spent == trace.spent
    starts = [index for index, phase in enumerate(phases) if index == 0 or phase != phases[index - 1]]
    assert trace.moves == tuple((index + 1, *phases[index]) for index in starts)


def test_a_trace_at_one_rank_costs_what_the_fixed_rank_costs() -> None:
    model = toy()
    course = whole(model, 10)
    trace = Trace(course, {(0, (8, 12)): 10}, ((1, "active", (8, 12)),), 4, 16)
    assert same(trace.mean_cost(model.stages[1]), model.powersgd(model.stages[1], 12))
    ranks = dict(enumerate((8, 12)))
    fixed = step(model, lambda s: model.powersgd(s, ranks[s.stage]), overlap=True)
    assert trace.mean_seconds(overlap=True) == pytest.approx(fixed.seconds)
    half = Trace(course, {(0, (None, None)): 5, (0, (8, 12)): 5}, (), 4, 16)
    dense = model.none(model.stages[0])
    mixed = model.powersgd(model.stages[0], 8).times(0.5) + dense.times(0.5)
    assert same(half.mean_cost(model.stages[0]), mixed)


def same(one: Cost, other: Cost) -> bool:
    return all(math.isclose(getattr(one, key), getattr(other, key)) for key in ("bytes", "communication", "compress"))


def test_the_paper_scale_tables() -> None:
    study = "gpt2_12p1b_h100"
    models = list(sweep(load_model(study)))[::3]
    rows, moves = rank_trace.tables(study, models)
    assert len(rows) == len(recorded()) * len(models)
    run = matrix.find(study, "paper", "edgc_cqm-s1")
    for row in rows:
        assert row["kind"] == "simulated"
        assert float(row["share_uncompressed"]) >= run.edgc.warmup_fraction - 1e-6
        own = [m for m in moves if all(m[key] == row[key] for key in ("entropy", "gbits_per_second"))]
        assert own[0]["iteration"] == 1 and own[0]["phase"] == "warmup"
        assert all(1 <= move["iteration"] <= run.train.iterations for move in own)
    for model in models:
        of = {row["entropy"]: row for row in rows if row["gbits_per_second"] == f"{model.gbits:g}"}
        limits = {row["r_max"] for row in of.values()}
        assert len(limits) == 1, "entropy has no part in the search"
        dense = model.slowest(model.none).seconds
        for row in of.values():
            spent = float(row["seconds_communication"]) + float(row["seconds_compress"])
            expected = 100 * (1 - spent / dense)
            assert float(row["reduction_with_compress_percent"]) == pytest.approx(expected, abs=1e-3)
