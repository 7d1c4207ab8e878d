"""The dry run against ranks that really train: every number that both have must be the same."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from edgc.compressors.quantization import _CHUNK_ON_GPU
from experiments.simulation import dry_run
from experiments.simulation.placement import build, shape_of, study_run
from tests.workers import run_workers

pytest.importorskip("megatron.core")

from tests.integration import virtual_cases as cases

pytestmark = [pytest.mark.slow, pytest.mark.costly]
ROOT = Path(__file__).resolve().parents[2]
# Whole on every tensor-parallel rank: layernorms, positions, and biases that follow a sum over these ranks.
REPLICATED = re.compile(r"layernorm|position_embeddings|linear_proj\.bias|linear_fc2\.bias")
Found = dict[str, list[dict[str, Any]]]


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def meta() -> dict[str, Any]:
    """Numbers of ranks and models on the meta device."""
    done = program("tests.integration.virtual_cases")
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def virtual(meta: dict[str, Any]) -> Found:
    ranks: Found = meta["ranks"]
    return ranks


@pytest.fixture(scope="module")
def real() -> Found:
    ranks = run_workers(cases.RANKS, cases.real)
    return {name: [rank[name] for rank in ranks] for name in cases.CASES}


@pytest.mark.parametrize("name", cases.CASES)
def test_what_is_held_and_sent_is_what_real_ranks_hold_and_send(name: str, virtual: Found, real: Found) -> None:
    for rank, (ours, theirs) in enumerate(zip(virtual[name], real[name], strict=True)):
        for key in ("parameters", "gradients", "optimizer", "error_feedback", "sent"):
            assert ours[key] == theirs[key], (rank, key)


@pytest.mark.parametrize("name", ["powersgd", "halves", "int8_factors", "tensor", "shards"])
def test_buffers_hold_the_factors_and_the_second_error_feedback(name: str, virtual: Found, real: Found) -> None:
    for ours, theirs in zip(virtual[name], real[name], strict=True):
        assert theirs["error_feedback"] > 0
        # A workspace has five factors' room at most twice over, beside what goes dense.
        low = theirs["error_feedback"] + theirs["factors"]
        high = theirs["error_feedback"] + 24 * theirs["factors"] + ours["gradients"]
        if name == "int8_factors":
            # On a GPU, which the meta device stands for, factors are quantised a chunk of fixed size at a time: five
            # numbers of four bytes for each of its entries, however small the model.
            assert ours["buffers"] > _CHUNK_ON_GPU
            high += 20 * _CHUNK_ON_GPU
        assert low < ours["buffers"] < high


@pytest.mark.parametrize("name", ["none", "tensor", "masters"])
def test_activations_are_what_autograd_saves(name: str, virtual: Found, real: Found) -> None:
    run = cases.run_of(name)
    boundary = 4 * run.train.micro_batch * run.model.sequence_length * run.model.hidden
    for ours, theirs in zip(virtual[name], real[name], strict=True):
        # Also alive at the end of forward, though not saved: what comes in and goes out of a stage, a tenth here.
        assert theirs["saved"] <= ours["activations"] <= theirs["saved"] + 4 * boundary


@pytest.mark.parametrize("name", ["none", "tensor"])
def test_the_formula_is_within_a_tenth(name: str, virtual: Found) -> None:
    for ours in virtual[name]:
        assert ours["formula"] == pytest.approx(ours["activations"], rel=0.1)


@pytest.mark.parametrize("study", cases.STUDIES)
def test_the_papers_models_have_the_parameters_of_the_placement(study: str, meta: dict[str, Any]) -> None:
    shape = shape_of(study_run(study))
    stages, places = build(shape), meta["models"][study]
    assert len(places) == shape.pipeline * shape.tensor
    total = 0
    for place, parameters in places.items():
        pipeline, tensor = map(int, place.split())
        assert parameters == [[t.name, list(t.shape)] for t in stages[pipeline].tensors]
        total += sum(prod(s) for name, s in parameters if tensor == 0 or not REPLICATED.search(name))
    assert total == shape.allocated_parameters


def test_hygons_preset_needs_two_to_six_percent_more(meta: dict[str, Any]) -> None:
    """The table of docs/audit.md: MB, per cent of all, per cent of weights, gradients and moments."""
    for study, *more in (
        ("gpt2_345m", (205, 2.1, 34), (343, 3.5, 57)),
        ("gpt2_2p5b_v100", (724, 3.5, 31), (1263, 6.0, 55)),
    ):
        (none, model), *others = meta["hygon"][study]
        for (total, _), (megabytes, of_all, of_model) in zip(others, more, strict=True):
            assert (total - none) / 1e6 == pytest.approx(megabytes, abs=0.5)
            assert 100 * (total - none) / none == pytest.approx(of_all, abs=0.05)
            assert 100 * (total - none) / model == pytest.approx(of_model, abs=0.5)


def test_only_the_compressed_stage_keeps_anything(virtual: Found) -> None:
    first, last = virtual["first_stage"][0], virtual["first_stage"][-1]
    assert first["error_feedback"] > 0 == last["error_feedback"]
    assert first["sent"] < virtual["none"][0]["sent"]
    assert last["sent"] == virtual["none"][-1]["sent"]


def test_the_program_prints_and_writes_the_same(tmp_path: Path) -> None:
    out = tmp_path / "ranks.csv"
    options = ("--study", "gpt2_2p5b_v100", "--method", "powersgd_r32", "--every-rank", "--out", str(out))
    done = program("experiments.simulation.dry_run", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    assert [int(row["global_rank"]) for row in rows] == list(range(32))
    assert {row["pipeline"] for row in rows} == {"0", "1", "2", "3"}
    assert "2,400,074,880 parameters; 2,498,223,360" in done.stdout
    for row in rows:
        assert int(row["bytes_parameters"]) == 4 * int(row["parameters"]) == int(row["bytes_gradients"])
        assert row["fits"] == str(int(row["bytes_total"]) <= int(row["bytes_gpu"])).lower()
    assert ("DOES NOT FIT" in done.stdout) == any(row["fits"] == "false" for row in rows)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--study", "methods"), "no cluster section"),
        (("--study", "gpt2_345m", "--method", "magic"), "has no method 'magic'"),
        (("--study", "gpt2_345m", "--method", "topk"), "depends on values"),
        (("--study", "gpt2_345m", "--method", "optimus_cc"), "a fused embedding is sent after"),
    ],
)
def test_mistakes_are_one_line(options: tuple[str, ...], named: str) -> None:
    app = Typer()
    app.command()(dry_run.main)
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 2
    assert named in done.stderr
    assert done.stderr.count("\n") == 1
