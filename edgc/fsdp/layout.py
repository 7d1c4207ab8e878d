"""The ranks of a sharded model: which hold its parts, and which the same part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from edgc.errors import UserError
from edgc.fsdp.units import WHERE, Unit


class Layout(NamedTuple):
    """Groups of this rank.

    Attributes:
        shards: the ranks that hold the parts of one replica.
        replicas: those that hold the same part in each replica; None if there is one replica.
        native: whether torch was to average over replicas itself: ``fully_shard`` was given a 2-D mesh.
    """

    shards: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    native: bool

    @property
    def size(self) -> int:
        return self.shards.size() * (1 if self.replicas is None else self.replicas.size())

    @property
    def place(self) -> tuple[int, list[int]]:
        """Number of this rank's shard, and the ranks that are to hold the same one."""
        return self.shards.rank(), [] if self.replicas is None else dist.get_process_group_ranks(self.replicas)


def layout_of(units: Sequence[Unit], replicas: Any) -> Layout:
    """The groups of the mesh that all units are on.

    Args:
        replicas: the mesh, of one dimension, over whose ranks the sharded model is repeated, if ``fully_shard`` was
            given that of the shards alone.

    Raises:
        UserError: the units are on several meshes, or ``replicas`` does not fit.
    """
    layouts = {_layout(unit.mesh, replicas): None for unit in units}
    layout, *others = layouts
    if others:
        raise UserError("the model's modules are sharded over several meshes", where=WHERE, fix="use one for all")
    if layout.size != dist.get_world_size():
        what = f"the mesh has {layout.size} of {dist.get_world_size()} ranks: other parallelism has not been tried"
        fix = "shard over all ranks; for several replicas give fully_shard a 2-D mesh, or register replicas=mesh[...]"
        raise UserError(what, where=WHERE, fix=fix)
    return layout


def _layout(mesh: Any, replicas: Any) -> Layout:
    if not hasattr(mesh, "shard_process_group"):
        raise UserError("nothing is sharded over this mesh", where=WHERE, fix="use edgc.ddp")
    group = getattr(mesh, "replicate_process_group", None)
    native = group is not None
    if replicas is not None:
        if native:
            what = "replicas were given for a model on a 2-D mesh, which has them"
            raise UserError(what, where=WHERE, fix="leave replicas out")
        if getattr(replicas, "ndim", None) != 1:
            what = f"replicas is no mesh of one dimension but {replicas!r}"
            raise UserError(what, where=WHERE, fix="give mesh[name]")
        group = replicas.get_group()
    alone = group is None or group.size() == 1
    return Layout(mesh.shard_process_group, None if alone else group, native)


def refuse_waiting(units: Sequence[Unit], layout: Layout) -> None:
    """Refuse to begin or end where what ``set_requires_all_reduce(False)`` has kept back would be lost: on a mesh of
    shards alone torch knows no replicas, and types of small range it divides otherwise where it does know them.

    Raises:
        UserError: saying when to do it.
    """
    for unit in units:
        if unit.waits and not (layout.native and unit.dtype in (torch.float32, torch.bfloat16)):
            what = "what set_requires_all_reduce(False) has kept back would never be averaged"
            raise UserError(what, where="edgc.fsdp", fix="register and remove between two steps")
