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


def error_of(failure: Any) -> str:
    """The last line of what a rank that failed by itself has said, from torch's ``ProcessFailure``."""
    reply: Any = failure.message  # the rank's error file as a mapping, or a text of the agent's
    message = str(reply["message"] if isinstance(reply, dict) else reply)
    return message.strip().splitlines()[-1] if message.strip() else f"exit code {failure.exitcode}"


def error_files(attempt: Path) -> list[Path]:
    """What other nodes have left, lowest node first."""
    folder = attempt.parent
    return sorted(folder.parent.glob(f".{folder.name}.error.node*"))


def forget_errors(attempt: Path) -> list[str]:
    """Remove what other nodes have left, and return it."""
    found = error_files(attempt)
    errors = [path.read_text(encoding="utf-8").strip() for path in found]
    for path in found:
        path.unlink(missing_ok=True)
    return errors


def tell(attempt: Path, node: int, error: str) -> None:
    """Leave the error of a rank of this node for node 0."""
    atomic_write(attempt.parent.with_name(f".{attempt.parent.name}.error.node{node}"), error + "\n")


def error_elsewhere(attempt: Path, nodes: int) -> str | None:
    """The error that another node has left, if any; ``UserError`` where that node refused what it was given."""
    deadline = time.monotonic() + TELL_SECONDS
    while nodes > 1:
        errors = forget_errors(attempt)
        refused = [error for error in errors if error.startswith(REFUSED)]
        if refused:
            raise UserError(refused[0].removeprefix(REFUSED))
        if errors:
            return errors[0]
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return None


@contextlib.contextmanager
def ending_with_others(attempt: Path, nodes: int) -> Iterator[None]:
    """On node 0, while its ranks run: end them some seconds after another node has left an error.

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
    if nodes > 1:
        watcher.start()
    try:
        yield
    finally:
        over.set()
        if nodes > 1:
            watcher.join()


def wait_for_end(attempt: Path) -> bool:
    """Whether node 0 ends the attempt within a minute."""
    deadline = time.monotonic() + END_SECONDS
    while attempt.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def follow(start_ranks: Callable[[], None], attempt: Path, node: int, refusal: UserError | None = None) -> None:
    """The launcher of a node other than 0: run its ranks, and end soon after node 0 has, whatever happens.

    Exits with 1 (interrupted) or 2 (bad input) where node 0 has not said how the run ended.

    Args:
        refusal: why this node's ranks end as soon as they have met the others.

    Raises:
        UserError: the refusal, which node 0 has been told.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        start_ranks()
        return
    except ChildFailedError as failure:
        _, first = failure.get_first_failure()
        if refusal is not None:
            tell(attempt, node, f"{REFUSED}node {node}: {refusal}")
            wait_for_end(attempt)
            raise refusal from None
        if first.exitcode == EXIT_BAD_INPUT:
            raise SystemExit(EXIT_BAD_INPUT) from None
        if first.exitcode > 0 and first.exitcode != EXIT_LOST_PEER:
            tell(attempt, node, error_of(first))
        if wait_for_end(attempt):
            return
        what = "node 0 has not ended the run"
    except (SignalException, KeyboardInterrupt):
        what = "stopped"
    except (RendezvousError, DistError) as error:
        what = f"node 0 has gone, or never came: {error}"
    print(f"interrupted: node {node}: {what}", file=sys.stderr)
    raise SystemExit(EXIT_INTERRUPTED)
