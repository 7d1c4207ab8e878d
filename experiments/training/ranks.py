"""Ranks of a run: how they are started, how each begins and ends, on one node or several.

They are started by torchrun's elastic agent through its programming interface. On one CPU machine they are forked from
a server that has imported Megatron once; with CUDA, or over several nodes, they are spawned.

Over several nodes there is one launcher on each, of which that of node 0 owns the run folder. When ranks of another
node fail, that node's launcher leaves the reason beside the run folder (the file system is shared) and waits until
node 0 has published or thrown away the attempt. So a run ends in the same way wherever the first error was.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

from edgc.errors import UserError
from experiments.common import interrupts
from experiments.common.cli import EXIT_BAD_INPUT
from experiments.common.files import atomic_write
from experiments.common.processes import children_die_with_this, die_with_parent
from experiments.spec.matrix import study_path
from experiments.spec.settings import RunConfig
from experiments.training.outputs import hold_as_rank

EXIT_INTERRUPTED = 1
EXIT_LOST_PEER = 75
END_SECONDS = 60.0  # from the end of a node's ranks until node 0 must have ended the attempt
GRACE_SECONDS = 10.0  # in which ranks should have noticed by themselves that a peer has gone
REFUSED = "refused: "  # the beginning of an error that is one of the user's
TELL_SECONDS = 10.0  # a shared file system may show a new file late, and a busy node leaves its error late
# Errors of gloo and NCCL in a rank whose peer was killed or has crashed.
LOST_PEER = re.compile(r"connection (reset|closed|refused)|broken pipe|remote process exited", re.IGNORECASE)
LOST_PEER_SECONDS = 3.0
MEETING_SECONDS = 300  # until the launchers of all nodes must have met


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
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(1.0):
            if error_files(attempt):
                if not ended.wait(GRACE_SECONDS):
                    for rank in multiprocessing.active_children():
                        rank.kill()
                return

    if nodes.count > 1:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


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


def ranks_per_node(run: RunConfig, nodes: Nodes) -> int:
    """Ranks on each node; ``UserError`` if they do not divide over the nodes or outnumber the GPUs."""
    import torch

    world, where = run.processes, study_path(run.study)
    if world % nodes.count:
        message = f"world size {world} is not divisible by {nodes.count} nodes"
        raise UserError(message, where=where, fix="change parallel.data or the number of nodes")
    count, gpus = world // nodes.count, torch.cuda.device_count()
    if gpus and count > gpus:
        message = f"the run needs {count} GPUs on a node that has {gpus}"
        raise UserError(message, where=where, fix="reduce parallel.data or use more nodes")
    return count


def in_study(error: UserError, run: RunConfig) -> UserError:
    """The error with the study's file where it names none: what only the built model tells, such as its largest rank,
    is raised by the library, which knows no file."""
    file = study_path(run.study)
    return UserError(error.message, where=file, fix=error.fix) if error.where is None and file.is_file() else error


def _rank_main(run: RunConfig, data: tuple[Path, int] | None, attempt: Path) -> None:
    if data is None:
        os._exit(EXIT_BAD_INPUT)
    die_with_parent(signal.SIGKILL)()
    children_die_with_this()
    interrupts.ignore()  # the launcher ends its ranks
    hold_as_rank(attempt)
    from experiments.training.fork_server import work

    try:
        summary = work(run, *data, attempt)
    except UserError as error:
        if os.environ.get("RANK") == "0":
            print(f"error: {in_study(error, run)}", file=sys.stderr, flush=True)
        os._exit(EXIT_BAD_INPUT)
    except RuntimeError as error:
        if not LOST_PEER.search(str(error)):
            raise
        # Not the cause: a peer has gone. The agent ends this process as soon as it sees how that one ended.
        time.sleep(LOST_PEER_SECONDS)
        os._exit(EXIT_LOST_PEER)
    if summary is not None:
        atomic_write(attempt / "summary.json", json.dumps(summary))


def warm_up(nodes: Nodes) -> None:
    """Have the fork server import Megatron while this process still checks its input and starts the agent.

    Not a plain fork: the agent runs threads, and a lock that one of them holds stays locked in a forked child.
    """
    if nodes.count == 1:
        multiprocessing.set_forkserver_preload(["experiments.training.fork_server"])
        # The server begins with interrupts held back, too, and leaves them to this process.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start_ranks(run: RunConfig, attempt: Path, nodes: Nodes, data: tuple[Path, int] | None) -> None:
    """Run all ranks of this node to their end; raises what the elastic agent raises.

    Args:
        data: folder of the prepared data and size of the vocabulary; without them the ranks end at once, so that those
            of the other nodes do not wait for them.
    """
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The rank has said how it failed, and the launcher says what follows: neither the agent's traceback of it, nor that
    # the ranks which wait for it are ended.
    agent = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    agent.addFilter(lambda record: not str(record.msg).startswith("failed (exitcode"))
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    several = nodes.count > 1
    limits = dict(timeout=MEETING_SECONDS, read_timeout=MEETING_SECONDS)
    config = LaunchConfig(
        min_nodes=nodes.count,
        max_nodes=nodes.count,
        nproc_per_node=ranks_per_node(run, nodes),
        run_id=f"{run.study}-{run.name}-{0 if several else os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint=nodes.rendezvous,
        local_addr=nodes.address,
        # Not left to a guess who is host: two of the nodes may be one machine.
        rdzv_configs=dict(is_host=nodes.index == 0, **limits) if several else {},
        max_restarts=0,
        start_method="spawn" if several or torch.cuda.is_available() else "forkserver",
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=util.get_temp_dir()),
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",  # Ctrl-C ends ranks faster: experiments.common.interrupts
    )
    elastic_launch(config, _rank_main)(run, data, attempt)
