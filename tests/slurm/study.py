"""A copy of the repository with one small study, whose runs take two nodes each, and Snakemake on it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.slurm.cluster import ACCOUNT, output
from tests.workflow.checkout_copy import Checkout, copy_repository

STUDY = "rank_sweep"
RANKS = (4, 8)
RUNS = tuple(f"r{rank}-s1" for rank in RANKS)
INTERVAL = 10  # iterations between checkpoints
# Two GPUs in all, on two nodes: every run with two ranks takes both.
SITE: dict[str, Any] = {
    "account": ACCOUNT,
    "gpus_per_node": 1,
    "network_interface": "lo",
    "training_minutes": 30,
    "minutes": 20,
    "retries": 2,
}
DEFAULTS: dict[str, Any] = {
    "data": {"max_documents": 40, "vocab_size": 512},
    "model": {"layers": 2, "hidden": 32, "heads": 2, "sequence_length": 32},
    "parallel": {"pipeline": 1, "data": 2},
    "train": {
        "iterations": 90,
        "micro_batch": 2,
        "global_batch": 4,
        "eval_interval": 30,
        "eval_batches": 2,
        "checkpoint_interval": INTERVAL,
    },
}


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 1200.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.5)
    return value


@dataclass(frozen=True)
class Copy:
    """A working copy; its results at scale ci."""

    path: Path

    @property
    def results(self) -> Path:
        return self.path / "results" / "ci"

    def site(self, **changes: Any) -> None:
        path = self.path / "workflows" / "profiles" / "slurm" / "site.yaml"
        path.write_text(yaml.safe_dump(SITE | changes))

    def run(self, *arguments: str, program: str = "snakemake") -> tuple[int, str]:
        """Exit code and all output of Snakemake (or of another program)."""
        done = Checkout(self.path).run(program, *arguments, OMP_NUM_THREADS="1")
        return done.returncode, done.stdout

    def start(self, *arguments: str, program: str = "snakemake") -> subprocess.Popen[bytes]:
        """Snakemake (or another program), whose output is in a file."""
        with (self.path / "output.log").open("ab") as log:
            return subprocess.Popen(
                Checkout(self.path).command(program, *arguments),
                cwd=self.path,
                env=Checkout(self.path).environment(OMP_NUM_THREADS="1"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self) -> str:
        path = self.path / "output.log"
        return path.read_text(errors="replace")[-6000:] if path.exists() else ""

    def table(self) -> bytes:
        """What has to be the same however the runs came about; the other tables hold times."""
        return (self.results / STUDY / "table.csv").read_bytes()

    def resumed_at(self, run: str) -> list[int]:
        record = yaml.safe_load((self.results / STUDY / run / "run.yaml").read_text())
        return list(record["provenance"].get("resumed_at", []))

    def forget(self, *runs: str) -> None:
        """Delete runs, and the table made of them."""
        for run in runs:
            shutil.rmtree(self.results / STUDY / run, ignore_errors=True)
        (self.results / STUDY / "table.csv").unlink(missing_ok=True)

    def checkpoints(self, run: str) -> list[Path]:
        """Oldest first; none once the run has ended, for its last act is to delete their folder."""
        folder = self.results / STUDY / run / ".checkpoints"
        try:
            return sorted(path for path in folder.iterdir() if path.name.startswith("iter_"))
        except FileNotFoundError:
            return []

    def training(self) -> str | None:
        """A run that Slurm is training, with a checkpoint to go on from."""
        return next((run for run in RUNS if self.checkpoints(run) and self.ranks(run)), None)

    def ranks(self, run: str) -> list[int]:
        """Processes of a run's ranks and launchers, here where all nodes are one machine."""
        found: list[tuple[int, list[int]]] = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if {"experiments.training.launch", run} <= {*words} and process.cwd() == str(self.path):
                    ranks: list[int] = []
                    found.append((process.pid, ranks))
                    for child in process.children():  # a launcher has others, too, and some that were killed
                        with contextlib.suppress(psutil.Error):
                            if "spawn_main" in " ".join(child.cmdline()):
                                ranks.append(child.pid)
        return [pid for pid, _ in found] + [pid for _, pids in found for pid in pids]


def send(number: signal.Signals, pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def job_of(run: str) -> str | None:
    """Number of the job that trains a run, while it is running."""
    for line in output("squeue", "--noheader", "--states=R", "--format=%i|%k").splitlines():
        number, _, comment = line.partition("|")
        if comment.endswith(f"_{run}"):
            return number
    return None


def make_copy(path: Path) -> Copy:
    copy_repository(path)
    scale = path / "experiments" / "scales" / "ci.yaml"
    values = yaml.safe_load(scale.read_text())
    values["defaults"] = {key: {**section, **DEFAULTS.get(key, {})} for key, section in values["defaults"].items()}
    scale.write_text(yaml.safe_dump(values))
    studies = path / "experiments" / "studies"
    for other in studies.glob("*.yaml"):
        if other.stem != STUDY:
            other.unlink()
    values = yaml.safe_load((studies / f"{STUDY}.yaml").read_text())
    powersgd = {"method": "powersgd", "min_compression_elements": 512}
    variants = {f"r{rank}": {"label": f"rank {rank}", "compression": {**powersgd, "rank": rank}} for rank in RANKS}
    # One rank, on one node.
    alone = {"label": "no compression", "parallel": {"data": 1}, "compression": {"method": "none"}}
    values["scales"] = {"ci": {"seeds": [1], "variants": {"none": alone, **variants}}}
    (studies / f"{STUDY}.yaml").write_text(yaml.safe_dump(values))
    copy = Copy(path)
    copy.site()
    return copy
