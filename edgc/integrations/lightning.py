"""Lightning: ``Trainer(strategy="ddp", callbacks=[CompressionCallback(EDGCConfig(...))])``, or FSDP2's strategy."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils._pytree import tree_map_only

from edgc.config import EDGCConfig
from edgc.errors import UserError
from edgc.integrations.common import LOST, Handle, metrics, register, sharded
from edgc.lazy import torch

KEY = "edgc"


class CompressionCallback(Callback):
    """Compresses the gradients of a fit, logs what it did to the trainer's loggers every ``log_every_n_steps``, and
    keeps the states of all ranks in Lightning's checkpoint.

    ``DDPStrategy(ddp_comm_hook=...)`` is ignored on a CPU; this is not. On a GPU the two exclude each other. Under
    FSDP2, where Lightning would average in every backward, gradients are averaged once a step.

    Attributes:
        handle: of the last fit; None before the first.

    Args:
        iterations: length of a fit in steps of the optimizer; by default what Lightning estimates.
    """

    def __init__(self, config: EDGCConfig, *, iterations: int | None = None) -> None:
        self.config, self.iterations = config, iterations
        self.handle: Handle | None = None
        self._saved: Any = None
        self._last: Any = None  # state of this rank at the end of the last fit
        self._sharded: Any = None  # the root of what FSDP2 shards

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        steps = trainer.estimated_stepping_batches if self.iterations is None else self.iterations
        if not 0 < steps < math.inf:
            raise UserError("Lightning does not know how many steps this fit takes", fix="give iterations=...")
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # of 16-mixed
        model = trainer.strategy.model
        self.handle = register(model, self.config, iterations=int(steps), scaler=scaler)
        self._sharded = sharded(model)
        saved, self._saved, self._last = self._saved, None, None
        if saved is not None:
            self.handle.load_state_dict(saved)
        elif trainer.global_step > 0 and trainer.is_global_zero:
            warnings.warn(f"edgc: no state in the checkpoint: {LOST}", stacklevel=2)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._sharded is not None:
            last = (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch
            self._sharded.set_requires_gradient_sync(last)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        every = trainer.log_every_n_steps
        if self.handle is not None and every and (trainer.global_step + 1) % every == 0:
            for logger in trainer.loggers:
                logger.log_metrics(metrics(self.handle), step=trainer.global_step)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        state = self._state() or self._last
        # After a fit the processes may have parted, or this be another trainer, of one of them.
        if state is None or not dist.is_initialized() or dist.get_world_size() != trainer.world_size:
            return
        # Only the first rank writes; the others need not hold the states of all.
        states: list[Any] | None = [None] * trainer.world_size if trainer.is_global_zero else None
        dist.gather_object(state, states)
        checkpoint[KEY] = states

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._last = None  # the weights are others now
        if trainer.state.fn == "fit":
            self._saved = checkpoint.get(KEY)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Later than on_train_end, in which Lightning may save a last checkpoint.
        if self.handle is not None:
            self._last = self._state()
            self.handle.remove()

    def _state(self) -> Any:
        """State of this rank on the host; None outside a fit."""
        if self.handle is None or not self.handle.active:
            return None
        return tree_map_only(torch.Tensor, torch.Tensor.cpu, self.handle.state_dict())
