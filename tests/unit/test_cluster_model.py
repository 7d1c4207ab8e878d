"""The alpha-beta estimate and the step around it: by hand, their monotonicity, their limits, refusals and files."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer import Typer
from typer.testing import CliRunner

from edgc.errors import UserError
from experiments.simulation import cluster_model, cost
from experiments.simulation.cluster_model import load_model, sweep
from experiments.simulation.cost import Cost, Model, reduction
from experiments.simulation.inputs import load_cluster
from experiments.simulation.placement import GPTShape, build
from experiments.spec import matrix

REFERENCE = Path(__file__).parents[2] / "results" / "reference" / "workstation"
SHAPE = GPTShape(layers=2, hidden=64, heads=4, sequence_length=32, vocab_size=500, tensor=2, pipeline=2, data=3)


def toy(**changes: Any) -> Model:
    """Two stages, two tensor-parallel ranks, three replicas; the V100 study's inputs."""
    return replace(Model(SHAPE, build(SHAPE), load_cluster("gpt2_2p5b_v100"), 2, 4, 8, 10.0), **changes)


def fake_study(monkeypatch: pytest.MonkeyPatch, folder: Path, **changes: Any) -> str:
    """A study of its own in ``folder``: the 2.5 B one with keys of its cluster section replaced."""
    values = matrix.load_study("gpt2_2p5b_v100").model_dump(exclude_unset=True)
    values["study"] = "mine"
    for path, value in changes.items():
        *sections, last = path.split("__")
        at = values
        for section in sections:
            at = at[section]
        at[last] = value
    (folder / "studies").mkdir()
    (folder / "studies" / "mine.yaml").write_text(yaml.safe_dump(values))
    (folder / "scales").symlink_to(matrix.FOLDER / "scales")
    monkeypatch.setattr(matrix, "FOLDER", folder)
    return "mine"


def test_methods_by_hand() -> None:
    model = toy()
    stage = model.stages[1]
    n, alpha, speed = stage.parameters, 14e-6, 10e9 / 8 / 2  # two groups share 10 Gbit/s
    ring = 2 * 2 / 3  # three replicas
    assert model.none(stage).communication == pytest.approx(4 * alpha + ring * 4 * n / speed, rel=1e-12)
    assert model.none(stage).compress == 0
    assert model.bf16(stage).communication == pytest.approx(4 * alpha + ring * 2 * n / speed, rel=1e-12)
    assert model.bf16(stage).compress == pytest.approx(3 * 4 * n / (900e9 * 0.8), rel=1e-12)
    low = model.powersgd(stage, 4)
    assert low.communication == pytest.approx(8 * alpha + ring * low.bytes / speed, rel=1e-12)
    shapes = stage.matrices
    entries = sum(m * k for m, k in shapes)
    compute = sum(8 * m * k * 4 / (15.7e12 * 0.5) + 4 * m * 16 / (15.7e12 * 0.02) for m, k in shapes)
    assert low.compress == pytest.approx(compute + 7 * 4 * entries / 720e9 + 1e-4 * len(shapes), rel=1e-12)
    kept = sum(round(0.01 * m * k) for m, k in shapes)
    sparse, dense = 8 * kept, 4 * (n - entries)
    assert model.topk(stage).bytes == sparse + dense
    expected = 2 * (alpha + sparse / speed) + 4 * alpha + ring * dense / speed
    assert model.topk(stage).communication == pytest.approx(expected, rel=1e-12)
    assert model.quantised(stage, 8).bytes == entries + 4 * (-(-entries // 256)) + dense


def test_other_traffic_by_hand() -> None:
    model = toy()
    alpha, speed = 14e-6, 10e9 / 8 / 2
    assert model.transfer() == pytest.approx(alpha + 4 * 8 * 32 * 64 / 2 / speed, rel=1e-12)  # fp32, over 2 ranks
    assert model.tied_embedding() == pytest.approx(2 * alpha + 4 * 512 * 64 / 2 / speed, rel=1e-12)
    assert replace(model, shape=replace(SHAPE, pipeline=1)).tied_embedding() == 0


def test_r_max_is_where_compression_stops_paying() -> None:
    for model in sweep(load_model("gpt2_12p1b_h100")):
        ranks, limit = model.edgc_ranks(), model.slowest(model.none).seconds
        assert ranks is not None
        r_min, mean, r_max = ranks
        assert all(rank % 4 == 0 for rank in ranks)
        assert 4 <= r_min <= mean <= r_max
        assert abs(r_min - r_max / 4) <= 2
        for rank, pays in ((r_max, True), (r_max + 4, False)):
            times = [model.powersgd(stage, rank, always=True).seconds for stage in model.stages]
            assert (max(times) <= limit) is pays


@given(
    gbits=st.floats(0.01, 1e4),
    factor=st.floats(1.0, 100.0),
    rank=st.integers(1, 60),
    more=st.integers(0, 60),
    world=st.integers(2, 64),
)
@settings(max_examples=40, deadline=None)
def test_monotone(gbits: float, factor: float, rank: int, more: int, world: int) -> None:
    slow = toy(shape=replace(SHAPE, data=world), gbits=gbits)
    fast, wider = replace(slow, gbits=gbits * factor), replace(slow, shape=replace(SHAPE, data=world + 1))
    methods = [at.methods(edgc=False) for at in (slow, fast, wider)]
    for stage in slow.stages:
        for name in methods[0]:
            seconds = [of[name][1](stage).seconds for of in methods]
            assert seconds[1] <= seconds[0] <= seconds[2], name
        assert slow.quantised(stage, 4).bytes < slow.quantised(stage, 8).bytes < slow.none(stage).bytes
        higher = slow.powersgd(stage, rank + more, always=True)
        assert slow.powersgd(stage, rank, always=True).seconds <= higher.seconds
        # a faster network leaves less to save, because the time to compress stays
        saved = [reduction(at.powersgd(stage, rank).seconds, at.none(stage).seconds) for at in (slow, fast)]
        assert saved[1] <= saved[0] + 1e-9


def test_forward_by_hand() -> None:
    model = toy()
    # One layer a stage, hidden 64, ffn 256, split over two ranks: 12 * 64^2 / 2 weights; 512 / 2 x 64 logits.
    weights, attention, tokens, speed = 12 * 64 * 64 / 2, 4 * 32 * 64 / 2, 8 * 32, 15.7e12 * 0.5
    first, last = (cost.forward_seconds(model, stage) for stage in model.stages)
    assert first == pytest.approx(tokens * (2 * weights + attention) / speed, rel=1e-12)
    assert last - first == pytest.approx(tokens * 2 * 256 * 64 / speed, rel=1e-12)


def test_the_parts_of_a_step_by_hand() -> None:
    model = replace(toy(), micro_batches=1)
    forward = [cost.forward_seconds(model, stage) for stage in model.stages]
    alpha, speed = 14e-6, 10e9 / 8 / 2
    travel = alpha + 4 * 8 * 32 * 64 / 2 / speed
    adam = 7 * 4 * max(stage.parameters for stage in model.stages) / (900e9 * 0.8)
    embedding = 2 * alpha + 4 * 512 * 64 / 2 / speed
    # One micro-batch through both stages and back, then the reduction of stage 0, which ends last.
    pipeline = 3 * sum(forward) + 2 * travel
    found = cost.step(model, model.none, overlap=False)
    assert found.computed[0] == pytest.approx(pipeline, rel=1e-9)
    expected = pipeline + model.none(model.stages[0]).communication + adam + embedding
    assert found.seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("method", "collectives"), [("none", 1), ("bf16", 1), ("int8", 1), ("powersgd_r64", 2)])
def test_every_bucket_pays_the_latency_of_all_its_collectives(method: str, collectives: int) -> None:
    """Of PowerSGD the second all-reduce waits for what the first one gives, in every bucket."""
    model = next(sweep(load_model("gpt2_12p1b_h100")))
    whole = model.methods()[method][1](model.stages[0])
    found = cost.buckets(model, model.stages[0], whole)
    latency = collectives * 2 * (model.shape.data - 1) * model.latency
    assert len(found) > 1 and latency > 0
    seconds = sum(sum(message) for bucket in found for message in bucket.messages)
    assert seconds == pytest.approx(whole.communication + (len(found) - 1) * latency, rel=1e-9)


def test_what_a_step_exposes_is_what_can_be_saved() -> None:
    model = toy()
    free, none = (
        [cost.step(model, what, overlap=overlap).seconds for overlap in (False, True)]
        for what in (lambda _: Cost(0.0, 0.0), model.none)
    )
    assert free[1] == pytest.approx(free[0])
    assert free[1] <= none[1] <= none[0]
    assert all(cost.step(model, one, overlap=False).seconds >= free[0] for _, one in model.methods().values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster__gpus": 4}, "unknown key gpus"),
        ({"cluster__nodes": {"value": 7, "kind": "cited", "source": "me"}}, "nodes * gpus_per_node = 28"),
        ({"cluster": None, "variants": {}, "scales": {}}, "has no cluster section"),
        ({"base__parallel": {"tensor": 4, "pipeline": 5, "data": 2}}, "model.layers = 52 is not divisible"),
        ({"base__parallel": {"tensor": 7, "pipeline": 4, "data": 2}}, "parallel.tensor = 7"),
        ({"base__data": {"source": "openwebtext", "vocab_size": None}}, "data.vocab_size is not set"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    study = fake_study(monkeypatch, tmp_path, **changes)
    app, out = Typer(), tmp_path / "out"
    app.command()(cluster_model.main)
    result = CliRunner().invoke(app, ["--study", study, "--out", str(out)])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert "mine.yaml" in result.stderr
    assert not out.exists()


def test_the_figure_says_simulated_and_refuses_anything_else(tmp_path: Path) -> None:
    pytest.importorskip("seaborn")
    from paper_figures.__main__ import draw

    for study, claimed in (("gpt2_2p5b_v100", False), ("gpt2_12p1b_h100", True)):
        figure = draw(study, REFERENCE)
        drawn = [str(line.get_label()) for ax in figure.axes for line in ax.get_lines()]
        assert any(label.startswith("paper: up to") for label in drawn) == claimed
        for ax in figure.axes:
            assert "SIMULATED" in ax.get_title(loc="left")
            assert len(ax.get_lines()) >= 7
    shutil.copytree(REFERENCE / study, tmp_path / study)
    path = tmp_path / study / "table.csv"
    path.write_text(path.read_text().replace("simulated", "measured"))
    with pytest.raises(UserError, match="not simulated"):
        draw(study, tmp_path)
