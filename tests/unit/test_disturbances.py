"""Clusters whose stages are not alike: by hand, at their limits, and what the controller makes of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import pytest

from edgc.errors import UserError
from experiments.simulation import cluster_step, disturbances, scenarios
from experiments.simulation.cluster_model import load_model
from experiments.simulation.cost import Model
from experiments.simulation.disturbances import Uneven, course
from experiments.simulation.rank_trace import Trace
from experiments.simulation.scenarios import Case
from experiments.spec import matrix

OF = "gpt2_12p1b_h100"
GBITS = 25.0
ITERATIONS = 1000


@pytest.fixture(scope="module")
def even() -> Model:
    return replace(load_model(OF), gbits=GBITS)


def case(**values: Any) -> Case:
    return Case(label="a", **values)


def test_all_shares_of_one_change_nothing(even: Model) -> None:
    [(end, model)] = course(even, case(links=[1, 1, 1, 1], devices=[1, 1, 1, 1]), ITERATIONS).parts
    assert end == ITERATIONS and isinstance(model, Uneven)
    for name, (_, cost) in model.methods(edgc=False).items():
        other = even.methods(edgc=False)[name][1]
        for overlap in (False, True):
            found, expected = (
                cluster_step.step(on, what, overlap=overlap) for on, what in ((model, cost), (even, other))
            )
            assert found.seconds == pytest.approx(expected.seconds)


def test_a_stage_by_hand(even: Model) -> None:
    [(_, model)] = course(even, case(links=[1, 0.25, 1, 1], devices=[1, 1, 0.5, 1]), ITERATIONS).parts
    first, second, third, _ = model.stages
    latency = 2 * 3 * even.latency
    for method in ("none", "bf16"):
        mine, plain = getattr(model, method), getattr(even, method)
        assert mine(first) == plain(first)
        # A ring's latency stays what it is.
        expected = 4 * (plain(second).communication - latency) + latency
        assert mine(second).communication == pytest.approx(expected)
        assert mine(third).compress == pytest.approx(2 * plain(third).compress)
    assert cluster_step.forward_seconds(model, third) == pytest.approx(2 * cluster_step.forward_seconds(even, third))
    assert cluster_step.forward_seconds(model, second) == cluster_step.forward_seconds(even, second)


def test_a_disturbance_for_a_while_is_a_mean(even: Model) -> None:
    some = course(even, case(links=[0.1] * 4, start=0.4, end=0.6), ITERATIONS)
    assert [end for end, _ in some.parts] == [400, 600, 1000]
    assert [some.part(iteration) for iteration in (1, 400, 401, 600, 601, 1000)] == [0, 0, 1, 1, 2, 2]
    assert some.parts[0][1] is even and some.parts[2][1] is even
    slow = some.parts[1][1]
    means = [cluster_step.step(model, model.none, overlap=False).seconds for model in (even, slow)]
    assert some.mean_seconds(lambda model: model.none, overlap=False) == pytest.approx(0.8 * means[0] + 0.2 * means[1])
    # Ranks that change within the disturbance.
    dense, compressed = (None,) * 4, (64,) * 4
    spent = {(0, dense): 400, (1, dense): 100, (1, compressed): 100, (2, compressed): 400}
    trace = Trace(some, spent, ((1, "warmup", dense), (501, "active", compressed)), 16, 64)
    rank = [cluster_step.step(model, partial(model.powersgd, rank=64), overlap=False).seconds for model in (even, slow)]
    expected = 0.4 * means[0] + 0.1 * means[1] + 0.1 * rank[1] + 0.4 * rank[0]
    assert trace.mean_seconds(overlap=False) == pytest.approx(expected)


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return disturbances.table(scenarios.load_scenarios("break_even"))


def test_the_controller_notices_what_lasts_for_a_while_and_only_that(table: pd.DataFrame) -> None:
    edgc = table[(table["method"] == "edgc") & ~table["overlap"]].set_index("case")
    chosen = scenarios.load_scenarios("break_even").disturbances
    assert chosen is not None
    for name, one in chosen.cases.items():
        lasting = one.end - one.start < 1
        # Once in warm-up; when it starts, and when it ends.
        assert edgc.loc[name, "measured"] == (3 if lasting else 1), name
    once = table[table["method"] == "edgc_measured_once"]
    assert set(once["measured"]) == {1}


def test_alignment_and_measuring_again_pay_where_a_late_stage_is_slow(table: pd.DataFrame) -> None:
    saved = table[~table["overlap"]].pivot_table(index="case", columns="method", values="saved_percent")
    assert saved.loc["last_link", "edgc"] > saved.loc["last_link", "edgc_unaligned"] + 5
    assert saved.loc["congested_stage", "edgc"] > saved.loc["congested_stage", "edgc_measured_once"] + 5
    assert (saved["none"] == 0).all()
    assert (saved["powersgd_r64"] > saved["edgc"]).all()
    assert set(table["kind"]) == {"simulated"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"links": [0.5]}, "cases.a.links has 1 numbers"),
        ({"devices": [1, 1]}, "cases.a.devices has 2 numbers"),
        ({"start": 0.6, "end": 0.4}, "start = 0.6 is not below end = 0.4"),
        ({"links": [0, 1, 1, 1]}, "links"),
    ],
)
def test_wrong_cases_are_one_line(values: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    study = matrix.load_study("break_even")
    given = {**(study.scenarios or {})}
    given["disturbances"] = {**given["disturbances"], "cases": {"a": {"label": "a", **values}}}
    changed = study.model_copy(update={"scenarios": given})
    monkeypatch.setattr(
        scenarios, "load_study", lambda name: changed if name == "break_even" else matrix.load_study(name)
    )
    with pytest.raises(UserError) as error:
        scenarios.load_scenarios("break_even")
    assert words in str(error.value) and "\n" not in str(error.value)
