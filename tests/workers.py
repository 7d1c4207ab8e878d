"""Run a function on several gloo ranks: many cases per launch, imports paid once.

Workers are forked from a server that has imported what tests need and runs no threads; a fork of pytest itself would
copy the locks of whatever threads earlier tests have left.
"""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from edgc.errors import UserError

multiprocessing.set_forkserver_preload(
    ["tests.integration.ddp_cases", "tests.integration.megatron_cases", "tests.unit.test_powersgd"]
)


def _enter(rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # what the server imported is no garbage: a collection would walk through it, 0.4 s each time
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        torch.save(function(*arguments), f"{folder}/{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_workers(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``function(*arguments)`` on every rank of a gloo group of ``world``; the results in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_enter, (world, folder, function, arguments), nprocs=world, start_method="forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


def said(call: Callable[[], Any]) -> str:
    """What a mistake of the user's is answered with."""
    try:
        call()
    except UserError as error:
        return str(error)
    return "nothing"
