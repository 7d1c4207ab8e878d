"""What a workflow shows while it runs: how many steps are done, which are running, and the time left.

On a terminal that is a bar that moves, with Snakemake's own warnings and errors above it; elsewhere a line for each
step that ends, and one a minute.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from edgc.errors import UserError
from experiments.common.words import in_words
from experiments.spec import matrix
from workflows import durations, events
from workflows.durations import Estimate, Step
from workflows.names import Names

SILENCE_SECONDS = 60.0  # after which a line is written where there is no terminal


class Steps:
    """What is known of the workflow, from its events.

    Args:
        scale, folder: of the results; the durations of what has ended are written to ``folder``.
        cores: that steps share; 0 where they do not.
    """

    def __init__(self, scale: str, folder: Path, cores: int) -> None:
        self.names, self.folder, self.cores = Names(scale, folder), folder, cores
        self.kept = durations.kept(scale)
        self.began = time.monotonic()
        self.estimate: Estimate | None = None
        self.jobs: dict[int, Step] = {}
        self.lock = threading.Lock()

    def take(self, event: Mapping[str, Any]) -> list[str]:
        """Note an event; returns a line for each step that has ended."""
        now = time.monotonic()
        with self.lock:
            if event["event"] == events.PLAN:
                found = {
                    job["id"]: Step.of_job(job["rule"], job["wildcards"], job["threads"])
                    for job in event["jobs"]
                    if job["command"]  # a target such as `all` does nothing itself
                }
                self.jobs, self.estimate = found, Estimate(found, self.kept, self.cores)
                return [f"{len(found)} steps to do{self._left(now)}"]
            lines = []
            for number in event["jobs"]:
                if self.estimate is None or number not in self.jobs:
                    continue
                if event["event"] == events.STARTED:
                    self.estimate.start(number, now)
                    continue
                failed = event["event"] == events.FAILED
                self.estimate.end(number, now, failed=failed)
                lines.append(f"failed: {self.names.words(self.jobs[number])}" if failed else self._ended(number, now))
            return lines

    def _ended(self, number: int, now: float) -> str:
        assert self.estimate is not None
        took = self.estimate.took[number]
        return f"{self.count()} {self.names.words(self.jobs[number])}: {in_words(took)}{self._left(now)}"

    def _left(self, now: float) -> str:
        left = self.estimate.seconds_left(now) if self.estimate else None
        return "" if left is None or left == 0 else f"; about {in_words(left)} left"

    def to_train(self) -> int:
        """Runs that the workflow trains, whether they have ended or not; 0 before it has planned."""
        with self.lock:
            return sum(step.rule == "train" for step in self.jobs.values())

    def count(self) -> str:
        return f"[{self.estimate.done}/{len(self.jobs)}]" if self.estimate else ""

    def running(self) -> list[str]:
        """The steps that are running, in words."""
        if self.estimate is None:
            return []
        now, found = time.monotonic(), []
        for number, started in list(self.estimate.running.items()):
            inside = self.names.inside(self.jobs[number])
            parts = [self.names.words(self.jobs[number]), inside, in_words(now - started)]
            found.append(", ".join(filter(None, parts)))
        return found

    def status(self) -> str:
        """All in one line."""
        with self.lock:
            return f"{self.count()} {'; '.join(self.running()) or 'waiting'}{self._left(time.monotonic())}"

    def numbers(self) -> tuple[int, int, str]:
        """Steps done, all steps, and the time passed and left in words."""
        now = time.monotonic()
        with self.lock:
            done, total = (self.estimate.done, len(self.jobs)) if self.estimate else (0, 0)
            return done, total, f"{in_words(now - self.began)}{self._left(now)}"

    def _is_everything(self) -> bool:
        """Whether all was made from the beginning to the end, on this machine."""
        assert self.estimate is not None
        last = any(step.rule == "snakemake_report" for step in self.jobs.values())
        if not last or self.cores == 0 or len(self.estimate.took) < len(self.jobs):
            return False  # at once: after Ctrl-C nobody waits for the studies to be read
        studies = [study for study in matrix.studies() if self.names.scale not in matrix.load_study(study).only_by_name]
        wanted = {(study, run.name) for study in studies for run in matrix.runs(study, self.names.scale)}
        return wanted <= {(step.study, step.name) for step in self.jobs.values() if step.rule == "train"}

    def record(self) -> None:
        """Write what the steps took beside what earlier calls have written."""
        with self.lock:
            if self.estimate is None or not self.estimate.took:
                return
            new = {self.jobs[number]: took for number, took in self.estimate.took.items()}
            with contextlib.suppress(UserError):  # a table that is damaged, a study whose file was changed meanwhile
                if self._is_everything():
                    new[Step(durations.ALL, threads=self.cores)] = time.monotonic() - self.began
                durations.add(self.folder / durations.NAME, new)


class Display:
    """Shows :class:`Steps` while Snakemake runs.

    ``with`` it, the files that Snakemake writes to are open; :meth:`started` is called once it has them.

    Args:
        steps: that are shown.
        live: a bar that moves; else lines.
    """

    def __init__(self, steps: Steps, *, live: bool) -> None:
        self.steps, self.live = steps, live
        self.pipes: list[tuple[int, int, Callable[[str], object]]] = []
        self.readers: list[threading.Thread] = []
        self.said = time.monotonic()
        self.events = -1
        self.output: int | None = None
        self.errors: int | None = None
        self.console: Any = None
        self.bar: Any = None

    def __enter__(self) -> Display:
        self.events = self._pipe(self._take)
        self.errors = self._pipe(self._above)
        if self.live:
            self.output = self._pipe(self._above if sys.stdout.isatty() else _to_stdout)
        return self

    def _pipe(self, use: Callable[[str], object]) -> int:
        """The end to write to; each line that arrives will go to ``use``."""
        read, write = os.pipe()
        self.pipes.append((read, write, use))
        return write

    def started(self) -> None:
        """Lets go of what Snakemake writes to, so that it ends with Snakemake, and begins to show.

        Not before: threads and a fork do not go together.
        """
        if self.live:
            from rich.console import Console
            from rich.live import Live

            self.console = Console(stderr=True)
            self.bar = Live(console=self.console, get_renderable=self._drawn, refresh_per_second=2, transient=True)
        for read, write, use in self.pipes:
            os.close(write)
            reader = threading.Thread(target=_follow, args=(read, use), daemon=True)
            reader.start()
            self.readers.append(reader)
        self.pipes.clear()
        if self.bar is not None:
            self.bar.start()

    def __exit__(self, *error: object) -> None:
        for read, write, _ in self.pipes:
            os.close(read)
            os.close(write)
        for reader in self.readers:
            reader.join(2.0)  # a job that does not end may hold a pipe open
        if self.bar is not None:
            self.bar.stop()
        self.steps.record()

    def _take(self, line: str) -> None:
        with contextlib.suppress(ValueError, KeyError):
            self._say(self.steps.take(json.loads(line)))

    def _say(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.said = time.monotonic()
            self._above(f"{line}\n")

    def _above(self, line: str) -> None:
        """Print a line of Snakemake's, of a job's or ours, above the bar where there is one, and in one piece."""
        if self.console is None:
            sys.stderr.write(line)
            sys.stderr.flush()
            return
        from rich.text import Text

        self.console.print(Text.from_ansi(line.rstrip("\n")), soft_wrap=True)

    def refresh(self) -> None:
        """Called now and then: a line where nothing was said for a minute."""
        if not self.live and self.steps.estimate is not None and time.monotonic() - self.said >= SILENCE_SECONDS:
            self._say([self.steps.status()])

    def _drawn(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        done, total, words = self.steps.numbers()
        if not total:
            return Text(f"planning, {words}")
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(total=total, completed=done, width=30), f"{done} of {total} steps", words)
        with self.steps.lock:
            running = self.steps.running()
        return Group(row, *(Text(f"  {line}", no_wrap=True, overflow="ellipsis") for line in running))


def _follow(read: int, use: Callable[[str], object]) -> None:
    with os.fdopen(read, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            use(line)


def _to_stdout(line: str) -> None:
    print(line, end="", flush=True)
