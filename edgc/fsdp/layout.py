"""The ranks of a sharded model: which hold its parts, and which the same part."""

from __future__ import annotations

import math
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
        tensor: the ranks that hold the parts of a tensor-parallel model; None without.
    """

    shards: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    native: bool
    tensor: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return math.prod(group.size() for group in (self.shards, self.replicas, self.tensor) if group is not None)

    @property
    def part(self) -> str:
        """Part of the model that this rank averages: its shard, or all of it where that is sharded over all ranks."""
        tensor = "" if self.tensor is None else f"tensor{self.tensor.rank()}of{self.tensor.size()}."
        return f"{tensor}whole" if self.replicas is None else f"{tensor}shard{self.shards.rank()}of{self.shards.size()}"

    @property
    def place(self) -> tuple[str, list[int]]:
        """This rank's part, and the ranks that are to hold the same one."""
        return self.part, [] if self.replicas is None else dist.get_process_group_ranks(self.replicas)

    @property
    def within(self) -> list[dist.ProcessGroup]:
        """Those of ranks that are one replica together: what is reduced over one after the other is over all of it."""
        return [group for group in (self.shards, self.tensor) if group is not None and group.size() > 1]


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
    cut = {mesh: None for unit in units for mesh in unit.tensor_meshes}
    if len(cut) > 1 or any(mesh.ndim != 1 for mesh in cut):
        what = "parameters were DTensors on several meshes, or on one of several dimensions, before fully_shard"
        raise UserError(what, where=WHERE, fix="parallelize_module over one 1-D mesh beside that of fully_shard")
    layout = layout._replace(tensor=next((mesh.get_group() for mesh in cut), None))
    if layout.size != dist.get_world_size():
        # torch's pipeline schedules reduce when autograd is done; _ended would never be called.
        what = f"the mesh has {layout.size} of {dist.get_world_size()} ranks, and all decide together, inside backward"
        fix = "shard over all ranks; for several replicas give fully_shard a 2-D mesh, or register replicas=mesh[...]"
        raise UserError(f"{what}: no pipeline stages, and nobody beside", where=WHERE, fix=fix)
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
