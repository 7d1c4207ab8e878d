"""Files of one run: written whole or not at all, by one process at a time.

A run folder holds ``run.yaml``, ``metrics.jsonl``, ``summary.json`` and ``status``. While a run goes on, its files lie
in ``.attempt/`` inside the folder; they are renamed into place when the run has ended, ``status`` last, so that a
folder with a ``status`` file is complete whatever happened. What a killed run goes on from lies in ``.checkpoints/``
inside the folder, which neither a new attempt nor Snakemake touches; it is removed once the run has ended. The state at
the end of warm-up, where other runs branch from it, lies in ``warm_up/`` and stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import IO

from edgc.errors import UserError
from experiments.common.files import check_writable

STATUSES = ("ok", "diverged", "failed", "interrupted")
CHECKPOINTS = ".checkpoints"
WARM_UP = "warm_up"


class RunFolder:
    """One run's folder, claimed for the life of this object.

    Claiming supersedes an older launcher that still holds the folder: that is an orphan of a killed workflow (the
    workflow itself runs once per results folder), and its half-finished attempt is thrown away. On this machine it is
    killed; under Slurm, where it may be on any node, its job is cancelled. Of two jobs the one submitted later stays.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attempt = path / ".attempt"
        self.checkpoints = path / CHECKPOINTS
        self._lock: IO[str] | None = None

    def claim(self) -> None:
        """Take the folder's lock and start an empty attempt.

        Raises:
            UserError: if another process keeps the folder (on another machine, for instance) for longer than 30 s;
                under Slurm 180 s, for a file server keeps the lock of a node that died a while.
        """
        check_writable(self.path)
        job = slurm_job()
        deadline = time.monotonic() + (180 if job else 30)
        # The locks lie beside the folder: Snakemake may delete its files while an orphan still holds them.
        handle = self.path.with_name(f".{self.path.name}.lock").open("a+", encoding="utf-8")
        _lock_exclusively(handle, deadline, stop_holder=True)
        handle.seek(0)
        handle.truncate()
        handle.write(f"{os.getpid()} {socket.gethostname()} {job}\n")
        handle.flush()
        self._lock = handle
        # A killed launcher's ranks outlive it for a moment, and may still write into the attempt.
        with _ranks_lock(self.path).open("a") as ranks:
            _lock_exclusively(ranks, deadline)
            shutil.rmtree(self.attempt, ignore_errors=True)
            self.attempt.mkdir(parents=True)

    def publish(self) -> None:
        """Move the attempt's files into place, ``status`` last."""
        names = sorted(entry.name for entry in self.attempt.iterdir() if entry.name != "status")
        (self.path / "status").unlink(missing_ok=True)
        for name in [*names, "status"]:
            target = self.path / name
            if target.is_dir():
                shutil.rmtree(target)
            (self.attempt / name).replace(target)
        self.attempt.rmdir()

    def discard(self) -> None:
        shutil.rmtree(self.attempt, ignore_errors=True)

    def forget(self) -> None:
        """Remove the checkpoints: the next launch starts from the beginning."""
        # Renamed first: half of them gone must not look like damage.
        gone = self.checkpoints.with_name(f"{CHECKPOINTS}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            self.checkpoints.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def forget_warm_up(self) -> None:
        """Remove the state that other runs branch from, as a run that begins anew will save another."""
        shutil.rmtree(self.path / WARM_UP, ignore_errors=True)

    def newest_warm_up(self) -> Path | None:
        """Folder of the state that other runs branch from; nothing says that it is whole."""
        return max((self.path / WARM_UP).glob("iter_*"), default=None)

    def newest_checkpoint(self) -> Path | None:
        """Folder of the newest checkpoint; nothing says that it is whole."""
        return max(self.checkpoints.glob("iter_*"), default=None)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def hold_as_rank(attempt: Path) -> None:
    """Make later launches wait, before they clear ``attempt``, until this process has ended."""
    _held.append(_ranks_lock(attempt.parent).open("a"))
    fcntl.flock(_held[-1], fcntl.LOCK_SH)


_held: list[IO[str]] = []  # a lock lives as long as its open file


def _ranks_lock(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.ranks.lock")


def slurm_job() -> int:
    """Number of the Slurm job that this process is part of; 0 outside of Slurm."""
    text = os.environ.get("SLURM_JOB_ID", "")
    return int(text) if text.isdigit() else 0


def _lock_exclusively(handle: IO[str], deadline: float, stop_holder: bool = False) -> None:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if stop_holder:
                handle.seek(0)
                _stop_orphan(handle.read())
            if time.monotonic() > deadline:
                fix = "stop the process that holds it"
                raise UserError("run folder is in use", where=handle.name, fix=fix) from None
            time.sleep(0.1)


def _stop_orphan(holder: str) -> None:
    """End an older launcher, if the recorded process still is one; its ranks die with it."""
    match = re.fullmatch(r"(\d+) (\S+) (\d+)\n", holder)
    if match is None:
        return  # half written
    (pid, host, job), this_job = match.groups(), slurm_job()
    if int(job) and int(job) != this_job:
        if this_job and int(job) > this_job:
            raise UserError(f"Slurm job {job}, submitted later, makes this run", fix="leave it to that job")
        _cancel(job)
    elif host == socket.gethostname() and int(pid) != os.getpid():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            if b"experiments.training.launch" in command:
                os.kill(int(pid), signal.SIGKILL)


@functools.cache
def _cancel(job: str) -> None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(["scancel", job], capture_output=True, timeout=60)
