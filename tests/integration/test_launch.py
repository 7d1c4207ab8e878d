"""The launcher as a user meets it: statuses, kills, restarts and bad input, on tiny runs of real text."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from edgc.telemetry import read_events
from experiments.data import prepare
from experiments.settings import DataConfig

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

RUN: dict[str, Any] = {
    "scale": "test",
    "study": "launch",
    "variant": "tiny",
    "label": "tiny",
    "seed": 1,
    "data": {"source": "stdlib", "vocab_size": 512, "path": "stdlib", "max_documents": 40},
    "model": {"layers": 2, "hidden": 32, "heads": 2, "sequence_length": 32},
    "parallel": {"pipeline": 2, "data": 1},
    "train": {
        "iterations": 12,
        "micro_batch": 2,
        "global_batch": 4,
        "lr": 1e-3,
        "lr_warmup_fraction": 0.1,
        "eval_interval": 6,
        "eval_batches": 2,
    },
    "compression": {"method": "none"},
}


def changed(**sections: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(RUN))
    for key, value in sections.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    return values


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results root with prepared data."""
    results = tmp_path_factory.mktemp("results")
    prepare(DataConfig(**RUN["data"]), results / "test" / "data" / "stdlib", show=False)
    return results


class Launcher:
    """Starts ``python -m experiments.launch --config`` on a run in ``results``."""

    def __init__(self, results: Path, folder: Path) -> None:
        self.results, self.folder = results, folder

    def start(self, values: dict[str, Any]) -> subprocess.Popen[str]:
        config = self.folder / f"{values['variant']}.yaml"
        config.write_text(yaml.safe_dump(values))
        command = [
            sys.executable,
            "-m",
            "experiments.launch",
            "--config",
            str(config),
            "--results",
            str(self.results),
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, values: dict[str, Any]) -> tuple[int, str]:
        process = self.start(values)
        _, stderr = process.communicate(timeout=600)
        return process.returncode, stderr

    def path(self, values: dict[str, Any]) -> Path:
        return self.results / "test" / "launch" / f"{values['variant']}-s{values['seed']}"


@pytest.fixture
def launcher(prepared: Path, tmp_path: Path) -> Launcher:
    return Launcher(prepared, tmp_path)


def repeatable(folder: Path) -> list[Any]:
    """Everything of a run that must not depend on when it ran."""
    steps = read_events(folder / "metrics.jsonl", "step")
    evaluations = read_events(folder / "metrics.jsonl", "eval")
    return [(e["iteration"], e["loss"], e["grad_norm"], e["bytes"]) for e in steps] + evaluations


def wait_for_steps(folder: Path, steps: int) -> None:
    deadline = time.monotonic() + 600
    metrics = folder / ".attempt" / "metrics.jsonl"
    while time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count('"step"') >= steps:
            return
        time.sleep(0.02)
    raise AssertionError("the run never got going")


def children_of(pid: int) -> list[int]:
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(found) for found in done.stdout.split()]


def ranks_of(launcher: int) -> list[int]:
    """The launcher's grandchildren: ranks are forked from a server that it starts."""
    return [rank for child in children_of(launcher) for rank in children_of(child)]


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie, which waits only for init to take note of its end."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


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
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["iterations"] == 12 and summary["validation_perplexity"] > 1
    record = yaml.safe_load((folder / "run.yaml").read_text())
    assert len(record["provenance"]["data_fingerprint"]) >= 12
    assert not (folder / ".attempt").exists()
    assert any((folder / "tensorboard").iterdir())
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


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"compression": {"methd": "none"}}, "unknown key compression.methd"),
        ({"train": {"itertions": 5}}, "unknown key train.itertions"),
        ({"compression": {"entropy": {"iteration_rate": 0}}}, "iteration_rate (alpha) = 0"),
        ({"compression": {"method": "edgc", "r_min": 16, "r_max": 8}}, "r_min = 16"),
        (
            {"parallel": {"tensor": 2, "pipeline": 2, "world": 6, "data": None}},
            "world = 6 is not divisible by",
        ),
        ({"model": {"layers": 3}}, "model.layers = 3 is not divisible by"),
        ({"train": {"global_batch": 3}}, "global_batch = 3"),
        ({"data": {"path": "nowhere"}}, "training data is missing"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_bad_input_is_one_line_and_touches_nothing(
    launcher: Launcher, change: dict[str, Any], expected: str
) -> None:
    values = changed(variant="bad", **change)
    if values["parallel"].get("data") is None:
        del values["parallel"]["data"]
    code, stderr = launcher.run(values)
    lines = [line for line in stderr.splitlines() if line.strip()]
    assert code == 2, stderr
    assert len(lines) == 1 and lines[0].startswith("error: "), stderr
    assert expected in lines[0]
    assert ".yaml" in lines[0] and ";" in lines[0], "the line must name the file and the fix"
    assert not launcher.path(values).exists()


def test_results_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "results"
    blocked.write_text("a file where a folder should be")
    code, stderr = Launcher(blocked, tmp_path).run(RUN)
    assert code == 2
    assert stderr.startswith("error: results folder is not writable") and stderr.count("\n") == 1
    assert blocked.read_text() == "a file where a folder should be"
