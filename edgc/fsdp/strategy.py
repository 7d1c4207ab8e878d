"""Strategies (:mod:`edgc.strategies`) of replicas that are sharded by FSDP2 over ranks of their own.

Each rank runs the strategy for its own shards, with the ranks that hold the same ones. In steps in which the strategy
does not average gradients they stay those of the shard group, which is one replica.

A gradient that is not finite on one rank becomes NaN on all of its replica before the optimizer's step (one all-reduce
of one number), so that the step or round is void on all shards. A weight that overflows later than that, in the last
step of a round, makes it void on its own shard alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgc.config import EDGCConfig
from edgc.errors import UserError
from edgc.fsdp.layout import Layout, refuse_waiting
from edgc.fsdp.state import Place, Saved
from edgc.fsdp.units import WHERE, LocalShards, ShardsOnly, Unit
from edgc.runtime.device import own_modes
from edgc.strategies.base import StrategyConfig
from edgc.strategies.process import ProcessStrategy, refuse_loop


class StrategyHandle(ProcessStrategy):
    """Strategy of one rank of an FSDP2 job; made by :func:`edgc.fsdp.register`. A ``Stateful`` of torch's distributed
    checkpoints.

    Attributes:
        parameters: this rank's shards, by name.
    """

    parameters: LocalShards

    def __init__(
        self,
        units: Sequence[Unit],
        layout: Layout,
        config: EDGCConfig,
        settings: StrategyConfig,
        optimizer: torch.optim.Optimizer,
        iterations: int,
        embeddings: Collection[str],
    ) -> None:
        assert layout.replicas is not None
        shards = LocalShards(units)
        super().__init__(
            "edgc.fsdp", shards, config, settings, optimizer, iterations, layout.replicas, embeddings, shards.owners
        )
        self._units, self._layout = list(units), layout
        self._within, self._device = layout.within, units[0].device
        self._shards_only = ShardsOnly(units if layout.native else [])
        self._place = Place.of(layout)

    def start(self) -> None:
        """Begin: what is not started leaves the model as it is."""
        self._shards_only.begin()
        for unit in self._units:
            unit.set_all_reduce(partial(self._reduce, unit), None)
        self._hang()

    @own_modes()
    def _reduce(self, unit: Unit, flat: Tensor) -> None:
        """Average the result of a unit's reduce-scatter over replicas in steps in which the strategy says so."""
        if flat.is_cuda:
            flat.record_stream(torch.cuda.current_stream(flat.device))
        if not unit.accumulates(flat) and self.reduces:
            channel = self._open(self.group)
            channel.mean_(flat)
            channel.finish()
        if self._layout.native and unit.divides_by is not None:
            flat.mul_(self.group.size())

    def _stepped(self) -> Mapping[str, Tensor]:
        return self.parameters.owners

    def _gradients(self, stepped: Mapping[str, Any]) -> dict[str, Tensor]:
        return {name: p.grad.to_local() for name, p in stepped.items()}

    def state_dict(self) -> dict[str, Any]:
        """State that this rank needs, besides its part of model and optimizer, to go on exactly, under a key that no
        other rank has."""
        return self._place.packed(super().state_dict())

    def placeholders(self, replicas: int) -> dict[str, bytes]:
        """Keys of the states of this rank's part in a run of so many replicas, for ``dcp.load`` to read them into."""
        return self._place.placeholders(replicas)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Saved]) -> None:
        """Go on from :meth:`state_dict` of this rank, or from those of any replicas of another number of them: what is
        a replica's own is then left out. The model has its weights by then."""
        found = self._place.found(state)
        super().load_state_dict(found[0] if isinstance(found, list) else found)

    def remove(self) -> None:
        """End the strategy: torch averages from now on as it did. To be called on every rank, between two steps."""
        refuse_waiting(self._units, self._layout)
        self._let_go()
        while self._units:
            self._units.pop().set_all_reduce(None, None)
        self._shards_only.end()


def refuse(
    settings: StrategyConfig,
    units: Sequence[Unit],
    layout: Layout,
    optimizer: Any,
    scaler: object,
) -> None:
    """Refuse what a strategy cannot work with, in one line.

    Raises:
        UserError: naming the strategy and what to do.
    """
    refuse_loop(settings, optimizer, scaler, where=WHERE)
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [p for unit in units for p in unit.parameters.values()]
    for used, what, fix in (
        (layout.replicas is None, "needs replicas, and the model is sharded over all ranks", "give a 2-D mesh"),
        (
            settings.name == "dion",
            "makes orthonormal directions of whole matrices, and a rank has rows of them",
            "use edgc.ddp, or a strategy that works entry by entry",
        ),
        (
            any(p.device.type != unit.device.type for unit in units for p in unit.parameters.values() if not p.is_meta),
            "exchanges weights between devices, and these are offloaded to the CPU",
            "leave CPUOffloadPolicy out",
        ),
        (any(p.is_meta for p in trained), "starts from the weights, and there are none yet", "register after to_empty"),
        (
            any(id(p) not in stepped for p in trained),
            "needs the optimizer of all sharded parameters",
            "make it after fully_shard and to_empty, of model.parameters()",
        ),
    ):
        if used:
            raise UserError(f"strategy {settings.name} {what}", where=WHERE, fix=fix)
