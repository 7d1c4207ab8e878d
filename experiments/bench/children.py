"""Worker processes of a benchmark, which do one thing at a time when they are asked.

The parent asks one process, or all ranks of a group at once, and waits; so two processes that must not run at the same
time, because they are compared, never do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from experiments.bench.testbed import INTERFACE, Testbed
from experiments.common.files import ROOT
from experiments.common.processes import die_with_parent

STOP_SECONDS = 5.0


class ChildError(RuntimeError):
    """A worker process failed, ended or did not answer in time; the message is one line."""


class Child:
    """One worker process.

    Args:
        module: run with ``python -m``; it calls :func:`serve`.
        environment: laid over this process's.
        prefix: words before the command, e.g. to enter a network namespace.
    """

    def __init__(self, module: str, environment: Mapping[str, str], prefix: Sequence[str] = ()) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        self.connection, theirs = Pipe()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module, str(theirs.fileno())],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=self.errors,
            stderr=self.errors,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def send(self, request: Mapping[str, Any]) -> None:
        """Start a request; :meth:`receive` waits for its answer."""
        try:
            self.connection.send(request)
        except OSError:
            raise ChildError(self._last_words()) from None

    def receive(self) -> Any:
        """The answer; ChildError if the worker reported an error or has ended."""
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise ChildError(self._last_words()) from None
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer["ok"]

    def _last_words(self) -> str:
        """The last line that the worker has written."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=STOP_SECONDS)
        self.errors.seek(0)
        return last_line(self.errors.read().decode(errors="replace")) or "worker has ended"

    def stop(self) -> None:
        """End the process: by closing its input, and if that does not help by a signal."""
        self.connection.close()
        try:
            self.process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()


class Group:
    """Workers that take part in one request together, e.g. the ranks of a process group; a context manager."""

    def __init__(self, children: Sequence[Child]) -> None:
        self.children = list(children)

    def ask(self, request: Mapping[str, Any], seconds: float = 600.0) -> list[Any]:
        """The answers of all workers, in order.

        Raises:
            ChildError: what the workers that failed said; all have answered or ended then, or have had a moment to.
        """
        for child in self.children:
            child.send(request)
        answers: dict[Child, Any] = {}
        failures: dict[str, None] = {}  # each message once
        deadline = time.monotonic() + seconds
        waiting: dict[Any, Child] = {child.connection: child for child in self.children}
        while waiting:
            ready = wait(waiting, max(deadline - time.monotonic(), 0))
            if not ready:
                failures.setdefault(f"no answer within {seconds:g} s")
                break
            for child in map(waiting.pop, ready):
                try:
                    answers[child] = child.receive()
                except ChildError as error:
                    # The others may wait for this one in vain, or fail in the same way a moment later.
                    failures.setdefault(str(error))
                    deadline = min(deadline, time.monotonic() + STOP_SECONDS)
        if failures:
            raise ChildError(" | ".join(failures))
        return [answers[child] for child in self.children]

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End all workers, at once where they may be stuck."""
        for child in self.children:
            if kind is not None:
                child.process.kill()
        for child in self.children:
            child.stop()


@contextlib.contextmanager
def ranks(
    module: str, world: int, *, threads: int | None = 1, testbed: Testbed | None = None, **start: Any
) -> Iterator[Group]:
    """One process per rank, each on a host of ``testbed`` if there is one, that have answered the request ``start``
    with these arguments; in it they :func:`experiments.bench.collectives.join` each other.

    Args:
        threads: of each; None leaves them as they are.
    """
    with tempfile.TemporaryDirectory() as folder:
        shared = {"STORE": f"{folder}/store", "WORLD_SIZE": str(world)}
        shared |= {"GLOO_SOCKET_IFNAME": INTERFACE if testbed else "lo"}
        shared |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
        prefixes = [testbed.inside(rank) if testbed else () for rank in range(world)]
        children = [Child(module, {**shared, "RANK": str(rank)}, prefix) for rank, prefix in enumerate(prefixes)]
        with Group(children) as group:
            group.ask({"do": "start", **start})
            yield group


def last_line(text: str) -> str:
    """The last line that is not blank; "" without one."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def one_line(error: Exception) -> str:
    """Type and message; a message that torch has wrapped in others of its own is taken out of them."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message.rpartition('when running the callback: ')[2]}"


def serve(worker: object) -> None:
    """Answer requests ``{"do": name, **arguments}`` by the worker's methods until the input closes; an error is an
    answer too."""
    die_with_parent(signal.SIGKILL)()
    parent = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError):
        while True:
            request = parent.recv()
            try:
                answer = {"ok": getattr(worker, request.pop("do"))(**request)}
            except Exception as error:
                answer = {"error": one_line(error)}
            parent.send(answer)
