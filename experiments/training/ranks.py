"""The ranks of a run on one node: how many there are, how they are started, and how each begins and ends.

They are started by torchrun's elastic agent through its programming interface. On one CPU machine they are forked from
a server that has imported Megatron once; with CUDA, or over several nodes, they are spawned.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from multiprocessing import forkserver, util
from pathlib import Path

from edgc.errors import UserError
from experiments.cluster.nodes import EXIT_LOST_PEER
from experiments.common import interrupts
from experiments.common.cli import EXIT_BAD_INPUT
from experiments.common.files import FULL, atomic_write
from experiments.common.processes import children_die_with_this, die_with_parent
from experiments.spec.matrix import study_path
from experiments.spec.settings import RunConfig
from experiments.training.run_folder import hold_as_rank

# What gloo and NCCL say in a rank whose peer was killed or has crashed.
LOST_PEER = re.compile(r"connection (reset|closed|refused)|broken pipe|remote process exited", re.IGNORECASE)
LOST_PEER_SECONDS = 3.0
AGENT = "torch.distributed.elastic.multiprocessing.api"  # logger
MEETING = 300  # seconds until the launchers of all nodes must have met


def check_devices(run: RunConfig, nodes: int) -> int:
    """Processes per node; ``UserError`` if the world does not divide over the nodes or outnumbers the GPUs."""
    import torch

    world = run.parallel.world
    if world % nodes:
        fix = "change parallel.data or the number of nodes"
        raise UserError(f"world size {world} is not divisible by {nodes} nodes", where=study_path(run.study), fix=fix)
    gpus = torch.cuda.device_count()
    if gpus and world // nodes > gpus:
        raise UserError(
            f"the run needs {world // nodes} GPUs on a node that has {gpus}",
            where=study_path(run.study),
            fix="reduce parallel.data or use more nodes",
        )
    return world // nodes


def _rank_main(run: RunConfig, data: tuple[Path, int] | None, attempt: Path, only_warm_up: bool) -> None:
    """Entry point of one rank."""
    if data is None:
        os._exit(EXIT_BAD_INPUT)
    die_with_parent(signal.SIGKILL)()
    children_die_with_this()
    interrupts.ignore()  # the launcher ends its ranks
    threading.excepthook = _not_of_a_full_disk
    hold_as_rank(attempt)
    from experiments.training.fork_server import work

    try:
        summary = work(run, *data, attempt, only_warm_up=only_warm_up)
    except UserError as error:
        if os.environ.get("RANK") == "0":
            # What only the built model tells, such as its largest rank, is raised by the library, which knows no file.
            file = study_path(run.study)
            if error.where is None and file.is_file():
                error = UserError(error.message, where=file, fix=error.fix)
            print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(EXIT_BAD_INPUT)
    except RuntimeError as error:
        if not LOST_PEER.search(str(error)):
            raise
        # Not the cause: a peer has gone. The agent ends this process as soon as it sees how that one ended.
        time.sleep(LOST_PEER_SECONDS)
        os._exit(EXIT_LOST_PEER)
    if summary is not None:
        atomic_write(attempt / "summary.json", json.dumps(summary))


def _not_of_a_full_disk(failure: threading.ExceptHookArgs) -> None:
    """Say nothing of a thread that found no space, such as TensorBoard's: the rank itself ends with the same error."""
    if not FULL.search(str(failure.exc_value)):
        threading.__excepthook__(failure)


def _not_said_twice(record: logging.LogRecord) -> bool:
    """Not the agent's traceback of how a rank ended: the rank has said why, and the launcher says what follows."""
    return not str(record.msg).startswith("failed (exitcode")


def _forks(nodes: int) -> bool:
    import torch

    return nodes == 1 and not torch.cuda.is_available()


def warm_up(nodes: int) -> None:
    """Have the fork server import Megatron while this process still checks its input and starts the agent.

    Not a plain fork: the agent runs threads, and a lock that one of them holds stays locked in a forked child.
    """
    if nodes == 1:
        multiprocessing.set_forkserver_preload(["experiments.training.fork_server"])
        with interrupts.held_back():  # the server begins with it held back too, and leaves it to this process
            forkserver.ensure_running()


def start_ranks(
    run: RunConfig,
    attempt: Path,
    data: tuple[Path, int] | None,
    *,
    nodes: int,
    node: int,
    rendezvous: str,
    address: str | None,
    only_warm_up: bool = False,
) -> None:
    """Run all ranks of this node to their end; raises what the elastic agent raises.

    Args:
        data: folder of the prepared data and size of the vocabulary; without them the ranks end at once, so that those
            of the other nodes do not wait for them.
        nodes, node: how many machines take part and which one this is.
        rendezvous: ``host:port`` of node 0 when there are several.
        address: name or address under which the other nodes reach this one; by default its host name.
        only_warm_up: the run ends when its warm-up does.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    per_node = check_devices(run, nodes)
    logging.getLogger(AGENT).addFilter(_not_said_twice)
    # That it ends the ranks which wait for one that has failed: why it failed is said.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=per_node,
        run_id=f"{run.study}-{run.name}-{os.getpid() if nodes == 1 else 0}",
        rdzv_backend="c10d",
        rdzv_endpoint=rendezvous,
        local_addr=address,
        # Said, not guessed: two of the nodes may be one machine. The times bound how long one waits for the others.
        rdzv_configs=dict(is_host=node == 0, timeout=MEETING, read_timeout=MEETING) if nodes > 1 else {},
        max_restarts=0,
        start_method="forkserver" if _forks(nodes) else "spawn",
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=util.get_temp_dir()),
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",  # Ctrl-C ends ranks faster: experiments.common.interrupts
    )
    elastic_launch(config, _rank_main)(run, data, attempt, only_warm_up)
