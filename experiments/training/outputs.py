"""Folder of one run: written whole or not at all, by one process at a time, and read only as it was written. No torch.

A run folder holds ``run.yaml``, ``metrics.jsonl``, ``summary.json`` and ``status``. While a run goes on, its files lie
in ``.attempt/`` inside the folder; they are renamed into place when the run has ended, ``status`` last, so that a
folder with a ``status`` file is complete whatever happened. What a killed run goes on from lies in ``.checkpoints/``
inside the folder, which neither a new attempt nor Snakemake touches; it is removed once the run has ended. The state at
the end of warm-up, where other runs branch from it, lies in ``warm_up/`` and stays.

A run that has ended leaves ``manifest.json`` beside its files, with the size and checksum of each; of a run that was
restored from a kept one the checksum of that one was compared. A damaged file is never a result: it is refused in one
line. A run that *failed* is one; it keeps its place in every table, with whatever it has written.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from edgc.checkpoints import manifest
from edgc.errors import UserError
from experiments.common.files import check_writable

STATUSES = ("ok", "diverged", "failed", "interrupted")
CHECKPOINTS = ".checkpoints"
WARM_UP = "warm_up"
CHECKSUM_BYTES = 64 * 2**20  # larger files, such as weights, are recorded by their size alone
SETTINGS, LOG, SUMMARY, STATUS = "run.yaml", "metrics.jsonl", "summary.json", "status"
NAMES = (SETTINGS, LOG, SUMMARY, STATUS)
UNFINISHED = "unfinished"
COMPLETE = ("ok", "diverged")  # went to their end


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

    def withdraw(self) -> None:
        """Remove the attempt, and the folder unless there is something else in it."""
        self.discard()
        with contextlib.suppress(OSError):
            self.path.rmdir()

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


# ------------------------------------------------------------------ a run that has ended


def write_manifest(folder: Path) -> None:
    """Record every file of a run that has ended; called before ``status`` is there."""
    entries = {}
    for name in manifest.files_below(folder):
        size = (folder / name).stat().st_size
        entries[name] = manifest.Entry(size, "") if size > CHECKSUM_BYTES else manifest.entry(folder / name)
    manifest.write(folder, manifest.Manifest({}, entries))


def damaged(path: Path, problem: str) -> UserError:
    """The error about one file of a run folder, with the folder to delete."""
    folder = path.parent.parent if path.parent.name == "checkpoint" else path.parent
    fix = f"delete the folder {folder} and start again: the run is made again"
    return UserError(f"run folder is damaged: {path.name} {problem}", where=path, fix=fix)


def check(folder: Path, prefixes: Sequence[str] = ("",)) -> None:
    """Compare the files whose names begin with one of ``prefixes`` with the manifest, which a restored run lacks.

    Raises:
        UserError: naming the first file that is missing, cut short or altered.
    """
    if not (folder / manifest.NAME).exists():
        return
    try:
        recorded = manifest.read(folder).files
    except manifest.DamagedCheckpoint as error:
        raise damaged(folder / manifest.NAME, error.problem) from None
    for name, expected in recorded.items():
        if name.startswith(tuple(prefixes)) and (problem := manifest.problem(folder / name, expected)):
            raise damaged(folder / name, problem)


def read_status(folder: Path) -> str:
    """Status of the run, ``unfinished`` where it has not ended; ``UserError`` where the file holds something else."""
    path = folder / STATUS
    if not path.is_file():
        return UNFINISHED
    status = path.read_text(encoding="utf-8", errors="replace").strip()
    if status not in STATUSES:
        raise damaged(path, f"holds {status!r}, not one of {', '.join(STATUSES)}")
    return status


def read_summary(folder: Path, status: str) -> dict[str, Any]:
    """Content of ``summary.json``; empty where an unfinished or failed run has none, else ``UserError``."""
    path = folder / SUMMARY
    if not path.is_file() and status not in COMPLETE:
        return {}
    try:
        return {**json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError):
        raise damaged(path, "is missing, cut short or altered") from None


def read_log(folder: Path, status: str) -> list[dict[str, Any]]:
    """Events of ``metrics.jsonl``; ``UserError`` where that of a run that went to its end is missing or cut short."""
    events = read_events(folder / LOG)
    if status in COMPLETE and (not events or events[-1]["event"] != "end"):
        raise damaged(folder / LOG, "is missing or cut short: it has no end event")
    return events


def read_events(path: Path, event: str | None = None) -> list[dict[str, Any]]:
    """Events of a log, all or those of one kind, in the order written; none where there is no file.

    A last line without its end, as a killed process leaves it, is left out.

    Raises:
        UserError: another line is no event.
    """
    *lines, _ = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    try:
        events = [json.loads(line) for line in lines]
        return [item for item in events if event in (None, item["event"])]
    except (ValueError, LookupError, TypeError):
        raise damaged(path, "is cut short or altered") from None


def window_decisions(
    decisions: Iterable[Mapping[str, Any]], window: int, before: float = math.inf
) -> list[Mapping[str, Any]]:
    """Decisions of phase active at window ends, in iterations below ``before``.

    The cost gate also decides inside windows, but never a rank; what is decided when a run is over is never in use.
    """
    active = [event for event in decisions if event.get("phase") == "active"]
    return [event for event in active if int(event["iteration"]) % window == 0 and int(event["iteration"]) < before]
