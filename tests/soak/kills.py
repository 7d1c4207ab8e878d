"""Kills at random moments, of a training run and of Snakemake, after which all is as if they had never been."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd

from tests.integration.launching import Launcher, children_of, outcome, prepare_data, ranks_of, repeatable, run_of
from tests.slurm.study import RUNS, STUDY, Copy, make_copy

PATIENCE_SECONDS = 900.0  # for what goes on to its end


class Differs(AssertionError):
    """What a run has left after kills is not what an undisturbed one leaves."""


class Killed(ABC):
    """A program that is killed again and again.

    Attributes:
        expected: what an undisturbed run leaves, by name.
        seconds: that one takes.
    """

    def __init__(self) -> None:
        started = time.monotonic()
        process = self.start()
        assert process.wait(PATIENCE_SECONDS) == 0, self.said()
        self.seconds, self.expected = time.monotonic() - started, self.left()
        self.forget()

    @abstractmethod
    def start(self) -> subprocess.Popen[Any]:
        """Start it, in a session of its own."""

    @abstractmethod
    def left(self) -> dict[str, Any]:
        """What has to be the same, by name."""

    @abstractmethod
    def forget(self) -> None:
        """Delete what it has made."""

    @abstractmethod
    def said(self) -> str:
        """The end of what it has said."""

    @abstractmethod
    def parts(self, leader: int) -> dict[str, list[int]]:
        """Processes that may be killed alone, by what they are."""

    def kill(self, process: subprocess.Popen[Any], draw: random.Random) -> str:
        """Kill it, as a whole or in part; returns what was killed."""
        parts = {name: pids for name, pids in self.parts(process.pid).items() if pids}
        what = draw.choice(["all", "interrupted", "leader", *parts])
        with contextlib.suppress(ProcessLookupError):
            if what in ("all", "interrupted"):
                os.killpg(process.pid, signal.SIGKILL if what == "all" else signal.SIGINT)
            else:
                os.kill(draw.choice(parts.get(what, [process.pid])), signal.SIGKILL)
        process.wait(PATIENCE_SECONDS)
        return what

    def soak(self, kills: int, draw: random.Random, ends: float) -> Counter[str]:
        """Kill it so many times, or until ``ends``; after the last kill let it come to its end.

        Returns:
            Kills by what was killed, and ``compared``, how often it has come to its end and was compared.

        Raises:
            Differs: with what, and how often it had been killed by then.
        """
        counts: Counter[str] = Counter()
        while counts.total() - counts["compared"] < kills and time.time() < ends:
            process = self.start()
            try:
                process.wait(draw.uniform(0.1, 1.0) * self.seconds)
            except subprocess.TimeoutExpired:
                counts[self.kill(process, draw)] += 1
                continue
            self.compare(process, counts)
        process = self.start()
        process.wait(PATIENCE_SECONDS)
        self.compare(process, counts)
        return counts

    def compare(self, process: subprocess.Popen[Any], counts: Counter[str]) -> None:
        if process.returncode != 0:
            raise Differs(f"after {dict(counts)} exit code {process.returncode}: {self.said()}")
        left = self.left()
        if wrong := [name for name in self.expected.keys() | left.keys() if left.get(name) != self.expected.get(name)]:
            raise Differs(f"after {dict(counts)} {', '.join(sorted(wrong))} differ")
        counts["compared"] += 1
        self.forget()


class Training(Killed):
    """A training run of two ranks by the launcher, EDGC with everything that has a state."""

    def __init__(self, folder: Path) -> None:
        prepare_data(folder / "results")
        self.launcher, self.log = Launcher(folder / "results", folder), folder / "training.log"
        super().__init__()

    def start(self) -> subprocess.Popen[Any]:
        with self.log.open("a") as log:
            return self.launcher.start(run_of("killed"), new_session=True, output=log)

    def left(self) -> dict[str, Any]:
        found = outcome(self.launcher.path(run_of("killed")))
        return {name: each.to_csv() if isinstance(each, pd.DataFrame) else each for name, each in found.items()}

    def forget(self) -> None:
        shutil.rmtree(self.launcher.path(run_of("killed")))

    def said(self) -> str:
        return last_words(self.log)

    def parts(self, leader: int) -> dict[str, list[int]]:
        return {"a rank": ranks_of(leader)}


class Workflow(Killed):
    """Snakemake, with the workflow around it, on a study of three short runs."""

    def __init__(self, folder: Path) -> None:
        self.copy: Copy = make_copy(folder / "repository")
        super().__init__()

    def start(self) -> subprocess.Popen[Any]:
        table = self.copy.results / STUDY / "table.csv"
        return self.copy.start("--cores", "2", str(table.relative_to(self.copy.path)), program="workflows.program")

    def left(self) -> dict[str, Any]:
        runs = {name: repeatable(self.copy.results / STUDY / name) for name in (*RUNS, "none-s1")}
        return {"table.csv": self.copy.table(), **runs}

    def forget(self) -> None:
        shutil.rmtree(self.copy.results)
        self.copy.results.mkdir()

    def said(self) -> str:
        return last_words(self.copy.path / "output.log")

    def parts(self, leader: int) -> dict[str, list[int]]:
        launchers = [pid for run in (*RUNS, "none-s1") for pid in self.copy.ranks(run)]
        return {"Snakemake": children_of(leader), "a launcher or rank": launchers}


def last_words(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])
