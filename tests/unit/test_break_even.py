"""Clusters beyond the paper's, and such whose stages are not alike: by hand, at their limits, and their tables."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgc.errors import UserError
from experiments.simulation import break_even, cost, rank_trace, scenarios
from experiments.simulation.cluster_model import load_model
from experiments.simulation.cost import Model
from experiments.simulation.scenarios import Case, MixtureOfExperts, Scenario, TwoSites, model_of
from experiments.spec import matrix

OF = "gpt2_12p1b_h100"
REFERENCE = Path(__file__).parents[2] / "results" / "reference" / "workstation" / "break_even"
COMMITTED = scenarios.load_scenarios("break_even")


def cluster(**values: Any) -> Scenario:
    return Scenario(**{"label": "a", "data": 4, "gbits_per_second": [1.0, 10.0], "reference": 10.0, **values})


EXPERTS = cluster(data=64, experts={"count": 16, "per_token": 2, "expert_parallel": 8})
SITES = cluster(data=64, sites={"latency_seconds": 0.01, "node_gbits_per_second": 400.0})


def test_one_expert_that_takes_every_token_is_the_dense_model() -> None:
    dense = model_of(OF, cluster(data=8), 100.0)
    one = model_of(OF, cluster(data=8, experts={"count": 1, "per_token": 1, "expert_parallel": 1}), 100.0)
    # Two groups of gradients pay the latency twice.
    dense, one = (model.assuming("network", "latency_seconds", 0.0) for model in (dense, one))
    assert isinstance(one, MixtureOfExperts)
    for mine, theirs in zip(one.stages, dense.stages, strict=True):
        assert one.active_weights(mine) == dense.active_weights(theirs)
        assert one.exchange(mine) == 0
        for (_, mine_of), (_, other) in zip(one.methods().values(), dense.methods().values(), strict=True):
            assert mine_of(mine).bytes == pytest.approx(other(theirs).bytes, rel=1e-6)
            assert mine_of(mine).seconds == pytest.approx(other(theirs).seconds, rel=1e-6)


def test_experts_by_hand() -> None:
    model = model_of(OF, EXPERTS, 100.0)
    dense = model_of(OF, cluster(data=64), 100.0)
    stage, plain = model.stages[1], dense.stages[1]  # 19 layers, no embedding
    mlp = 19 * 2 * 3584 * 4 * 3584 // 4
    assert stage.parameters - plain.parameters == mlp + 19 * (4 * 3584 // 4 + 3584)  # two experts instead of one
    # Two of sixteen experts: a GPU with two experts, shared by eight replicas, multiplies as if it had two for itself.
    assert model.active_weights(stage) - dense.active_weights(plain) == mlp
    # Experts are averaged over 64 / 8 replicas, the rest over 64.
    own = 2 * (mlp + 19 * (4 * 3584 // 4 + 3584))
    shared = stage.parameters - own
    alpha, speed = 14e-6, 100e9 / 8 / 4
    ring = 2 * 63 * alpha + 2 * 63 / 64 * 4 * shared / speed + 2 * 7 * alpha + 2 * 7 / 8 * 4 * own / speed
    assert model.none(stage).communication == pytest.approx(ring, rel=1e-9)
    # Each token's hidden state goes to two experts and comes back, 7 of 8 over the network.
    tokens = 4 * 1024 * 3584 / 4 * 2 * 7 / 8
    assert model.exchange(stage) == pytest.approx(19 * 2 * (7 * alpha + 4 * tokens / speed), rel=1e-9)


def test_two_sites_by_hand() -> None:
    model = model_of(OF, SITES, 10.0)
    stage = model.stages[0]
    size = 4 * stage.parameters
    within = 2 * 31 * 14e-6 + 2 * 31 / 32 * size / (400e9 / 8 / 4)
    across = 0.02 + 16 * size / (10e9 / 8)
    assert model.none(stage).communication == pytest.approx(within + across, rel=1e-9)
    # With a link between the sites that costs nothing, what is left is half the replicas.
    assert isinstance(model, TwoSites)
    half = model_of(OF, cluster(data=32), 400.0)
    free = replace(model, gbits=1e15, site_latency=0.0)
    assert free.none(stage).communication == pytest.approx(half.none(stage).communication, rel=1e-9)
    assert free.none(stage).latency == half.none(stage).latency > 0


@given(st.floats(1e-3, 1e6), st.floats(0.1, 90.0))
def test_a_boundary_is_found_to_two_percent(at: float, percent: float) -> None:
    found = break_even.boundary(lambda gbits: percent if gbits <= at else percent - 0.01, percent)
    if at < break_even.LEAST:
        assert found is None
    elif at >= break_even.MOST:
        assert found == math.inf
    else:
        assert found is not None and at / break_even.PRECISION <= found <= at


def test_the_kept_table_is_the_model() -> None:
    table = pd.read_csv(REFERENCE / "table.csv")
    assert set(table["kind"]) == {"simulated"}
    assert (table[table["method"] == "none"]["saved_percent"] == 0).all()
    # A method of fixed size saves less of a step, the faster the network is.
    fixed = table[~table["overlap"] & ~table["method"].isin(["none", "edgc"])]
    for _, rows in fixed.groupby(["cluster", "method"]):
        saved = list(rows.sort_values("gbits_per_second")["saved_percent"])
        assert saved == sorted(saved, reverse=True)
    for _, row in table.groupby("cluster").sample(2, random_state=1).iterrows():
        model = model_of(OF, COMMITTED.clusters[row["cluster"]], row["gbits_per_second"])
        seconds, saved = break_even.points(model, [row["method"]], overlap=row["overlap"])[row["method"]]
        assert (row["seconds_step"], row["saved_percent"]) == pytest.approx((seconds, saved), rel=1e-5)


def test_break_even_is_where_the_step_says() -> None:
    table = pd.read_csv(REFERENCE / "break_even.csv")
    # EDGC's ranks move in steps of four with the bandwidth.
    inside = table["gbits_per_second"].between(break_even.LEAST, break_even.MOST) & (table["method"] != "edgc")
    for _, row in table[inside].sample(20, random_state=1).iterrows():
        model, gbits = model_of(OF, COMMITTED.clusters[row["cluster"]], 1.0), row["gbits_per_second"]
        saved = [break_even.saved_at(model, row["method"], row["overlap"], gbits * factor) for factor in (0.99, 1.03)]
        assert saved[0] >= row["saved_percent"] > saved[1]


def test_an_assumption_touches_what_it_is_about() -> None:
    table, methods = pd.read_csv(REFERENCE / "sensitivity.csv"), COMMITTED.methods
    table["moved"] = (table["saved_percent_high"] - table["saved_percent_low"]).abs() > 1e-9
    moved = table.groupby(["assumption", "method"])["moved"].any()
    assert not moved[[("mean_rank_position", name) for name in methods if name != "edgc"]].any()
    assert moved["mean_rank_position", "edgc"]
    low_rank = [name for name in methods if "r64" in name or name == "edgc"]
    for name in methods:
        assert moved["gemm_efficiency", name] == moved["orthogonalise_efficiency", name] == (name in low_rank)
        assert moved["step_efficiency", name] and moved["micro_batches", name]
    # More computation per step leaves less to save.
    rows = table[table["assumption"].isin(["backward_ratio", "micro_batches"])]
    assert (rows["saved_percent_high"] <= rows["saved_percent_low"] + 1e-9).all()


@pytest.fixture(scope="module")
def even() -> Model:
    return replace(load_model(OF), gbits=25.0)


def test_a_stage_by_hand(even: Model) -> None:
    [(_, model)] = break_even.course(even, Case(label="a", links=[1, 0.25, 1, 1], devices=[1, 1, 0.5, 1]), 1000).parts
    first, second, third, _ = model.stages
    latency = 2 * 3 * even.latency
    for method in ("none", "bf16"):
        mine, plain = getattr(model, method), getattr(even, method)
        assert mine(first) == plain(first)
        # A ring's latency stays what it is.
        expected = 4 * (plain(second).communication - latency) + latency
        assert mine(second).communication == pytest.approx(expected)
        assert mine(third).compress == pytest.approx(2 * plain(third).compress)
    assert cost.forward_seconds(model, third) == pytest.approx(2 * cost.forward_seconds(even, third))
    assert cost.forward_seconds(model, second) == cost.forward_seconds(even, second)


def test_a_disturbance_for_a_while_is_a_mean(even: Model) -> None:
    some = break_even.course(even, Case(label="a", links=[0.1] * 4, start=0.4, end=0.6), 1000)
    assert [end for end, _ in some.parts] == [400, 600, 1000]
    assert [some.part(iteration) for iteration in (1, 400, 401, 600, 601, 1000)] == [0, 0, 1, 1, 2, 2]
    assert some.parts[0][1] is even and some.parts[2][1] is even
    slow = some.parts[1][1]
    means = [cost.step(model, model.none, overlap=False).seconds for model in (even, slow)]
    assert some.mean_seconds(lambda model: model.none, overlap=False) == pytest.approx(0.8 * means[0] + 0.2 * means[1])
    # Ranks that change within the disturbance.
    dense, compressed = (None,) * 4, (64,) * 4
    spent = {(0, dense): 400, (1, dense): 100, (1, compressed): 100, (2, compressed): 400}
    trace = rank_trace.Trace(some, spent, 16, 64)
    rank = [cost.step(model, partial(model.powersgd, rank=64), overlap=False).seconds for model in (even, slow)]
    expected = 0.4 * means[0] + 0.1 * means[1] + 0.1 * rank[1] + 0.4 * rank[0]
    assert trace.mean_seconds(overlap=False) == pytest.approx(expected)


def test_the_controller_notices_what_lasts_for_a_while_and_alignment_pays_where_a_late_stage_is_slow() -> None:
    chosen = COMMITTED.disturbances
    assert chosen is not None
    cases = {name: chosen.cases[name] for name in ("last_link", "congested_stage")}
    some = COMMITTED.model_copy(update={"disturbances": chosen.model_copy(update={"cases": cases})})
    table = pd.DataFrame(break_even.disturbances(some))
    kept = pd.read_csv(REFERENCE / "disturbances.csv")
    kept = kept[kept["case"].isin(cases)].reset_index(drop=True).drop(columns="kind")
    pd.testing.assert_frame_equal(table, kept, rtol=1e-5, check_dtype=False)
    table = table[~table["overlap"]]
    measured, saved = (
        table.pivot(index="case", columns="method", values=name) for name in ("measured", "saved_percent")
    )
    # Once in warm-up; where it lasts for a while also when it starts, and when it ends.
    assert measured["edgc"].to_dict() == {"last_link": 1, "congested_stage": 3}
    assert set(measured["edgc_measured_once"]) == {1}
    assert saved.loc["last_link", "edgc"] > saved.loc["last_link", "edgc_unaligned"] + 5
    assert saved.loc["congested_stage", "edgc"] > saved.loc["congested_stage", "edgc_measured_once"] + 5
    assert (saved["none"] == 0).all() and (saved["powersgd_r64"] > saved["edgc"]).all()


PAIR = {"count": 2, "per_token": 1, "expert_parallel": 2}
LINK = {"latency_seconds": 0, "node_gbits_per_second": 1}


@pytest.mark.parametrize(
    ("part", "values", "words"),
    [
        ("cluster", {"data": 3, "sites": LINK}, "data = 3 is odd"),
        ("cluster", {"data": 6, "experts": PAIR | {"count": 8, "expert_parallel": 4}}, "does not divide"),
        ("cluster", {"data": 8, "experts": PAIR | {"per_token": 3}}, "more than count"),
        ("cluster", {"data": 8, "experts": PAIR, "sites": LINK}, "not modelled"),
        ("cluster", {"replicas": 8}, "replicas"),
        ("case", {"links": [0.5]}, "cases.a.links has 1 numbers"),
        ("case", {"devices": [1, 1]}, "cases.a.devices has 2 numbers"),
        ("case", {"start": 0.6, "end": 0.4}, "start = 0.6 is not below end = 0.4"),
        ("case", {"links": [0, 1, 1, 1]}, "links"),
    ],
)
def test_scenarios_that_cannot_be(
    part: str, values: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = matrix.load_study("break_even")
    section = {**(study.scenarios or {})}
    if part == "cluster":
        section["clusters"] = {"a": {"label": "a", "data": 4, "gbits_per_second": [1, 2], "reference": 1, **values}}
    else:
        section["disturbances"] = {**section["disturbances"], "cases": {"a": {"label": "a", **values}}}
    changed = study.model_copy(update={"scenarios": section})
    load = matrix.load_study
    monkeypatch.setattr(scenarios, "load_study", lambda name: changed if name == "break_even" else load(name))
    with pytest.raises(UserError) as error:
        scenarios.load_scenarios("break_even")
    assert words in str(error.value) and "break_even.yaml" in str(error.value) and "\n" not in str(error.value)
