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

from edgc.checks import need
from edgc.compressors.base import Steps
from edgc.config import EDGCConfig
from edgc.entropy.meter import embeddings
from edgc.errors import UserError
from edgc.runtime.channel import Channel, all_reduce_bytes
from edgc.runtime.device import own_modes
from edgc.runtime.groups import own_group
from edgc.strategies.base import Asked, Replica, StrategyConfig, finished


class StrategyHandle:
    """Strategy of one rank of a DDP job; made by :func:`edgc.ddp.register`.

    Attributes:
        strategy: to be read only.
        bytes: sent so far by this rank.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        slot: Any,
        config: EDGCConfig,
        settings: StrategyConfig,
        optimizer: torch.optim.Optimizer,
        iterations: int,
    ) -> None:
        self.group = own_group(model.process_group)
        self.bytes = 0
        parameters = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        self.parameters: Mapping[str, Tensor] = parameters
        tables = embeddings(model.module)
        looked_up = {name for name, p in parameters.items() if p in tables}
        replica = Replica(parameters, config, iterations, optimizer, self.group, self._open, looked_up)
        try:
            self.strategy = settings.build(replica)
        except BaseException:
            dist.destroy_process_group(self.group)
            raise
        self._settings = {"strategy": settings.to_dict(), "compression": config.to_dict()}
        self._slot = slot
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]

    def _open(self, *options: Any) -> Channel:
        return _Counted(self, *options)

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket of DDP's in steps in which the strategy says so."""
        if self.strategy.reduces(self.strategy.step + 1):
            self.bytes += all_reduce_bytes(bucket.buffer().nbytes, dist.get_world_size(self.group))
            return allreduce_hook(self._slot.group, bucket)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def _before_step(self) -> None:
        gradients = {}
        for name, p in self.parameters.items():
            p.grad = gradients[name] = torch.zeros_like(p) if p.grad is None else p.grad
        if not self._run(self.strategy.before_step(gradients)):
            for p in self.parameters.values():
                p.grad = None  # which an optimizer leaves out

    def _after_step(self) -> None:
        self._run(self.strategy.after_step())

    @own_modes()
    def _run(self, steps: Asked | Steps) -> bool | None:
        return finished(steps)

    def mean_weights(self) -> dict[str, Tensor]:
        """Means of the replicas' parameters by name, which are evaluated where replicas are never equal. To be called
        on every rank; not counted."""
        means = {name: p.detach().clone() for name, p in self.parameters.items()}
        channel = Channel(self.group)
        for mean in means.values():
            channel.mean_(mean)
        channel.finish()
        return means

    def state_dict(self) -> dict[str, Any]:
        """State that this rank needs, besides model and optimizer, to go on exactly: save one per rank.

        ``shared`` is the same on every rank.
        """
        shared, own = self.strategy.shared_state(), self.strategy.own_state()
        return {"settings": self._settings, "world": dist.get_world_size(self.group), "shared": shared, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict` of this rank, or of any where the number of ranks has changed: what is a rank's
        own is then left out. The model has its weights by then."""
        need(state, ("settings", "world", "shared", "own"), "state")
        if state["settings"] != self._settings:
            raise UserError("the saved state is of other settings", where="edgc.ddp", fix="register with the same")
        same = state["world"] == dist.get_world_size(self.group)
        self.strategy.load_state(state["shared"], state["own"] if same else None)

    def remove(self) -> None:
        """End the strategy: from now on DDP averages the gradients of every step. To be called on every rank."""
        while self._hooks:
            self._hooks.pop().remove()
        if self._slot.handle is self:
            self._slot.handle = None
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(self.group)


class _Counted(Channel):
    """Channel whose bytes its handle counts as they are sent: an exchange may go on from one step to the next."""

    def __init__(self, handle: StrategyHandle, *options: Any) -> None:
        super().__init__(*options)
        self.handle = handle

    def _count(self, kind: str, sent: int) -> None:
        super()._count(kind, sent)
        self.handle.bytes += sent
