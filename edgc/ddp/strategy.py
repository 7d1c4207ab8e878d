"""Strategies (:mod:`edgc.strategies`) of replicas that are processes, each with a model under DDP.

DDP's hook hands gradients on as they are in steps in which the strategy does not average them, so that nobody needs
``no_sync``. What the strategy does before and after a step of the optimizer hangs on the optimizer's own hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from edgc.config import EDGCConfig
from edgc.entropy.meter import embeddings
from edgc.runtime.channel import all_reduce_bytes
from edgc.runtime.groups import own_group
from edgc.strategies.base import StrategyConfig
from edgc.strategies.process import ProcessStrategy


class StrategyHandle(ProcessStrategy):
    """Strategy of one rank of a DDP job; made by :func:`edgc.ddp.register`."""

    def __init__(
        self,
        model: DistributedDataParallel,
        parameters: Mapping[str, Tensor],
        slot: Any,
        config: EDGCConfig,
        settings: StrategyConfig,
        optimizer: torch.optim.Optimizer,
        iterations: int,
    ) -> None:
        tables = embeddings(model.module)
        looked_up = {name for name, p in parameters.items() if p in tables}
        group = own_group(model.process_group)
        try:
            super().__init__("edgc.ddp", parameters, config, settings, optimizer, iterations, group, looked_up)
            self._hang()
        except BaseException:
            dist.destroy_process_group(group)
            raise
        self._slot = slot

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket of DDP's in steps in which the strategy says so."""
        if self.reduces:
            self.bytes += all_reduce_bytes(bucket.buffer().nbytes, self.group.size())
            return allreduce_hook(self._slot.group, bucket)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def remove(self) -> None:
        """End the strategy: from now on DDP averages the gradients of every step. To be called on every rank.

        After local updates replicas stay equal only where their optimizers' states are made equal, too.
        """
        self._let_go()
        if self._slot.handle is self:
            self._slot.handle = None
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(self.group)
