"""Processes of a workflow: which there are, and how they are ended.

The jobs of a killed workflow are found by a mark in their environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from edgc.errors import UserError

MARK = "EDGC_WORKFLOW"  # environment variable of every job: the results folder of its workflow
INTERRUPT_SECONDS = 3.0  # from Ctrl-C until what is left of a workflow is killed
STOP_SECONDS = 10.0  # from asking a process to end until it is killed


def _others() -> Iterator[psutil.Process]:
    """All processes but this one and those it was started by."""
    this = psutil.Process()
    lineage = {this, *this.parents()}
    return (process for process in psutil.process_iter() if process not in lineage)


def marked(folder: Path) -> list[psutil.Process]:
    """The jobs of a workflow in ``folder``."""
    found = []
    for process in _others():
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or another user's
            if process.environ().get(MARK) == str(folder.resolve()):
                found.append(process)
    return found


def send(number: int, processes: Sequence[psutil.Process]) -> None:
    """Send a signal to processes, some of which may have ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def stop(folder: Path) -> int:
    """Stop what is left of a workflow in ``folder``, gently first; returns how many processes there were.

    Raises:
        UserError: some do not end.
    """
    first = left = marked(folder)
    deadline = time.monotonic() + STOP_SECONDS
    while left:
        late = time.monotonic() > deadline
        send(signal.SIGKILL if late else signal.SIGTERM, left)
        time.sleep(0.1)
        left = marked(folder)
        if left and time.monotonic() > deadline + STOP_SECONDS:
            pids = [process.pid for process in left]
            what = f"processes of a killed workflow do not end: {pids}"
            raise UserError(what, where=folder, fix="stop them")
    return len(first)


@contextlib.contextmanager
def ending_with_this(folder: Path) -> Iterator[None]:
    """Around a workflow in ``folder``: when this process is killed, a second one ends the jobs that there are then."""
    read, write = os.pipe()
    other = os.fork()
    if not other:
        with contextlib.suppress(BaseException):
            os.setsid()  # Ctrl-C is for the other one
            for file in (0, 1, 2):
                os.dup2(os.open(os.devnull, os.O_RDWR), file)
            os.closerange(3, read)
            os.closerange(write, os.sysconf("SC_OPEN_MAX"))
            if not os.read(read, 1):
                left = marked(folder)
                send(signal.SIGTERM, left)
                _, left = psutil.wait_procs(left, STOP_SECONDS)
                send(signal.SIGKILL, left)
        os._exit(0)
    os.close(read)
    try:
        yield
    finally:
        os.write(write, b".")
        os.close(write)
        os.waitpid(other, 0)


def interrupt(folder: Path) -> None:
    """End all jobs of a workflow within a few seconds: launchers as Ctrl-C does, what is left then at once."""
    launchers = [process for process in marked(folder) if is_launcher(process)]
    send(signal.SIGINT, launchers)
    deadline = time.monotonic() + INTERRUPT_SECONDS
    while time.monotonic() < deadline and any(process in launchers for process in marked(folder)):
        time.sleep(0.05)
    while left := marked(folder):
        send(signal.SIGKILL, left)
        time.sleep(0.02)


def is_launcher(process: psutil.Process) -> bool:
    """Whether a process is a run's launcher, which throws its attempt away when it is interrupted."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "experiments.training.launch" in words and Path(words[0]).name.startswith("python")


def other_snakemake(root: Path) -> int | None:
    """Process id of a Snakemake that somebody started by hand in the repository ``root``, if there is one."""
    for process in _others():
        with contextlib.suppress(psutil.Error, OSError):
            words, here = process.cmdline(), root.samefile(process.cwd())
            # `python snakemake ...` or `python -m snakemake ...`; jobs on a cluster node have a --mode.
            named = any(Path(word).name == "snakemake" for word in words[:3])
            if here and named and "--mode" not in words:
                return process.pid
    return None
