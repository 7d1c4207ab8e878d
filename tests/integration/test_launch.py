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

from edgc.errors import UserError
from experiments.analyse.runs import load_run
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


def test_compressed_pipeline_traffic_is_in_the_events(launcher: Launcher) -> None:
    values = changed(variant="pipeline", compression={"pipeline": {"rank": 2}})
    code, stderr = launcher.run(values)
    assert code == 0, stderr
    tokens, hidden, micro_batches = 2 * 32, 32, 2
    for step in read_events(launcher.path(values) / "metrics.jsonl", "step"):
        first, last = step["stages"]
        assert step["pipeline_bytes"] == last["pipeline_bytes"] == micro_batches * 4 * 2 * (tokens + hidden)
        assert last["pipeline_bytes_dense"] == micro_batches * 4 * tokens * hidden
        assert first["pipeline_bytes"] == 0 and first["pipeline_relative_error"] is None
        assert 0 < last["pipeline_relative_error"] < 1
        assert first["seconds_pipeline"] > 0 and last["seconds_pipeline"] > 0


def test_a_run_publishes_a_complete_folder_and_repeats_bit_for_bit(launcher: Launcher) -> None:
    code, stderr = launcher.run(RUN)
    folder = launcher.path(RUN)
    assert code == 0, stderr
    assert (folder / "status").read_text() == "ok\n"
    for step in read_events(folder / "metrics.jsonl", "step"):
        assert not step["skipped"]
        assert all(stage["seconds_exposed"] > 0 for stage in step["stages"])
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["seconds_exposed_per_step"] > 0 and summary["skipped_steps"] == 0
    assert summary["iterations"] == 12 and summary["validation_perplexity"] > 1
    record = yaml.safe_load((folder / "run.yaml").read_text())
    assert len(record["provenance"]["data_fingerprint"]) >= 12
    assert not (folder / ".attempt").exists()
    assert any((folder / "tensorboard").iterdir())
    assert load_run(folder).ok and outputs.check(folder)
    (folder / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes() + b"\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl has \d+ bytes instead of"):
        load_run(folder)
    first = repeatable(folder)
    assert launcher.run(RUN)[0] == 0
    assert repeatable(folder) == first


def test_a_killed_rank_publishes_nothing_and_the_next_run_is_undisturbed(launcher: Launcher) -> None:
    quiet = changed(variant="quiet", train={"iterations": 60})
    killed = changed(variant="killed", train={"iterations": 60})
    assert launcher.run(quiet)[0] == 0
    process = launcher.start(killed)
    wait_for_steps(launcher.path(killed), 3)
    os.kill(ranks_of(process.pid)[-1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 1, stderr
    assert "interrupted" in stderr
    assert not (launcher.path(killed) / "status").exists()
    assert launcher.run(killed)[0] == 0
    assert repeatable(launcher.path(killed)) == repeatable(launcher.path(quiet))


def test_a_new_launch_takes_over_from_an_orphan(launcher: Launcher) -> None:
    values = changed(variant="orphan", train={"iterations": 3000, "eval_interval": 3000})
    orphan = launcher.start(values)
    wait_for_steps(launcher.path(values), 3)
    ranks = ranks_of(orphan.pid)
    assert len(ranks) == 2
    short = changed(variant="orphan", train={"iterations": 12})
    code, stderr = launcher.run(short)
    assert code == 0, stderr
    orphan.communicate(timeout=600)
    assert orphan.returncode == -signal.SIGKILL, "the older launch must have been stopped"
    deadline = time.monotonic() + 120
    while any(map(runs, ranks)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in ranks if runs(pid)], "its ranks must die with it"
    assert json.loads((launcher.path(values) / "summary.json").read_text())["iterations"] == 12


def test_a_diverging_run_ends_with_its_status(launcher: Launcher) -> None:
    values = changed(variant="hot", train={"lr": 100.0, "iterations": 60, "eval_interval": 60})
    code, stderr = launcher.run(values)
    assert code == 0, stderr
    assert (launcher.path(values) / "status").read_text() == "diverged\n"
    summary = json.loads((launcher.path(values) / "summary.json").read_text())
    assert summary["status"] == "diverged" and summary["iterations"] <= 60


def test_twenty_skipped_steps_in_a_row_end_a_run(launcher: Launcher) -> None:
    # The first update leaves weights at which the loss overflows.
    values = changed(variant="overflow", train={"lr": 1e30, "iterations": 60, "eval_interval": 60})
    code, stderr = launcher.run(values)
    assert code == 0, stderr
    assert (launcher.path(values) / "status").read_text() == "diverged\n"
    steps = list(read_events(launcher.path(values) / "metrics.jsonl", "step"))
    assert [step["skipped"] for step in steps[-20:]] == [True] * 20
    assert len(steps) == 20 or not steps[-21]["skipped"]
    summary = json.loads((launcher.path(values) / "summary.json").read_text())
    assert summary["skipped_steps"] == sum(step["skipped"] for step in steps)


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
    # Once a window, between the step that closes it and the next one.
    assert len({event["iteration"] for event in found}) == len(found)
    at = events.index(first)
    steps = [event["iteration"] for event in events[:at] if event["event"] == "step"]
    assert steps[-1] == first["iteration"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"compression": {"methd": "none"}}, "unknown key compression.methd"),
        ({"train": {"itertions": 5}}, "unknown key train.itertions"),
        ({"compression": {"entropy": {"iteration_rate": 0}}}, "iteration_rate (alpha) = 0"),
        ({"compression": {"method": "edgc", "r_min": 16, "r_max": 8}}, "r_min = 16"),
        ({"parallel": {"tensor": 2, "pipeline": 2, "world": 6}}, "world = 6 is not tensor * pipeline * data"),
        ({"model": {"layers": 3}}, "model.layers = 3 is not divisible by"),
        ({"train": {"global_batch": 3}}, "global_batch = 3"),
        ({"data": {"path": "nowhere"}}, "training data is missing"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_bad_input_is_one_line_and_touches_nothing(launcher: Launcher, change: dict[str, Any], expected: str) -> None:
    values = changed(variant="bad", **change)
    code, stderr = launcher.run(values)
    lines = [line for line in stderr.splitlines() if line.strip()]
    assert code == 2, stderr
    assert len(lines) == 1 and lines[0].startswith("error: "), stderr
    assert expected in lines[0]
    assert ".yaml" in lines[0] and ";" in lines[0], "the line must name the file and the fix"
    assert not launcher.path(values).exists()


def test_bad_input_that_only_ranks_find_is_one_line_too(launcher: Launcher) -> None:
    values = changed(variant="bad", compression={"method": "edgc", "window": 10, "r_max": 4096})
    code, stderr = launcher.run(values)
    lines = [line for line in stderr.splitlines() if line.strip()]
    assert code == 2 and len(lines) == 1, stderr
    assert lines[0].startswith("error: r_max = 4096 is not below the largest rank") and "; use an r_max" in lines[0]
    assert not launcher.path(values).exists()


@pytest.mark.parametrize(
    ("name", "keep"),
    [("train.bin", -2), ("validation.idx", -8), ("tokenizer.json", 100), ("data.yaml", -1), ("index", -8)],
)
def test_damaged_data_is_one_line_and_publishes_nothing(prepared: Path, tmp_path: Path, name: str, keep: int) -> None:
    shutil.copytree(prepared, tmp_path / "results", ignore=shutil.ignore_patterns("launch"))
    own = Launcher(tmp_path / "results", tmp_path)
    data = tmp_path / "results" / "test" / "data" / "stdlib"
    if name == "index":
        path = data / "index_cache" / "of_a_run" / "sample_index.npy"
        path.parent.mkdir(parents=True)
        numpy.save(path, numpy.arange(50))
    else:
        path = data / name
    path.write_bytes(path.read_bytes()[:keep])
    code, stderr = own.run(RUN)
    lines = stderr.splitlines()
    assert code == 2 and len(lines) == 1, stderr
    assert lines[0].startswith(f"error: prepared data is damaged: {path.name} ")
    assert f"(in {path})" in lines[0] and f"delete the folder {path.parent}" in lines[0]
    assert not own.path(RUN).exists() and not own.path(RUN).parent.exists()


def test_results_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "results"
    blocked.write_text("a file where a folder should be")
    code, stderr = Launcher(blocked, tmp_path).run(RUN)
    assert code == 2
    assert stderr.startswith("error: results folder is not writable") and stderr.count("\n") == 1
    assert blocked.read_text() == "a file where a folder should be"
