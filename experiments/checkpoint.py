"""Model checkpoints in Megatron's distributed format."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
import yaml
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel

from experiments.run_folder import atomic_write
from experiments.settings import RunConfig


def save_model(chunks: Sequence[DistributedDataParallel], run: RunConfig, folder: Path) -> None:
    """Write the weights of all ranks to ``folder`` and the run's settings beside them, those last.

    ``run.yaml`` marks the checkpoint as whole. Called by every rank.
    """
    if len(chunks) == 1:
        state = {"model": chunks[0].module.sharded_state_dict()}
    else:
        state = {f"model{index}": chunk.module.sharded_state_dict() for index, chunk in enumerate(chunks)}
    _keep_results_in_process()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        atomic_write(folder / "run.yaml", yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False))


def _keep_results_in_process() -> None:
    """Give Megatron's writers a plain queue for their results.

    Megatron takes one that a process of its own serves, for saving in the background; starting it imports everything
    anew, seconds for each checkpoint. A save that is waited for runs in this process.
    """
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
