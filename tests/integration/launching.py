"""Starts the launcher on tiny runs of real text, for tests that kill it and compare what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.data.prepare import prepare
from experiments.spec.settings import DataConfig
from experiments.training.outputs import read_events

ENDS_WITHIN_SECONDS = 60.0  # after Ctrl-C, with everything that was started; 5 on a machine that does nothing else
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
    """Starts ``experiments.training.launch --config`` on a run in ``results``, with ``folder`` on its path."""

    def __init__(self, results: Path, folder: Path) -> None:
        self.results, self.folder = results, folder
        self.output = ""  # what the last run wrote to stdout

    def start(self, values: dict[str, Any], *options: str, new_session: bool = False) -> subprocess.Popen[str]:
        """Start it; ``new_session`` puts it and all that it starts into a process group of their own."""
        config = self.folder / f"{values['variant']}.yaml"
        config.write_text(yaml.safe_dump(values))
        command = [
            sys.executable,
            "-m",
            "experiments.training.launch",
            "--config",
            str(config),
            "--results",
            str(self.results),
            *options,
        ]
        path = os.pathsep.join((str(ROOT), str(self.folder)))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=new_session,
        )

    def run(self, values: dict[str, Any], *options: str) -> tuple[int, str]:
        process = self.start(values, *options)
        self.output, stderr = process.communicate(timeout=600)
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


def group_of(leader: int) -> list[int]:
    """Process ids of a process group."""
    done = subprocess.run(["ps", "-eo", "pid=,pgid="], capture_output=True, text=True, check=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    return [int(pid) for pid, group in rows if int(group) == leader]


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie, which waits only for init to take note of its end."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
