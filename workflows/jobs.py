"""Processes of a workflow: which there are, and how they are ended.

The jobs of a killed workflow are found by a mark in their environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from edgc.errors import UserError

MARK = "EDGC_WORKFLOW"  # environment variable of every job: the results folder of its workflow
INTERRUPT_SECONDS = 3.0  # from Ctrl-C until what is left of a workflow is killed
STOP_SECONDS = 10.0  # from asking a process to end until it is killed


def _others() -> Iterator[psutil.Process]:
    """Processes but this one and those it was started by."""
    this = psutil.Process()
    lineage = {this, *this.parents()}
    return (process for process in psutil.process_iter() if process not in lineage)


def marked(folder: Path) -> list[psutil.Process]:
    """The jobs of a workflow in ``folder``."""
    jobs = []
    for process in _others():
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or another user's
            if process.environ().get(MARK) == str(folder.resolve()):
                jobs.append(process)
    return jobs


def send(number: int, processes: Sequence[psutil.Process]) -> None:
    """Send a signal to processes, some of which may have ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def stop(
    folder: Path,
    number: int = signal.SIGTERM,
    patience: float = STOP_SECONDS,
    gently: Callable[[psutil.Process], bool] = lambda _: True,
) -> int:
    """Stop what is left of a workflow in ``folder``; returns how many processes there were.

    Args:
        number: signal by which processes are ended ``gently``.
        patience: seconds until what is left is killed.

    Raises:
        UserError: some do not end.
    """
    jobs = marked(folder)
    first = [job for job in jobs if gently(job)]
    send(number, first)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and any(job in first for job in marked(folder)):
        time.sleep(0.05)
    deadline = time.monotonic() + STOP_SECONDS
    while left := marked(folder):
        if time.monotonic() > deadline:
            pids = [process.pid for process in left]
            raise UserError(f"processes of a killed workflow do not end: {pids}", where=folder, fix="stop them")
        send(signal.SIGKILL, left)
        time.sleep(0.05)
    return len(jobs)


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
                left = marked(folder)  # not those of a workflow that is started again meanwhile
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


def is_launcher(process: psutil.Process) -> bool:
    """Tell a run's launcher, which throws its attempt away when it is interrupted."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "experiments.training.launch" in words and Path(words[0]).name.startswith("python")


def other_snakemake(root: Path) -> int | None:
    """Process id of a Snakemake that somebody started by hand in the repository ``root``, if there is one."""
    for process in _others():
        with contextlib.suppress(psutil.Error, OSError):
            words = process.cmdline()
            # `python snakemake ...` or `python -m snakemake ...`; jobs on a cluster node have a --mode.
            named = any(Path(word).name == "snakemake" for word in words[:3]) and "--mode" not in words
            if named and root.samefile(process.cwd()):
                return process.pid
    return None
