"""Files of one run: written whole or not at all, by one process at a time.

A run folder holds ``run.yaml``, ``metrics.jsonl``, ``summary.json`` and ``status``. While a run goes on, its files
lie in ``.attempt/`` inside the folder; they are renamed into place when the run has ended, ``status`` last, so that
a folder with a ``status`` file is complete whatever happened. What a killed run goes on from lies in
``.checkpoints/`` inside the folder, which neither a new attempt nor Snakemake touches; it is removed once the run has
ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from edgc.errors import UserError

STATUSES = ("ok", "diverged", "failed", "interrupted")
CHECKPOINTS = ".checkpoints"


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it onto ``path`` on success, remove it on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path`` so that a reader sees the old file or the new one, never a part."""
    with atomic_path(path) as temporary:
        if isinstance(content, bytes):
            temporary.write_bytes(content)
        else:
            temporary.write_text(content, encoding="utf-8")


def check_writable(folder: Path) -> None:
    """Raise ``UserError`` when files cannot be created in ``folder`` (it is made if missing)."""
    probe = folder / f".write-test.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        fix = "make it writable or choose another results folder"
        raise UserError(f"results folder is not writable: {error.strerror}", where=folder, fix=fix) from None


class RunFolder:
    """One run's folder, claimed for the life of this object.

    Claiming supersedes an older process on this machine that still holds the folder: that is an orphan of a killed
    pipeline (the pipeline itself runs once per results folder), and its half-finished attempt is thrown away.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attempt = path / ".attempt"
        self.checkpoints = path / CHECKPOINTS
        self._lock: IO[str] | None = None

    def claim(self, patience_seconds: float = 30.0) -> None:
        """Take the folder's lock and start an empty attempt.

        Raises:
            UserError: if another process keeps the folder (on another machine, for instance).
        """
        check_writable(self.path)
        deadline = time.monotonic() + patience_seconds
        # The locks lie beside the folder: Snakemake may delete its files while an orphan still holds them.
        handle = self.path.with_name(f".{self.path.name}.lock").open("a+", encoding="utf-8")
        _lock_exclusively(handle, deadline, stop_holder=True)
        handle.seek(0)
        handle.truncate()
        handle.write(str(os.getpid()))
        handle.flush()
        self._lock = handle
        # A killed launcher's ranks outlive it for a moment, and may still write into the attempt.
        with _ranks_lock(self.path).open("a") as ranks:
            _lock_exclusively(ranks, deadline)
            if self.attempt.exists():
                shutil.rmtree(self.attempt)
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

    def newest_checkpoint(self) -> Path | None:
        """The folder of the newest checkpoint; whether it is whole is not looked at."""
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


def _lock_exclusively(handle: IO[str], deadline: float, stop_holder: bool = False) -> None:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if stop_holder:
                handle.seek(0)
                _stop_orphan(handle.read().strip())
            if time.monotonic() > deadline:
                fix = "stop the process that holds it"
                raise UserError("run folder is in use", where=handle.name, fix=fix) from None
            time.sleep(0.1)


def _stop_orphan(pid_text: str) -> None:
    """Kill an older launcher, if the recorded process still is one; its ranks die with it."""
    if not pid_text.isdigit() or int(pid_text) == os.getpid():
        return
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid_text}/cmdline").read_bytes().replace(b"\0", b" ")
        if b"experiments.launch" in command:
            os.kill(int(pid_text), signal.SIGKILL)
