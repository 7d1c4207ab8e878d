"""Worker processes of a benchmark, each of which holds an object and calls its methods when it is asked.

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


class WorkerError(RuntimeError):
    """A worker process failed, ended or did not answer in time; the message is one line."""


class Worker:
    """One process.

    Args:
        kind: class of the object that it holds, made there without arguments.
        environment: laid over this process's.
        prefix: words before the command, e.g. to enter a network namespace.
    """

    def __init__(self, kind: type, environment: Mapping[str, str], prefix: Sequence[str] = ()) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        self.connection, theirs = Pipe()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "experiments.bench.workers", str(theirs.fileno())],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=self.errors,
            stderr=self.errors,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.send(kind)

    def send(self, message: Any) -> None:
        """Send a message; :meth:`receive` notices where the process has ended."""
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def receive(self) -> Any:
        """Return the answer; raise WorkerError if the worker reported an error or has ended."""
        try:
            answer, error = self.connection.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=STOP_SECONDS)
            self.errors.seek(0)
            error = last_line(self.errors.read().decode(errors="replace")) or "worker has ended"
        if error:
            raise WorkerError(error)
        return answer

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

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = list(workers)

    def ask(self, method: str, *, within: float = 600.0, **arguments: Any) -> list[Any]:
        """Call a method of every worker's object and return the answers in order.

        Args:
            within: seconds until all have to have answered.

        Raises:
            WorkerError: the messages of the workers that failed; all have answered or ended then, or have had a moment
                to.
        """
        for worker in self.workers:
            worker.send((method, arguments))
        answers: dict[Worker, Any] = {}
        failures: dict[str, None] = {}  # each message once
        deadline = time.monotonic() + within
        waiting: dict[Any, Worker] = {worker.connection: worker for worker in self.workers}
        while waiting:
            ready = wait(waiting, max(deadline - time.monotonic(), 0))
            if not ready:
                failures.setdefault(f"no answer within {within:g} s")
                break
            for worker in map(waiting.pop, ready):
                try:
                    answers[worker] = worker.receive()
                except WorkerError as error:
                    # The others may wait for this one in vain, or fail in the same way a moment later.
                    failures.setdefault(str(error))
                    deadline = min(deadline, time.monotonic() + STOP_SECONDS)
        if failures:
            raise WorkerError(" | ".join(failures))
        return [answers[worker] for worker in self.workers]

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End all workers, at once where they may be stuck."""
        for worker in self.workers:
            if kind is not None:
                worker.process.kill()
        for worker in self.workers:
            worker.stop()


@contextlib.contextmanager
def ranks(
    kind: type, world: int, *, threads: int | None = 1, testbed: Testbed | None = None, **start: Any
) -> Iterator[Group]:
    """One process per rank, each on a host of ``testbed`` if there is one, whose object has answered ``start`` with
    these arguments; in it they :func:`experiments.bench.collectives.join` each other.

    Args:
        threads: of each; None leaves them as they are.
    """
    with tempfile.TemporaryDirectory() as folder:
        shared = {"STORE": f"{folder}/store", "WORLD_SIZE": str(world)}
        shared |= {"GLOO_SOCKET_IFNAME": INTERFACE if testbed else "lo"}
        shared |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
        workers = [
            Worker(kind, {**shared, "RANK": str(rank)}, testbed.inside(rank) if testbed else ())
            for rank in range(world)
        ]
        with Group(workers) as group:
            group.ask("start", **start)
            yield group


def last_line(text: str) -> str:
    """Return the last line that is not blank; "" without one."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def serve(connection: Connection) -> None:
    """Answer requests by the methods of an object until the input closes; an error is an answer too."""
    die_with_parent(signal.SIGKILL)()
    worker = connection.recv()()
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = connection.recv()
            try:
                answer = getattr(worker, method)(**arguments), ""
            except Exception as error:
                # A message that torch has wrapped in others of its own is taken out of them.
                message = " ".join(str(error).split()).rpartition("when running the callback: ")[2]
                answer = None, f"{type(error).__name__}: {message}"
            connection.send(answer)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
