"""Hand a launch over to the server that a workflow has started, which has imported everything already."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

SOCKET = "EDGC_LAUNCH_SERVER"  # environment variable: path of the server's socket
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
MESSAGE_BYTES = 1 << 17


def installation() -> list[object]:
    """Which Python this is: a launch in a container or another environment is not the server's."""
    found = Path(sys.executable).stat()
    return [sys.executable, sys.prefix, found.st_dev, found.st_ino]


def hand_over() -> None:
    """Have the server launch with this process's arguments, folder, environment and open files, and end as it ends.

    Returns where there is no server, or where it does not take the launch; nothing was started then. A signal that
    would end or stop this process goes on to the launch; if this process is killed, so is the launch.
    """
    path = os.environ.get(SOCKET)
    if not path:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
        try:
            launch = _ask(server, path)
            if launch is None:
                return
            for number in HANDED_ON:
                signal.signal(number, lambda number, frame: _send(launch, number))
            signal.signal(signal.SIGTSTP, lambda number, frame: _stop(launch))
            signal.signal(signal.SIGCONT, lambda number, frame: _send(-launch, number))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        ended = server.recv(MESSAGE_BYTES)
    os._exit(json.loads(ended)["code"] if ended else 1)


def _ask(server: socket.socket, path: str) -> int | None:
    """Process, and process group, of the launch; None where there is none."""
    request = {
        "installation": installation(),
        "arguments": sys.argv,
        "folder": str(Path.cwd()),
        "environment": dict(os.environ),
    }
    try:
        server.connect(path)
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        answer = server.recv(MESSAGE_BYTES)
    except OSError:
        return None
    return json.loads(answer).get("launch") if answer else None


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _stop(launch: int) -> None:
    _send(-launch, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
