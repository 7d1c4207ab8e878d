"""A run over several nodes: one launcher on each, of which that of node 0 owns the run folder.

When ranks of another node fail, that node's launcher leaves the reason beside the run folder (the file system is
shared) and waits until node 0 has published or thrown away the attempt. So a run ends in the same way wherever the
first error was.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgc.errors import UserError
from experiments.common.cli import EXIT_BAD_INPUT
from experiments.common.files import atomic_write

EXIT_INTERRUPTED = 1
EXIT_LOST_PEER = 75
END_SECONDS = 60.0  # from the end of a node's ranks until node 0 must have ended the attempt
GRACE_SECONDS = 10.0  # in which ranks should have noticed by themselves that a peer has gone
REFUSED = "refused: "  # the beginning of an error that is one of the user's
TELL_SECONDS = 2.0  # a shared file system may show a new file late


@dataclass(frozen=True)
class Nodes:
    """Machines that take part in a run.

    Attributes:
        count, index: how many there are, and which one this is; node 0 owns the run folder.
        rendezvous: ``host:port`` of node 0 when there are several.
        address: name or address under which the other nodes reach this one; by default its host name.
    """

    count: int = 1
    index: int = 0
    rendezvous: str = "localhost:0"
    address: str | None = None


def error_of(failure: Any) -> str:
    """Last line of the message of a rank that failed by itself, from torch's ``ProcessFailure``."""
    reply: Any = failure.message  # the rank's error file as a mapping, or a text of the agent's
    lines = str(reply["message"] if isinstance(reply, dict) else reply).strip().splitlines()
    return lines[-1] if lines else f"exit code {failure.exitcode}"


def error_files(attempt: Path) -> list[Path]:
    """Errors that other nodes have left, lowest node first."""
    return sorted(attempt.parent.parent.glob(f".{attempt.parent.name}.error.node*"))


def take_errors(attempt: Path) -> list[str]:
    """Remove the errors that other nodes have left, and return them."""
    files = error_files(attempt)
    errors = [path.read_text(encoding="utf-8").strip() for path in files]
    for path in files:
        path.unlink(missing_ok=True)
    return errors


def error_elsewhere(attempt: Path, nodes: Nodes) -> str | None:
    """Error that another node has left, if any; ``UserError`` where that node refused what it was given."""
    deadline = time.monotonic() + TELL_SECONDS
    while nodes.count > 1 and time.monotonic() < deadline:
        errors = take_errors(attempt)
        for error in errors:
            if error.startswith(REFUSED):
                raise UserError(error.removeprefix(REFUSED))
        if errors:
            return errors[0]
        time.sleep(0.1)
    return None


@contextlib.contextmanager
def ending_with_others(attempt: Path, nodes: Nodes) -> Iterator[None]:
    """End node 0's ranks some seconds after another node has left an error.

    By themselves they would wait long for a rank that has not yet connected to them.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            if error_files(attempt):
                if not over.wait(GRACE_SECONDS):
                    for rank in multiprocessing.active_children():
                        rank.kill()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    if nodes.count > 1:
        watcher.start()
    try:
        yield
    finally:
        over.set()
        if nodes.count > 1:
            watcher.join()


def follow(start: Callable[[], None], attempt: Path, node: int, refusal: UserError | None = None) -> None:
    """Run the ranks of a node other than 0, and end soon after node 0 has, whatever happens.

    Exits with 1 (interrupted) or 2 (bad input) where node 0 has not said how the run ended.

    Args:
        start: runs the ranks of this node to their end.
        refusal: why this node's ranks end as soon as they have met the others.

    Raises:
        UserError: the refusal, which node 0 has been told.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        start()
        return
    except ChildFailedError as failure:
        _, first = failure.get_first_failure()
        if refusal is None and first.exitcode == EXIT_BAD_INPUT:
            raise SystemExit(EXIT_BAD_INPUT) from None
        error = f"{REFUSED}node {node}: {refusal}" if refusal else error_of(first)
        if refusal or (first.exitcode > 0 and first.exitcode != EXIT_LOST_PEER):
            atomic_write(attempt.parent.with_name(f".{attempt.parent.name}.error.node{node}"), error + "\n")
        deadline = time.monotonic() + END_SECONDS
        while (unfinished := attempt.exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if refusal:
            raise refusal from None
        if not unfinished:
            return
        reason = "node 0 has not ended the run"
    except (SignalException, KeyboardInterrupt):
        reason = "stopped"
    except (RendezvousError, DistError) as problem:
        reason = f"node 0 has gone, or never came: {problem}"
    print(f"interrupted: node {node}: {reason}", file=sys.stderr)
    raise SystemExit(EXIT_INTERRUPTED)
