"""Worker processes of a benchmark, which do one thing at a time when they are asked.

Requests and answers are lines of JSON over pipes. The parent asks one process, or all ranks of a group at once, and
waits; so two processes that must not run at the same time, because they are compared, never do.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

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
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self._buffer = b""

    def send(self, request: Mapping[str, Any]) -> None:
        """Start a request; :meth:`receive` waits for its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildError(self._last_words("worker has ended")) from None

    def receive(self) -> Any | None:
        """What has arrived of the answer: the answer once it is whole, else None. Blocks while there is nothing new.

        Raises:
            ChildError: the worker reported an error or has ended.
        """
        assert self._process.stdout is not None
        read = os.read(self._process.stdout.fileno(), 1 << 16)
        if not read:
            raise ChildError(self._last_words("worker has ended"))
        self._buffer += read
        if not self._buffer.endswith(b"\n"):
            return None
        answer = json.loads(self._buffer)
        self._buffer = b""
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer

    def fileno(self) -> int:
        """Of the pipe that answers come through, for selectors."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def _last_words(self, otherwise: str) -> str:
        """The last line that the worker has written to stderr."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=STOP_SECONDS)
        self._errors.seek(0)
        return last_line(self._errors.read().decode(errors="replace")) or otherwise

    def stop(self) -> None:
        """End the process: by closing its input, and if that does not help by a signal."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def kill(self) -> None:
        """End the process at once; :meth:`stop` is still to be called."""
        self._process.kill()


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
        with selectors.DefaultSelector() as selector:
            for child in self.children:
                selector.register(child, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(deadline - time.monotonic(), 0))
                if not ready:
                    failures.setdefault(f"no answer within {seconds:g} s")
                    break
                for key, _ in ready:
                    child = cast(Child, key.fileobj)
                    try:
                        answer = child.receive()
                    except ChildError as error:
                        # The others may wait for this one in vain, or fail in the same way a moment later.
                        failures.setdefault(str(error))
                        deadline = min(deadline, time.monotonic() + STOP_SECONDS)
                    else:
                        if answer is None:
                            continue
                        answers[child] = answer["ok"]
                    selector.unregister(child)
        if failures:
            raise ChildError(" | ".join(failures))
        return [answers[child] for child in self.children]

    def stop(self, *, at_once: bool = False) -> None:
        """End all workers; ``at_once`` where they are known to be stuck."""
        for child in self.children:
            if at_once:
                child.kill()
        for child in self.children:
            child.stop()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop(at_once=kind is not None)


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
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": getattr(worker, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"error": one_line(error)}
        print(json.dumps(answer), file=answers, flush=True)
