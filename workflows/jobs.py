"""Jobs of a workflow, found by a mark in their environment, and how they are ended."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from edgc.errors import UserError
from experiments.common.files import ROOT

MARK = "EDGC_WORKFLOW"  # environment variable of every job: the results folder of its workflow
INTERRUPT_SECONDS = 3.0  # from Ctrl-C until what is left of a workflow is killed
STOP_SECONDS = 10.0  # from asking a process to end until it is killed


def marked(folder: Path) -> list[psutil.Process]:
    """Jobs of a workflow in ``folder``; this process and those it was started by are none."""
    this = psutil.Process()
    lineage = {this, *this.parents()}
    jobs = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or another user's
            if process not in lineage and process.environ().get(MARK) == str(folder.resolve()):
                jobs.append(process)
    return jobs


def is_launcher(process: psutil.Process) -> bool:
    """Tell a run's launcher, which throws its attempt away when it is interrupted."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "experiments.training.launch" in words and Path(words[0]).name.startswith("python")


def _send(number: int, processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def stop(folder: Path, *, interrupted: bool = False) -> int:
    """Stop what is left of a workflow in ``folder``; returns the number of processes that there were.

    Args:
        interrupted: by Ctrl-C, so launchers are interrupted, too, and have less time. Otherwise all are terminated.

    Raises:
        UserError: some do not end.
    """
    jobs = marked(folder)
    asked = {job for job in jobs if not interrupted or is_launcher(job)}
    _send(signal.SIGINT if interrupted else signal.SIGTERM, list(asked))
    deadline = time.monotonic() + (INTERRUPT_SECONDS if interrupted else STOP_SECONDS)
    while time.monotonic() < deadline and asked.intersection(marked(folder)):
        time.sleep(0.05)
    deadline = time.monotonic() + STOP_SECONDS
    while left := marked(folder):
        if time.monotonic() > deadline:
            pids = [process.pid for process in left]
            raise UserError(f"processes of a killed workflow do not end: {pids}", where=folder, fix="stop them")
        _send(signal.SIGKILL, left)
        time.sleep(0.05)
    return len(jobs)


@contextlib.contextmanager
def ending_with_this(folder: Path) -> Iterator[None]:
    """Around a workflow in ``folder``: when this process is killed, a second one, in a session that Ctrl-C does not
    reach, sees its standard input end and stops the jobs."""
    command = [sys.executable, "-m", "workflows.jobs", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True) as watcher:
        try:
            yield
        finally:
            watcher.kill()


if __name__ == "__main__":
    sys.stdin.read()
    left = marked(Path(sys.argv[1]))  # these alone: not those of a workflow that is started again meanwhile
    _send(signal.SIGTERM, left)
    _send(signal.SIGKILL, psutil.wait_procs(left, STOP_SECONDS)[1])
