"""The launcher as a user meets it: statuses, kills, restarts and bad input, on tiny runs of real text."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import yaml

from experiments.analyse.runs import load_run
from experiments.common.source import training_code
from experiments.training import outputs
from experiments.training.outputs import read_events
from tests.integration.launching import (
    RUN,
    Launcher,
    changed,
    launcher,
    prepared,
    ranks_of,
    repeatable,
    runs,
    wait_for_steps,
)

__all__ = ["launcher", "prepared"]  # fixtures

pytestmark = pytest.mark.slow


@pytest.mark.costly
def test_a_run_outlives_an_orphan_and_a_kill_publishes_a_complete_folder_and_repeats(launcher: Launcher) -> None:
    values = changed(variant="tiny", train={"iterations": 30}, compression={"pipeline": {"rank": 2}})
    folder = launcher.path(values)

    # A new launch takes over from one that goes on.
    orphan = launcher.start(changed(variant="tiny", train={"iterations": 3000, "eval_interval": 3000}))
    wait_for_steps(folder, 3)
    ranks = ranks_of(orphan.pid)
    assert len(ranks) == 2
    process = launcher.start(values)
    orphan.communicate(timeout=600)
    assert orphan.returncode == -signal.SIGKILL, "the older launch must have been stopped"
    deadline = time.monotonic() + 120
    while any(map(runs, ranks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in ranks if runs(pid)], "its ranks must die with it"

    # One of its own ranks is killed: nothing is published.
    deadline = time.monotonic() + 600
    while len(ranks_of(process.pid)) < 2 and process.poll() is None:
        assert time.monotonic() < deadline, "it must start its ranks"
        time.sleep(0.1)
    wait_for_steps(folder, 3)
    os.kill(ranks_of(process.pid)[-1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 1 and "interrupted" in stderr, stderr
    assert not (folder / "status").exists()

    launcher.finish(values)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["seconds_exposed_per_step"] > 0 and summary["skipped_steps"] == 0
    assert summary["iterations"] == 30 and summary["validation_perplexity"] > 1
    record = yaml.safe_load((folder / "run.yaml").read_text())["provenance"]
    assert len(record["data_fingerprint"]) >= 12 and record["code"] == training_code()
    assert not (folder / ".attempt").exists()
    outputs.check(folder)
    assert load_run(folder).ok
    tokens, hidden, micro_batches = 2 * 32, 32, 2
    for step in read_events(folder / "metrics.jsonl", "step"):
        first, last = step["stages"]
        assert not step["skipped"] and first["seconds_exposed"] > 0 and last["seconds_exposed"] > 0
        assert last["pipeline_bytes"] == micro_batches * 4 * 2 * (tokens + hidden)
        assert last["pipeline_bytes_dense"] == micro_batches * 4 * tokens * hidden
        assert first["pipeline_bytes"] == 0 and first["pipeline_relative_error"] is None
        assert 0 < last["pipeline_relative_error"] < 1
    before = repeatable(folder)
    assert repeatable(launcher.finish(values)) == before


@pytest.mark.costly
def test_a_diverging_run_and_one_that_only_skips_steps_end_with_their_status(launcher: Launcher) -> None:
    hot = changed(variant="hot", train={"lr": 100.0, "iterations": 60, "eval_interval": 60})
    # The first update leaves weights at which the loss overflows.
    overflow = changed(variant="overflow", train={**hot["train"], "lr": 1e30})
    first, folder = launcher.finish_all(hot, overflow, status="diverged")
    assert json.loads((first / "summary.json").read_text())["status"] == "diverged"
    skipped = [step["skipped"] for step in read_events(folder / "metrics.jsonl", "step")]
    assert skipped[-20:] == [True] * 20 and (len(skipped) == 20 or not skipped[-21])
    assert json.loads((folder / "summary.json").read_text())["skipped_steps"] == sum(skipped)


def test_a_failure_is_named_while_the_run_goes_on(launcher: Launcher) -> None:
    """A learning rate that rises until the loss leaves its best, under compression."""
    values = changed(
        variant="signature",
        parallel={"pipeline": 1, "data": 2},
        compression={"method": "powersgd", "rank": 1, "window": 4},
        train={"lr": 1.5, "lr_warmup_fraction": 0.9, "iterations": 80, "eval_interval": 80},
    )
    code, stderr = launcher.run(values)
    assert code == 0, stderr
    events = read_events(launcher.path(values) / "metrics.jsonl")
    found = [event for event in events if event["event"] == "signature" and event["signature"] == "diverging"]
    assert found, [event["loss"] for event in events if event["event"] == "step"]
    first = found[0]
    assert first["numbers"]["loss"] > first["numbers"]["best_loss"]
    assert first["iteration"] % 8 == 0 and first["iteration"] < events[-1]["iterations"], "while the run goes on"
    assert f"iteration {first['iteration']}: {first['text']}; {first['fix']}" in stderr
    at = events.index(first)
    assert [event["iteration"] for event in events[:at] if event["event"] == "step"][-1] == first["iteration"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"compression": {"methd": "none"}}, "unknown key compression.methd"),
        ({"compression": {"method": "edgc", "r_min": 16, "r_max": 8}}, "r_min = 16"),
        ({"parallel": {"tensor": 2, "pipeline": 2, "world": 6}}, "world = 6 is not tensor * pipeline * data"),
        ({"model": {"layers": 3}}, "model.layers = 3 is not divisible by"),
        ({"data": {"path": "nowhere"}}, "training data is missing"),
    ],
)
def test_bad_input_is_one_line_and_touches_nothing(launcher: Launcher, change: dict[str, Any], expected: str) -> None:
    values = changed(variant="bad", **change)
    line = launcher.refusal(values)
    assert expected in line and ";" in line and ".yaml" in line, "the line must name the file and the fix"
    assert not launcher.path(values).exists()


def test_what_only_ranks_find_is_one_line_too(launcher: Launcher) -> None:
    values = changed(variant="bad", compression={"method": "edgc", "window": 10, "r_max": 4096})
    code, stderr = launcher.run(values)
    [line] = [line for line in stderr.splitlines() if line.strip()]
    assert code == 2 and line.startswith("error: r_max = 4096 is not below the largest rank") and ";" in line, stderr
    assert not launcher.path(values).exists()


@pytest.mark.parametrize(("name", "size"), [("train.bin", -2), ("data.yaml", -1), ("index", -8)])
def test_damaged_data_is_one_line_and_publishes_nothing(prepared: Path, tmp_path: Path, name: str, size: int) -> None:
    shutil.copytree(prepared, tmp_path / "results", ignore=shutil.ignore_patterns("launch"))
    launcher = Launcher(tmp_path / "results", tmp_path)
    data = tmp_path / "results" / "test" / "data" / "stdlib"
    path = data / "index_cache" / "of_a_run" / "sample_index.npy" if name == "index" else data / name
    if name == "index":
        path.parent.mkdir(parents=True)
        numpy.save(path, numpy.arange(50))
    path.write_bytes(path.read_bytes()[:size])
    line = launcher.refusal(RUN)
    assert line.startswith(f"error: prepared data is damaged: {path.name} ")
    assert f"(in {path})" in line and f"delete the folder {path.parent}" in line
    assert not launcher.path(RUN).parent.exists()


def test_results_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "results"
    blocked.write_text("a file where a folder should be")
    assert "results folder is not writable" in Launcher(blocked, tmp_path).refusal(RUN)
