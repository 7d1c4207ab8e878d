"""The alpha-beta estimate against hand computation, its monotonicity, its refusals and its files."""

from __future__ import annotations

import csv
import subprocess
import sys
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
from experiments.common.written_tables import write_text
from experiments.simulation import cluster_model
from experiments.simulation.cluster_model import load_model, reduction, sweep
from experiments.simulation.cost import Model, all_gather_seconds, all_reduce_seconds
from experiments.simulation.inputs import groups_sharing_a_node, load_cluster
from experiments.simulation.placement import GPTShape, build
from experiments.spec import matrix

STUDIES = ("gpt2_345m", "gpt2_2p5b_v100", "gpt2_12p1b_h100")
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


def test_ring_formulas_by_hand() -> None:
    # 4 replicas, 1 GB, 1 GB/s, 10 us a hop: 6 hops, and 6/4 of the bytes over each link
    assert all_reduce_seconds(1e9, 4, 1e-5, 1e9) == pytest.approx(6e-5 + 1.5, rel=1e-12)
    assert all_gather_seconds(1e9, 4, 1e-5, 1e9) == pytest.approx(3e-5 + 3.0, rel=1e-12)
    assert all_reduce_seconds(1e9, 1, 1e-5, 1e9) == 0.0


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
    transfer = 4 * (alpha + 4 * 8 * 32 * 64 / 2 / speed)  # 4 micro-batches of 8 x 32 x 64 fp32 over 2 ranks, one way
    embedding = 2 * alpha + 4 * 512 * 64 / 2 / speed
    for stage in model.stages:
        assert model.other(stage) == pytest.approx(transfer + embedding, rel=1e-12)
    middle = GPTShape(layers=3, hidden=64, heads=4, sequence_length=32, vocab_size=500, tensor=2, pipeline=3)
    deeper = replace(model, shape=middle, stages=build(middle))
    assert deeper.other(deeper.stages[1]) == pytest.approx(2 * transfer, rel=1e-12)


@pytest.mark.parametrize("study", STUDIES)
def test_r_max_is_where_compression_stops_paying(study: str) -> None:
    for model in sweep(load_model(study)):
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
    for stage in slow.stages:
        for name in ("none", "bf16", "topk"):
            assert getattr(fast, name)(stage).seconds <= getattr(slow, name)(stage).seconds
            assert getattr(wider, name)(stage).seconds >= getattr(slow, name)(stage).seconds
        for bits in (8, 4):
            assert fast.quantised(stage, bits).seconds <= slow.quantised(stage, bits).seconds
            assert wider.quantised(stage, bits).seconds >= slow.quantised(stage, bits).seconds
        assert slow.quantised(stage, 4).bytes < slow.quantised(stage, 8).bytes < slow.none(stage).bytes
        assert fast.powersgd(stage, rank).seconds <= slow.powersgd(stage, rank).seconds
        higher = slow.powersgd(stage, rank + more, always=True)
        assert slow.powersgd(stage, rank, always=True).seconds <= higher.seconds
        # a faster network leaves less to save, because the time to compress stays
        saved = [reduction(at.powersgd(stage, rank).seconds, at.none(stage).seconds) for at in (slow, fast)]
        assert saved[1] <= saved[0] + 1e-9


def test_placement_refusals() -> None:
    with pytest.raises(UserError, match=r"nodes \* gpus_per_node = 8, but tensor \* pipeline \* data = 12"):
        groups_sharing_a_node(SHAPE, 4, 2)
    with pytest.raises(UserError, match=r"not divisible by parallel.tensor"):
        groups_sharing_a_node(SHAPE, 4, 3)
    with pytest.raises(UserError, match="beside another one of its group"):
        groups_sharing_a_node(SHAPE, 3, 4)
    # one replica: a node may hold several stages, and nothing is reduced
    assert groups_sharing_a_node(replace(SHAPE, data=1), 1, 4) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cluster__gpus": 4}, "unknown key gpus"),
        ({"cluster__nodes": {"value": 8, "kind": "guessed", "source": "me"}}, "nodes.kind"),
        ({"cluster__nodes": {"value": 8, "kind": "cited"}}, "missing key nodes.source"),
        (
            {"cluster__gpu__gemm_efficiency": {"value": 1.5, "kind": "cited", "source": "me"}},
            "gemm_efficiency.value = 1.5",
        ),
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


def test_files_are_those_of_the_kept_run(tmp_path: Path) -> None:
    """In a process of its own, where hashes of strings are others."""
    command = [sys.executable, "-m", "experiments.simulation.cluster_model", "--study", "gpt2_2p5b_v100"]
    subprocess.run([*command, "--out", tmp_path / "out"], check=True)
    names = sorted(path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith("."))
    assert names == ["moves.csv", "stages.csv", "steps.csv", "summary.json", "table.csv", "traces.csv"]
    reference = Path(__file__).parents[2] / "results" / "reference" / "workstation" / "gpt2_2p5b_v100"
    for name in names[1:]:
        assert (tmp_path / "out" / name).read_bytes() == (reference / name).read_bytes(), name
    for name in ("table.csv", "steps.csv", "traces.csv", "moves.csv"):
        assert {row["kind"] for row in csv.DictReader((tmp_path / "out" / name).open())} == {"simulated"}


@pytest.mark.parametrize(("study", "claimed"), [("gpt2_2p5b_v100", False), ("gpt2_12p1b_h100", True)])
def test_the_figure_says_simulated_and_refuses_anything_else(tmp_path: Path, study: str, claimed: bool) -> None:
    pytest.importorskip("seaborn")
    from paper_figures import saving
    from paper_figures.__main__ import draw

    cluster_model.main(study=study, out=tmp_path / study)
    figure = draw(study, tmp_path)
    drawn = [str(line.get_label()) for ax in figure.axes for line in ax.get_lines()]
    assert any(label.startswith("paper: up to") for label in drawn) == claimed
    for ax in figure.axes:
        assert "SIMULATED" in ax.get_title(loc="left")
        assert len(ax.get_lines()) >= 7
    assert [path.stat().st_size > 10_000 for path in saving.save(figure, tmp_path, study)] == [True] * 3
    path = tmp_path / study / "table.csv"
    write_text(path, path.read_text().replace("simulated", "measured"))
    with pytest.raises(UserError, match="not simulated"):
        draw(study, tmp_path)
