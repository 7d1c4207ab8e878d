"""torch's FSDP2 as this package needs it: its units, their parameters and meshes.

A *unit* is what one call of ``fully_shard`` made: parameters that are gathered and reduced together. After backward
torch lays the unit's gradients end to end in one flat buffer, each cut along its first axis into equal parts, one for
every rank of the shard group, the last ones padded with zeros; it reduce-scatters that, and what a hook leaves in the
result becomes the gradients of the shards.

This is the only file here that knows names which torch keeps for itself (read in 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from edgc.compressors.base import matrix_shape
from edgc.errors import UserError

WHERE = "edgc.fsdp.register"
# Names of torch's own, asked for when a model is registered and not first in the middle of a backward.
_OF_A_GROUP = attrgetter("fsdp_params", "mesh_info", "mp_policy", "device", "all_reduce_grads",
                         "gradient_divide_factor", "_all_reduce_hook", "_all_reduce_hook_stream",
                         "_reduce_scatter_comm", "_partial_reduce_output")  # fmt: skip
_OF_A_PARAMETER = attrgetter("sharded_param", "sharded_size", "padded_sharded_param_size", "_orig_size",
                             "fsdp_placement", "_unsharded_dtensor_spec")  # fmt: skip


class Part(NamedTuple):
    """A parameter's place in its unit's flat buffer.

    Attributes:
        name: the parameter's.
        shape: of this rank's shard, as a matrix.
        padded: of the largest shard, which all ranks have room for.
        whole: of the parameter, likewise.
        offset: of the shard's first entry.
    """

    name: str
    shape: tuple[int, ...]
    padded: tuple[int, ...]
    whole: tuple[int, ...]
    offset: int

    @property
    def entries(self) -> int:
        """Of the largest shard."""
        return math.prod(self.padded)

    @property
    def place(self) -> slice:
        """In the buffer of a shard."""
        return slice(self.offset, self.offset + self.entries)


class Unit:
    """Parameters that FSDP2 communicates together.

    Args:
        module: one of those that were given to ``fully_shard``.
        group: torch's object behind it.
        names: of the model's parameters.
    """

    def __init__(self, module: FSDPModule, group: Any, names: dict[Tensor, str]) -> None:
        self.module, self._group = module, group
        self._names = [names[each.sharded_param] for each in group.fsdp_params]
        self._partial: Tensor | None = None  # until backward has ended,
        self._task = -1  # this one
        self._own: Any = None  # torch's reduce-scatter, while another has its place

    @property
    def name(self) -> str:
        """Of its first parameter, for messages."""
        return self._names[0]

    @property
    def parts(self) -> list[Part]:
        """Places of what is trained now, in the order of the buffer."""
        return self._places(frozen=False)

    @property
    def all_parts(self) -> list[Part]:
        """:attr:`parts`, if all were trained: something may be kept of those that are frozen since."""
        return self._places(frozen=True)

    def _places(self, *, frozen: bool) -> list[Part]:
        parts, offset = [], 0
        for each, name in zip(self._group.fsdp_params, self._names, strict=True):
            if frozen or each.sharded_param.requires_grad:
                padded = each.padded_sharded_param_size
                sizes = matrix_shape(each.sharded_size), matrix_shape(padded), matrix_shape(each._orig_size)
                parts.append(Part(name, *sizes, offset))
                offset += padded.numel()
        return parts

    @property
    def parameters(self) -> dict[str, Any]:
        """The trained sharded parameters, by name."""
        pairs = zip(self._names, self._group.fsdp_params, strict=True)
        return {name: each.sharded_param for name, each in pairs if each.sharded_param.requires_grad}

    def accumulates(self, flat: Tensor) -> bool:
        """True under ``set_requires_all_reduce(False)``: what the shard group has reduced, ``flat``, is kept, and zeros
        are left in its place; once averaging is asked for it is added to that ``flat``.

        Between backwards it lies where torch's own lies: whoever averages next has it, and ``reset_iter_state`` drops
        it. After each reduction torch puts None there.
        """
        task = torch._C._current_graph_task_id()
        current = self._partial is not None and self._task == task  # not of a backward that failed
        kept = self._partial if current else self._group._partial_reduce_output
        if kept is not None:
            flat.add_(kept)
            if kept.is_cuda:
                kept.record_stream(torch.cuda.current_stream(flat.device))
        self._partial = None
        if self._group.all_reduce_grads:
            return False
        self._partial, self._task = flat.clone(), task
        torch.autograd.Variable._execution_engine.queue_callback(self._keep)
        flat.zero_()
        return True

    def _keep(self) -> None:
        if self._partial is not None:
            self._group._partial_reduce_output, self._partial = self._partial, None

    @property
    def waits(self) -> bool:
        """True if something that the shard group has reduced is still to be averaged."""
        return self._group._partial_reduce_output is not None

    @property
    def by_rows(self) -> bool:
        """True if all parameters are cut along their first axis."""
        return all(each.fsdp_placement.dim == 0 for each in self._group.fsdp_params)

    @property
    def divides_by(self) -> float | None:
        """Factor of ``set_gradient_divide_factor``; None where gradients are averaged."""
        factor: float | None = self._group.gradient_divide_factor
        return factor

    @property
    def dtype(self) -> torch.dtype:
        """Type in which gradients are reduced."""
        policy, parameters = self._group.mp_policy, [each.sharded_param for each in self._group.fsdp_params]
        trained = next((p for p in parameters if p.requires_grad), parameters[0])  # frozen ones may be of another type
        dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or trained.dtype
        return dtype

    @property
    def mesh(self) -> Any:
        """torch's description of the mesh."""
        return self._group.mesh_info

    @property
    def tensor_meshes(self) -> list[Any]:
        """Meshes of parameters that were DTensors before ``fully_shard``."""
        specs = [each._unsharded_dtensor_spec for each in self._group.fsdp_params]
        return [spec.mesh for spec in specs if spec is not None]

    @property
    def device(self) -> torch.device:
        device: torch.device = self._group.device
        return device

    def check(self, flat: Tensor, shards: int = 1) -> list[Part]:
        """:attr:`parts`, if ``flat`` holds them all, of ``shards`` ranks.

        Raises:
            UserError: it does not, since backward has not come by some of them.
        """
        parts = self.parts
        if sum(part.entries for part in parts) * shards != flat.numel():
            what = f"some parameters beside {self.name} got no gradient in this backward"
            fix = "call model.set_reduce_scatter_unused_params(True), or freeze what is not used"
            raise UserError(what, where="edgc.fsdp", fix=fix)
        return parts

    def set_all_reduce(self, hook: Any, stream: Any) -> None:
        """Let ``hook`` (None: nobody) have the result of every reduce-scatter, on ``stream`` of a GPU."""
        self._group._all_reduce_hook_stream = None  # torch would not forget it
        self.module.set_all_reduce_hook(hook, stream=stream)

    def set_reduce_scatter(self, scatter: Any) -> None:
        """Let ``scatter`` (None: torch) do the reduce-scatter."""
        if scatter is not None:
            self._own = self._group._reduce_scatter_comm
        self.module.set_custom_reduce_scatter(scatter or self._own)

    @property
    def hooked(self) -> bool:
        """True if somebody has set a hook of his own."""
        torchs = type(self._group._reduce_scatter_comm).__module__.startswith("torch.")
        return self._group._all_reduce_hook is not None or not torchs


def units_of(model: nn.Module) -> list[Unit]:
    """The units of ``model``, also those that are frozen: they may be thawed.

    Raises:
        UserError: for what cannot be reduced here.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    each = model.modules() if isinstance(model, nn.Module) else ()
    modules = [module for module in each if isinstance(module, FSDPModule)]
    if model not in modules:
        what = f"edgc.fsdp.register was given a {type(model).__name__} that is not sharded"
        raise UserError(what, fix="call fully_shard on its layers and then on the model first")
    if getattr(model._get_fsdp_state(), "_is_root", None) is False:  # torch knows after the first forward
        what = f"{type(model).__name__} is a part of a model that is sharded"
        raise UserError(what, where=WHERE, fix="register the root of it, so that no part is left out")
    for module in modules:
        module.reshard()  # so that names are found by sharded parameters
        for group in _groups(module):
            for each in group.fsdp_params:
                each.reset_sharded_param()  # of a model that was given others with its weights; torch does so later
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    units, seen = [], set[int]()
    for module in modules:
        groups = _groups(module)
        if len(groups) > 1:
            what = f"{type(module).__name__} has parameters on several meshes (shard_placement_fn)"
            raise UserError(what, where=WHERE, fix="call fully_shard on the modules of each mesh")
        for group in groups:
            if id(group) not in seen:
                units.append(Unit(module, group, names))
            seen.add(id(group))
    for unit in units:
        _refuse(unit)
    if not any(unit.parts for unit in units):
        raise UserError("the model has nothing to train", where=WHERE, fix="unfreeze it, or do not register it")
    return units


def _groups(module: Any) -> list[Any]:
    try:
        groups = list(module._get_fsdp_state()._fsdp_param_groups)
        for group in groups:
            _OF_A_GROUP(group)
            for each in group.fsdp_params:
                _OF_A_PARAMETER(each)
        return groups
    except AttributeError:
        what = f"edgc.fsdp does not know the FSDP2 of torch {torch.__version__}"
        raise UserError(what, where=WHERE, fix="use torch 2.13") from None


def _refuse(unit: Unit) -> None:
    if unit.hooked:
        what = f"the unit of {unit.name} already has a hook or a reduce-scatter of its own"
        raise UserError(what, where=WHERE, fix="register once, before setting others, or call handle.remove() first")
    for each, name in zip(unit._group.fsdp_params, unit._names, strict=True):
        if each.sharded_param.requires_grad and not each.sharded_param.is_floating_point():
            what = f"parameter {name} has type {each.sharded_param.dtype}"
            raise UserError(what, where=WHERE, fix="use real floating-point types")


class LocalShards(Mapping[str, Tensor]):
    """This rank's shards of the trained parameters by name, but for empty ones; torch may put others in their place."""

    def __init__(self, units: Sequence[Unit]) -> None:
        pairs = [pair for unit in units for pair in zip(unit._names, unit._group.fsdp_params, strict=True)]
        self._of = {n: each for n, each in pairs if each.sharded_param.requires_grad and math.prod(each.sharded_size)}

    @property
    def owners(self) -> dict[str, Any]:
        """The parameters of the model that they are the shards of."""
        return {name: each.sharded_param for name, each in self._of.items()}

    def __getitem__(self, name: str) -> Tensor:
        shard: Tensor = self._of[name].sharded_param._local_tensor
        return shard

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)


class ShardsOnly:
    """Takes the all-reduce over replicas from torch where ``fully_shard`` was given a 2-D mesh.

    torch does it for meshes of class ``HSDPMeshInfo``, so the class of the existing ones becomes that of shards alone.
    Parameters, and so checkpoints and ``clip_grad_norm_``, know the 2-D mesh as before.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._before = {id(unit.mesh): (unit.mesh, type(unit.mesh)) for unit in units}

    def begin(self) -> None:
        # Not above: of another torch, which may have it elsewhere, register says so in one line.
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

        for mesh, _ in self._before.values():
            mesh.__class__ = FSDPMeshInfo

    def end(self) -> None:
        while self._before:  # once: the model may have another handle by then
            _, (mesh, kind) = self._before.popitem()
            mesh.__class__ = kind


def outputs(value: Any) -> Iterator[Tensor]:
    """The tensors in what a module returns that backward may start from."""
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            yield leaf
