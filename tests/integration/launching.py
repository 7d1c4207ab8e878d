"""Starts the launcher on tiny runs of real text, for tests that kill it and compare what it leaves."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import yaml

from experiments.data.folder import prepare
from experiments.spec.settings import DataConfig
from experiments.training import launch
from experiments.training.outputs import read_events

ALL = """
import sys
from pathlib import Path
from experiments.training.launch import launch, read_run
for path in sys.argv[2:]:
    print(launch(read_run(Path(path)), Path(sys.argv[1])))
"""
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
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return values


INTERVAL, ITERATIONS = 4, 40
TIMES = ("seconds", "tokens_per_second")


def run_of(variant: str, **train: Any) -> dict[str, Any]:
    """EDGC on two replicas, with everything that has a state: dropout, error feedback, windows, probes."""
    common = {"iterations": ITERATIONS, "global_batch": 4, "eval_interval": 20}
    values = changed(
        variant=variant,
        label="killed",
        parallel={"pipeline": 1, "data": 2},
        model={"dropout": 0.1},
        train={**common, "checkpoint": True, "checkpoint_interval": INTERVAL, **train},
    )
    values["probe"] = {"every": 10, "estimators": ["gaussian"], "correlation": True, "spectra": True}
    values["compression"] = {
        "method": "edgc",
        "policy": "cqm",
        "r_max": 8,
        "r_min": 4,
        "window": 3,
        "stability_tolerance": 10.0,
        "min_compression_elements": 512,
        "entropy": {"iteration_rate": 0.5, "entry_rate": 0.5},
    }
    return values


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if not k.startswith(TIMES)}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run leaves, times and names aside."""
    summary = without_times(json.loads((folder / "summary.json").read_text()))
    events = without_times(read_events(folder / "metrics.jsonl"))
    weights = {path.name: path.read_bytes() for path in sorted((folder / "checkpoint").glob("*.distcp"))}
    for values in (summary, events[0]):
        assert values.pop("run").endswith("-s1")
    assert weights and summary.pop("variant")
    return {
        "status": (folder / "status").read_text(),
        "summary": summary,
        "events": events,
        "weights": weights,
        "tensors": pd.read_parquet(folder / "tensors.parquet"),
        "spectra": pd.read_parquet(folder / "spectra.parquet"),
    }


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results root with prepared data."""
    return prepare_data(tmp_path_factory.mktemp("results"))


def prepare_data(results: Path) -> Path:
    """Make a results root with prepared data."""
    prepare(DataConfig(**RUN["data"]), results / "test" / "data" / "stdlib", show=False)
    return results


class Launcher:
    """Starts ``experiments.training.launch --config`` on a run in ``results``, with ``folder`` on its path."""

    def __init__(self, results: Path, folder: Path) -> None:
        self.results, self.folder = results, folder
        self.output = ""  # what the last run wrote to stdout

    def config(self, values: dict[str, Any]) -> Path:
        """The file of a run."""
        path = self.folder / f"{values['variant']}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    def start(
        self, values: dict[str, Any], *options: str, new_session: bool = False, output: Any = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        """Start it; ``new_session`` puts it and all that it starts into a process group of their own."""
        command = ["-m", "experiments.training.launch", "--config", str(self.config(values))]
        command += ["--results", str(self.results), *options]
        return self._start(command, new_session=new_session, output=output)

    def _start(
        self, arguments: list[str], *, new_session: bool = False, output: Any = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        path = os.pathsep.join((str(ROOT), str(self.folder)))
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=new_session,
        )

    def run(self, values: dict[str, Any], *options: str) -> tuple[int, str]:
        """Exit code and standard error."""
        process = self.start(values, *options)
        self.output, stderr = process.communicate(timeout=600)
        return process.returncode, stderr

    def finish(self, values: dict[str, Any], status: str = "ok") -> Path:
        """The folder of a run that ends with ``status``."""
        code, stderr = self.run(values)
        assert code == 0, stderr
        assert (self.path(values) / "status").read_text() == f"{status}\n", stderr
        return self.path(values)

    def finish_all(self, *runs: dict[str, Any], status: str = "ok") -> list[Path]:
        """The folders of runs that end with ``status``, one after another in one process, which imports once."""
        process = self._start(["-c", ALL, str(self.results), *(str(self.config(values)) for values in runs)])
        stdout, stderr = process.communicate(timeout=600)
        assert process.returncode == 0 and stdout.split() == [status] * len(runs), stderr
        return [self.path(values) for values in runs]

    def refusal(self, values: dict[str, Any]) -> str:
        """The one line in which a run is refused before any process is started, in this one."""
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr), pytest.raises(SystemExit) as stop:
            launch.main(config=self.config(values), results=self.results)
        [line] = stderr.getvalue().splitlines()
        assert stop.value.code == 2 and line.startswith("error: ")
        return line

    def path(self, values: dict[str, Any]) -> Path:
        return self.results / "test" / "launch" / f"{values['variant']}-s{values['seed']}"


@pytest.fixture
def launcher(prepared: Path, tmp_path: Path) -> Launcher:
    return Launcher(prepared, tmp_path)


def repeatable(folder: Path) -> list[Any]:
    """Everything of a run that must not depend on when it ran."""
    steps = read_events(folder / "metrics.jsonl", "step")
    evaluations = read_events(folder / "metrics.jsonl", "eval")
    evaluations += read_events(folder / "metrics.jsonl", "final")
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
    """Process ids of a process's children; none of one that has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def ranks_of(launcher: int) -> list[int]:
    """The launcher's grandchildren: ranks are forked from a server that it starts."""
    return [rank for child in children_of(launcher) for rank in children_of(child)]


def group_of(leader: int) -> list[int]:
    """Process ids of a process group."""
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            members += [pid] if os.getpgid(pid) == leader else []
    return members


def runs(pid: int) -> bool:
    """True of a process that exists and is no zombie, which waits only for init to take note of its end."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
