"""The server that forks the launchers of a workflow's runs, started when there is more than one run to train."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments.common.files import ROOT
from experiments.common.processes import die_with_parent, stop
from experiments.training.launch_client import SOCKET

FEWEST = 2  # runs for which it pays


class LaunchServer:
    """:mod:`experiments.training.launch_server` for as long as the ``with`` block lasts.

    Jobs look for it at the socket that :attr:`environment` names; before it is started, and where it could not be, they
    find nothing there and launch by themselves.
    """

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="edgc-", ignore_cleanup_errors=True)
        self.environment = {SOCKET: str(Path(self.folder.name) / "launches")}
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LaunchServer:
        return self

    def start(self, runs: int) -> None:
        """Start it, unless it has been or there are too few ``runs`` to train."""
        if self.process is None and runs >= FEWEST:
            # Without the mark of a job: it is no job, and those that it forks end with the job that waits for them.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "experiments.training.launch_server"],
                cwd=ROOT,
                env=os.environ | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            stop(self.process)
        self.folder.cleanup()
