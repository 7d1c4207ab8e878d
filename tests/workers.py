"""Run a function on several gloo ranks in forked processes: many cases per launch, no import cost."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _enter(
    rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
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
        mp.start_processes(_enter, (world, folder, function, arguments), nprocs=world, start_method="fork")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]
