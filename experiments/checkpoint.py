"""Model checkpoints in Megatron's distributed format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
import yaml
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel

from edgc.megatron.cpu_shims import fork_checkpoint_queue
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
    fork_checkpoint_queue()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        atomic_write(folder / "run.yaml", yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False))
