"""``edgc.ddp.register``: what it refuses, and how the engine of a model under ``DistributedDataParallel`` is made."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Literal, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from edgc.checks import integer
from edgc.compressors.base import compressible, matrix_shape
from edgc.config import EDGCConfig, refuse_stages
from edgc.ddp.hook import Handle, Slot, hook
from edgc.ddp.strategy import StrategyHandle
from edgc.engine import Engine, Matrix, Scaler
from edgc.entropy.meter import embeddings
from edgc.errors import UserError
from edgc.runtime.groups import agreed, own_group, refuse_differing
from edgc.strategies.base import StrategyConfig, refuse_other_types
from edgc.strategies.process import refuse_loop, refuse_other_optimizer
from edgc.training_loop import refuse_scaler, warn_of_scaler

_MARK = "edgc: is the node kept?"


@overload
def register(
    model: DistributedDataParallel,
    config: EDGCConfig,
    *,
    iterations: int,
    scaler: Scaler | Literal[False] | None = None,
) -> Handle: ...
@overload
def register(
    model: DistributedDataParallel,
    config: EDGCConfig,
    *,
    iterations: int,
    scaler: Scaler | Literal[False] | None = None,
    strategy: StrategyConfig | None,
    optimizer: torch.optim.Optimizer | None,
) -> Handle | StrategyHandle: ...


def register(
    model: DistributedDataParallel,
    config: EDGCConfig,
    *,
    iterations: int,
    scaler: Scaler | Literal[False] | None = None,
    strategy: StrategyConfig | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Handle | StrategyHandle:
    """Average the gradients of ``model`` as ``config`` says, from the next backward on.

    To be called on every rank of the model's process group, for several models in the same order on every rank. It
    makes a group of the same ranks, backend and timeout for itself; with NCCL that is a communicator beside DDP's own.
    A refusal leaves nothing behind.

    Args:
        model: wrapped, not yet compiled, without a communication hook but for that of a handle that was removed.
        iterations: length of the run in synchronised backward passes (warm-up is a share of it).
        scaler: the ``torch.amp.GradScaler`` (or anything with its ``scale``) that the loss is multiplied with, on every
            rank or on none. With one scaler for several optimizers, all of them must skip the same steps. False says
            that there is none, or one that is to be ignored; without it parameters in fp16 are refused, and a
            ``GradScaler`` that makes the first step is warned of. A strategy refuses one.
        strategy: what replicas exchange, and when (:mod:`edgc.strategies`); by default the gradients of every step.
            What another one sends is compressed as ``config`` says.
        optimizer: the one that steps all parameters, whose steps a strategy counts.

    Raises:
        UserError: for a model or settings that this cannot work with, on every rank; also for settings of pipeline
            stages, of which there is one here.

    Warns:
        UserWarning: on the first rank, if these settings will compress nothing in this model, and if a ``GradScaler``
            makes the steps that was not given.
    """
    parameters = _agreed(model, config, iterations, scaler, strategy, optimizer)
    if strategy is not None and strategy.name != "every_step":
        assert optimizer is not None
        slot = _slot_of(model) or Slot(model.process_group)
        with contextlib.ExitStack() as undo:
            local = StrategyHandle(model, parameters, slot, config, strategy, optimizer, iterations)
            undo.callback(local.remove)
            slot.handle = local
            _attach(model, slot)
            undo.pop_all()
        return local
    tables = embeddings(model.module)
    matrices = [
        Matrix(shape[0], shape[1], bits, parameter in tables)
        for parameter in parameters.values()
        if compressible(
            shape := matrix_shape(parameter.shape),
            config.min_compression_elements,
            bits := 8 * parameter.element_size(),
        )
    ]
    # Also of those that need no gradient: they may have been frozen after DDP had put them into buckets.
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    device = next(iter(parameters.values())).device
    # As many as DDP has put into buckets, of which some may have been frozen since; it does not always say which bucket
    # is the last.
    count = int(model._get_ddp_logging_data()["num_parameter_tensors"])
    with contextlib.ExitStack() as undo:
        group = own_group(model.process_group)
        undo.callback(dist.destroy_process_group, group)
        engine = Engine(
            config,
            stage=0,
            stages=[matrices],
            iterations=iterations,
            exchange_group=group,
            overlapped=True,
            embeddings={name for name, parameter in parameters.items() if parameter in tables},
        )
        slot = _slot_of(model) or Slot(model.process_group)
        find_unused = model.find_unused_parameters
        handle = Handle(engine, names, count, device, group, slot, scaler or None, find_unused=find_unused)
        undo.pop_all()
        undo.callback(handle.remove)
        _attach(model, slot)
        slot.handle = handle
        handle.refuse_sparse(model.module)
        undo.pop_all()
    if scaler is None and dist.get_rank(group) == 0:
        warn_of_scaler(handle, config, lambda handle: handle._names, where="edgc.ddp.register")
    return handle


def _attach(model: DistributedDataParallel, slot: Slot) -> None:
    """Give the model the hook with its slot, if it has none from an earlier registration."""
    if _slot_of(model) is not None:
        return
    try:
        model.register_comm_hook(slot, hook)
    except (RuntimeError, ValueError, TypeError) as error:
        model._comm_hooks = [pair for pair in model._comm_hooks if pair[1] is not slot]
        what = f"DistributedDataParallel takes no hook: {error}"
        fix = "wrap the model anew, without a hook of your own"
        raise UserError(what, where="edgc.ddp.register", fix=fix) from None


def _slot_of(model: DistributedDataParallel) -> Slot | None:
    """The slot that a model was given when it was first registered."""
    return next((state for _, state in model._comm_hooks if isinstance(state, Slot)), None)


def _agreed(
    model: DistributedDataParallel,
    config: EDGCConfig,
    iterations: int,
    scaler: object,
    strategy: StrategyConfig | None,
    optimizer: torch.optim.Optimizer | None,
) -> dict[str, Tensor]:
    """The parameters whose gradients DDP averages, by name, if every rank can and means the same.

    Raises:
        UserError: on every rank, before there is anything to be left behind.
    """
    where = "edgc.ddp.register"
    if not isinstance(model, DistributedDataParallel):
        fix = "wrap the module in DistributedDataParallel first, and compile it afterwards"
        if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
            fix = "register the DistributedDataParallel itself, before torch.compile"
        elif hasattr(model, "set_requires_all_reduce"):  # FSDPModule, which takes long to import
            fix = "call edgc.fsdp.register"
        raise UserError(f"model is a {type(model).__name__}, not a DistributedDataParallel", where=where, fix=fix)

    def check() -> dict[str, Tensor]:
        refuse_other_types(config, strategy, where)
        parameters = _parameters(model)
        integer("iterations", iterations, 1)
        refuse_stages(config, where, "a plain data-parallel job")
        refuse_scaler(scaler, config, {name: p.dtype for name, p in parameters.items()}, where=where)
        if strategy is not None and strategy.name != "every_step":
            refuse_loop(strategy, optimizer, scaler, where=where)
            refuse_other_optimizer(where, parameters, optimizer)
        return parameters

    parameters = agreed(check, where=where, group=model.process_group)
    shapes = [(name, matrix_shape(parameter.shape)) for name, parameter in parameters.items()]
    described = repr((config, iterations, scaler in (None, False), strategy, shapes))
    what, fix = "config, iterations, options or parameters", "give the same on every rank"
    refuse_differing(what, described, where=where, fix=fix, group=model.process_group)
    return parameters


def _parameters(model: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters whose gradients DDP averages, by name.

    Raises:
        UserError: if this model's gradients cannot be reduced here.
    """
    copies = [pair for pair in model._comm_hooks if isinstance(pair[1], Slot) and pair[1].group is None]
    model._comm_hooks = [pair for pair in model._comm_hooks if pair not in copies]
    slot = _slot_of(model)
    if slot is not None and slot.handle is not None:
        raise UserError("the model is registered already", fix="call handle.remove() before registering it anew")
    # A built-in hook is known to DDP's logger alone.
    if slot is None and (model._comm_hooks or model._get_ddp_logging_data().get("comm_hook")):
        what = "the model already has a communication hook"
        raise UserError(what, fix="register once per model, and wrap it without mixed_precision")
    if getattr(model, "_use_python_reducer", False):
        what = "the model was wrapped with torch._dynamo.config.optimize_ddp = 'python_reducer', which has no buckets"
        raise UserError(what, fix="wrap it with another value")
    for name, module in model.module.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise UserError(f"module {name} has sparse gradients", fix="build it with sparse=False")
    parameters = {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in model.parameters_to_ignore
    }
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters.values()):
        raise UserError("the model's optimizer steps in backward", fix="step it after backward")
    if len({parameter.device for parameter in parameters.values()}) > 1:
        raise UserError("the model's parameters are on several devices", fix="use one device per process")
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise UserError(f"parameter {name} has type {parameter.dtype}", fix="use real floating-point types")
    if missing := _not_reduced(parameters):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        what = f"DistributedDataParallel does not average {', '.join(missing[:3])}{more}"
        raise UserError(what, fix="wrap the model after they were made trainable, or leave them frozen")
    return parameters


def _not_reduced(parameters: Mapping[str, Tensor]) -> list[str]:
    """Names of the parameters that are in no bucket of DDP, which takes those that need a gradient when it wraps.

    It has no public way to ask. But it holds the autograd node that accumulates the gradient of each parameter in a
    bucket; other parameters get a new one each time somebody asks for it.
    """

    def notes(parameter: Tensor) -> dict[str, Any]:
        return cast(dict[str, Any], get_gradient_edge(parameter).node.metadata)

    for parameter in parameters.values():
        notes(parameter)[_MARK] = True
    return [name for name, parameter in parameters.items() if not notes(parameter).pop(_MARK, False)]
