"""What the handles of DDP, FSDP2 and Megatron-Core tell of their engine."""

from __future__ import annotations

from typing import Any

import torch

from edgc.control.controller import Decision
from edgc.engine import Iteration


class EngineHandle:
    """EDGC on one rank of a job; base of :class:`edgc.ddp.Handle`, :class:`edgc.fsdp.Handle` and
    :class:`edgc.megatron.Attachment`.

    Attributes:
        engine: reduces the gradients; not to be called from outside.
    """

    engine: Any

    def _settle(self) -> None:
        """Close an iteration that has ended, if that was put off."""

    def _refuse_inside_iteration(self) -> None:
        """Refuse a call while gradients are under way; else :meth:`_settle`."""

    @property
    def last(self) -> Iteration | None:
        """The last iteration: bytes, rank, entropy, times and errors of this rank; None before the first."""
        self._settle()
        return self.engine.last

    @property
    def decision(self) -> Decision | None:
        """The controller's decision at the end of the last iteration; None if it took none."""
        self._settle()
        return self.engine.decision

    def add_loss(self, loss: float | torch.Tensor) -> None:
        """Tell policy ``loss`` the training loss, without a loss scale, after every iteration, on at least one rank.

        Raises:
            UserError: inside an iteration, where the driver can tell; or it is no number.
        """
        self._refuse_inside_iteration()
        self.engine.add_loss(loss)
