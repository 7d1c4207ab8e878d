"""A process that has imported everything once and forks a launcher for each run of a workflow on a CPU machine.

A launch by itself imports for four seconds what the one before it has imported; at ci scale that is a fifth of a run.
Started by :mod:`workflows.program`, it listens on the socket ``EDGC_LAUNCH_SERVER`` and ends with the workflow.
What is launched, and what it writes, is the same with and without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from experiments.common.files import ROOT
from experiments.common.processes import die_with_parent
from experiments.training.launch_client import HANDED_ON, MESSAGE_BYTES, SOCKET, installation


def main() -> None:
    """Serve until the workflow ends; where ranks cannot be forked, because there is a GPU, not at all."""
    die_with_parent(signal.SIGKILL)()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(os.environ.pop(SOCKET))
        listening.listen()  # at once: who connects while this imports, waits
        os.environ["OMP_NUM_THREADS"] = "1"  # no thread pools in a process that forks
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the workflow ends its launches

        import torch

        if torch.cuda.is_available():
            return
        import torch.distributed.launcher.api

        import experiments.training.fork_server
        import experiments.training.launch  # noqa: F401
        from experiments.spec.code import training_code

        server = Server(listening)
        training_code()  # remembered: no launch works it out again
        signal.signal(signal.SIGTERM, server.end)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a launch has ended: the server wakes
        server.serve()


class Server:
    """The launches that are running, by the connection of the process that waits for each."""

    def __init__(self, listening: socket.socket) -> None:
        self.listening = listening
        self.launches: dict[socket.socket, int] = {}
        self.code = _times_of_code()
        self.ending = False
        self.woken, self.waker = socket.socketpair()  # readable once a signal has come
        self.woken.setblocking(False)
        self.waker.setblocking(False)
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)

    def end(self, *_: object) -> None:
        """As soon as no launch is running: a signal to the whole group ends those first."""
        self.ending = True

    def serve(self) -> None:
        while self.launches or not self.ending:
            ready, _, _ = select.select([self.listening, self.woken, *self.launches], [], [])
            for connection in ready:
                if connection is self.woken:
                    connection.recv(4096)
                elif connection is self.listening:
                    self._take(connection.accept()[0])
                else:  # who waits for a launch says nothing more, so it has gone
                    os.kill(self.launches[connection], signal.SIGKILL)
            self._look()

    def _take(self, connection: socket.socket) -> None:
        files: list[int] = []
        try:
            message, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
            request = json.loads(message)
        except (OSError, ValueError):  # gone, or too long for one message
            connection.close()
            for file in files:
                os.close(file)
            return
        if request["installation"] != installation() or self.code != _times_of_code():
            _tell(connection, {})
            connection.close()
        elif pid := os.fork():
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # here too, for a signal may be sent on at once
            self.launches[connection] = pid
            _tell(connection, {"launch": pid})
        else:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for other in (self.listening, self.woken, self.waker, connection, *self.launches):
                other.close()
            _launch(request, files)
        for file in files:
            os.close(file)

    def _look(self) -> None:
        """Tell who waits for a launch that has ended how it ended."""
        for connection, launch in list(self.launches.items()):
            pid, status = os.waitpid(launch, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                _tell(connection, {"code": code if code >= 0 else 128 - code})
                connection.close()
                del self.launches[connection]


def _tell(connection: socket.socket, message: Mapping[str, int]) -> None:
    with contextlib.suppress(OSError):
        connection.send(json.dumps(message).encode())


def _times_of_code() -> dict[str, int]:
    """When each file of the project that is imported here was last changed (ns)."""
    here, found = f"{ROOT}{os.sep}", {}
    for path in [getattr(module, "__file__", None) for module in list(sys.modules.values())]:
        if path and path.startswith(here) and "site-packages" not in path:
            with contextlib.suppress(OSError):
                found[path] = Path(path).stat().st_mtime_ns
    return found


def _launch(request: Mapping[str, Any], files: list[int]) -> NoReturn:
    """What ``python -m experiments.training.launch`` does, in a forked process."""
    die_with_parent(signal.SIGKILL)()
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    for number in (*HANDED_ON, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["arguments"]

    from experiments.training import launch, ranks

    ranks.imported = True
    launch.program()
    raise AssertionError("a launch ends its process")


if __name__ == "__main__":
    main()
