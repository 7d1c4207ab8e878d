"""The predictions of steps with pipeline stages, and the program that compares them with measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from experiments.bench import pipeline_steps, stages, steps, testbed
from experiments.bench.__main__ import app
from experiments.bench.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, SEND
from experiments.bench.pipeline_model import Compute, Traffic, predict
from experiments.bench.step_model import Link, Links
from experiments.spec.settings import RunConfig
from paper_figures import bench_steps

FREE_LINK = Link(latency=0.0, bandwidth=1e12)
COMPUTE = Compute(forward=(1.0, 1.0), backward=(2.0, 2.0), rest=0.25)


def links(replicas: Link = FREE_LINK, between: Link = FREE_LINK) -> Links:
    """An exchange takes as long as an all-reduce, and a gathering twice as long."""
    twice = Link(latency=2 * replicas.latency, bandwidth=replicas.bandwidth / 2)
    return {ALL_REDUCE: replicas, ALL_TO_ALL: replicas, ALL_GATHER: twice, SEND: between}


def traffic(*sent: tuple[float, ...], activations: float = 0.0, embedding: float = 0.0) -> Traffic:
    """All-reduces."""
    reduced = tuple(tuple((ALL_REDUCE, bytes_) for bytes_ in stage) for stage in sent)
    return Traffic(activations=activations, sent=reduced, embedding=embedding)


def test_steps_counted_by_hand() -> None:
    # 1F1B of equal stages: (micro-batches + stages - 1) times forward and backward.
    assert predict(COMPUTE, traffic((), ()), links(), 4) == pytest.approx(5 * 3 + 0.25)
    beside = replace(COMPUTE, beside=0.5)
    assert predict(beside, traffic((), ()), links(), 4) == pytest.approx(5 * 3.5 + 0.25)
    slow = Link(latency=0.1, bandwidth=10.0)
    # Stage 0 ends last, and its two messages follow: 0.1 + 2 each. Stage 1's are over before.
    sent = traffic((20.0, 20.0), (20.0,))
    assert predict(COMPUTE, sent, links(replicas=slow), 4) == pytest.approx(15 + 4.2 + 0.25)
    gathered = replace(sent, sent=(((ALL_TO_ALL, 20.0), (ALL_GATHER, 20.0)), ()))
    assert predict(COMPUTE, gathered, links(replicas=slow), 4) == pytest.approx(15 + 2.1 + 4.2 + 0.25)
    # Compression comes between, the embedding's sum after all.
    sent = traffic((20.0,), (), embedding=5.0)
    assert predict(COMPUTE, sent, links(replicas=slow), 4, 0.5) == pytest.approx(15 + 0.5 + 2.1 + 0.6 + 0.25)
    # With two micro-batches, whose activations take 0.3 s: stage 0 is busy until 1.3 and 2.6, stage 1 from 1.3 to 4.6
    # and to 7.9, with what it sends back; then stage 0 works until 9.9.
    between = Link(latency=0.1, bandwidth=10.0)
    sent = traffic((), (), activations=2.0)
    assert predict(COMPUTE, sent, links(between=between), 2) == pytest.approx(9.9 + 0.25)
    with pytest.raises(ValueError, match="1 stages send, but 2 compute"):
        predict(COMPUTE, traffic(()), links(), 2)


def measured(plan: pipeline_steps.Plan, compute: Compute, factor: float) -> pipeline_steps.Measured:
    """Steps as the model has them, those under a limit ``factor`` times as long; a round that is out of the way."""
    own = {rate: 1e9 if not rate else 1e5 * rate for rate in (0.0, *plan.rates)}
    sent = {name: [[(ALL_REDUCE, 1e6)], [(ALL_REDUCE, 2e6), (ALL_REDUCE, 1e6)]] for name in pipeline_steps.METHODS}
    activations = 4.0 * plan.sequence * plan.micro_batch * plan.hidden
    embedding = 4.0 * pipeline_steps.VOCABULARY * plan.hidden
    bytes_ = traffic((1e6,), (2e6, 1e6), activations=activations, embedding=embedding)
    rounds: list[dict[str, Any]] = []
    probes: list[dict[str, Any]] = []
    for rate, bandwidth in own.items():
        for kind in pipeline_steps.PROBES:
            probes += [
                {"mbit_per_s": rate, "kind": kind, "bytes": size, "seconds": 0.01 + size / bandwidth}
                for size in (1e5, 1e6)
            ]
    for rate, count, name in plan.configurations:
        link = Link(latency=0.01, bandwidth=own[rate])
        overhead = 0.0 if name == "none" else 0.3
        seconds = predict(compute, bytes_, links(link, link), count, overhead) * (factor if rate else 1)
        for index, disturbed in enumerate((1.0, 1.0, 5.0)):
            row = {"mbit_per_s": rate, "micro_batches": count, "method": name, "round": index}
            row |= {"seconds": seconds * disturbed}
            for stage in range(pipeline_steps.STAGES):
                row |= {
                    f"forward_{stage}": compute.forward[stage],
                    f"backward_{stage}": compute.backward[stage],
                }
            rounds.append(row)
    return pipeline_steps.Measured(pd.DataFrame(rounds), pd.DataFrame(probes), sent)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(0.01, 10.0), min_size=6, max_size=6), st.floats(0.5, 2.0))
def test_the_table_finds_what_the_steps_were_made_of(times: list[float], factor: float) -> None:
    plan = pipeline_steps.Plan(rates=(20.0, 200.0), micro_batches=(2, 3))
    compute = Compute(forward=(times[0], times[1]), backward=(times[2], times[3]), beside=times[4], rest=times[5])
    table = pipeline_steps.table(plan, measured(plan, compute, factor))
    assert len(table) == len(pipeline_steps.METHODS) * (2 + 2 * 2)
    assert set(table.loc[table["mbit_per_s"] == 0, "used"]) == {"calibration"}
    limited = table[table["used"] == "validation"]
    assert (limited["mbit_per_s"] > 0).all()
    assert (limited["error"] - (1 / factor - 1)).abs().max() < 1e-6
    overhead = table.set_index("method")["seconds_overhead"]
    assert overhead["bf16"].to_numpy() == pytest.approx(0.3, rel=1e-6)
    assert steps.summary(table)["configurations"] == len(limited)


def test_the_program_writes_tables_and_the_figure_has_a_panel_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = pipeline_steps.Plan(rates=(20.0,), micro_batches=(2,))
    found = measured(plan, COMPUTE, 1.2)
    monkeypatch.setattr(testbed, "missing", lambda **_: None)
    monkeypatch.setattr(pipeline_steps, "measure", lambda plan, advance: found)
    arguments = ["pipeline", "--rates", "20", "--micro-batches", "2", "--results", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    [folder] = tmp_path.iterdir()
    described = json.loads((folder / "pipeline.json").read_text())
    assert described["summary"]["median_error"] == pytest.approx(1 - 1 / 1.2)
    table = pd.read_csv(folder / "pipeline.csv")
    table.assign(layout="DP2").to_csv(folder / "steps.csv", index=False)
    fig = bench_steps.draw(folder)
    titles = [ax.get_title(loc="left") for ax in fig.axes]
    assert any("DP2 x PP2" in title for title in titles)
    points = sum(len(line.get_xdata()) for ax in fig.axes for line in ax.lines if line.get_gid() == "step")
    assert points == 2 * len(pipeline_steps.METHODS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--micro-batches", "1"], "--micro-batches 1 is not valid"),
        (["--rates", "0"], "--rates 0 is not valid"),
        (["--repeats", "0"], "--repeats 0 is not valid"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["pipeline", *arguments, "--results", str(tmp_path / "bench")])
    assert done.exit_code == 2
    assert words in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "bench").exists()


def test_real_ranks_note_what_they_send_and_time_messages(tmp_path: Path) -> None:
    """Four ranks without a testbed."""
    plan = pipeline_steps.Plan(rounds=1, layers=2, hidden=32, sequence=16)
    with stages.ranks(4) as group:
        for kind, sizes in pipeline_steps.PROBES.items():
            request = {"do": "collective", "kind": kind, "entries": sizes[0], "stages": pipeline_steps.STAGES}
            assert all(answer["seconds"] > 0 for answer in group.ask(request))
        quantised = {ALL_REDUCE, ALL_TO_ALL, ALL_GATHER}
        for name, kinds in (("none", {ALL_REDUCE}), ("powersgd_r4", {ALL_REDUCE}), ("int8", quantised)):
            values = pipeline_steps.settings(plan, name, 2)
            assert RunConfig(**values).micro_batches == 2
            answers = group.ask({"do": "train", "run": values, "bandwidths": [None, None]})
            for answer in answers:
                for iteration in answer["iterations"]:
                    assert sum(sent for _, sent in iteration["messages"]) == iteration["bytes"] > 0
                    assert {kind for kind, _ in iteration["messages"]} == kinds
            [row] = pipeline_steps._rounds(answers)
            assert all(0 < row[f"{kind}_{at}"] < row["seconds"] for kind in ("forward", "backward") for at in (0, 1))
