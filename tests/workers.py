"""Run a function on several gloo ranks: many cases per launch, imports paid once.

Workers are forked from a server that has imported what tests need and runs no threads; a fork of pytest itself would
copy the locks of whatever threads earlier tests have left.
"""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from edgc.errors import UserError

multiprocessing.set_forkserver_preload(
    ["tests.integration.ddp_cases", "tests.integration.megatron_cases", "tests.contract_ranks"]
)


def _enter(rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # what the server imported is no garbage: a collection would walk through it, 0.4 s each time
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        torch.save(function(*arguments), f"{folder}/{rank}.pt")
        dist.barrier()
    except Exception:
        Path(f"{folder}/{rank}.error").write_text(traceback.format_exc(), encoding="utf-8")
        raise
    finally:
        dist.destroy_process_group()


def run_workers(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``function(*arguments)`` on every rank of a gloo group of ``world``; the results in rank order.

    Raises:
        AssertionError: with what every rank that failed said, the first one first: the others' errors often only say
            that it is gone.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(_enter, (world, folder, function, arguments), nprocs=world, start_method="forkserver")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            said = sorted(Path(folder).glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
            if not said:
                raise
            told = "\n".join(f"-- rank {path.stem}:\n{path.read_text(encoding='utf-8')}" for path in said)
            raise AssertionError(told) from error
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


def said(call: Callable[[], Any]) -> str:
    """What a mistake of the user's is answered with."""
    try:
        call()
    except UserError as error:
        return str(error)
    return "nothing"
