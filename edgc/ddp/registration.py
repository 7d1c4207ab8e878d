"""``edgc.ddp.register``: what it refuses, and how the engine of a model under ``DistributedDataParallel`` is made."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from edgc.buckets import Log
from edgc.checks import dotted, integer
from edgc.compressors.sizes import compressible, mean_bits
from edgc.config import EDGCConfig
from edgc.ddp.hook import Handle, Scaler, Unregistered, hook, matrix_shape
from edgc.engine import Engine, Observer
from edgc.entropy.kinds import embeddings
from edgc.errors import UserError
from edgc.runtime.groups import gather_objects, own_group


def register(
    model: DistributedDataParallel,
    config: EDGCConfig,
    *,
    iterations: int,
    scaler: Scaler | None = None,
    whole_steps: bool = True,
    process_group: dist.ProcessGroup | None = None,
    observer: Observer | None = None,
    log: Log | None = None,
) -> Handle:
    """Average the gradients of ``model`` as ``config`` says, from the next backward on.

    To be called on every rank of the model's process group, for several models in the same order on every rank.

    Args:
        model: wrapped, not yet compiled, without a communication hook. On a GPU with ``bucket_cap_mb=100`` or more, for
            the host must launch less in fewer buckets.
        iterations: length of the run in synchronised backward passes (warm-up is a share of it).
        scaler: the ``torch.amp.GradScaler`` (or anything with its ``scale``) that the loss is multiplied with, on every
            rank or on none. With one scaler for several optimizers, all of them must skip the same steps.
        whole_steps: undo a step with a gradient that is not finite in the state of every bucket, not only of those
            that have such a gradient; takes the memory of a second error feedback.
        process_group: of the same ranks as the model's, for this registration alone, if it is to have a timeout or a
            backend of your own; by default one is made. With NCCL it is a communicator beside DDP's own.
        observer: called with the iteration and each bucket's local gradients before they are reduced, in another
            thread.
        log: called after each iteration, see :attr:`Handle.log`.

    Raises:
        UserError: for a model or settings that this cannot work with, on every rank; also for settings of pipeline
            stages, of which there is one here.
    """
    parameters = _parameters(model)
    shapes = [matrix_shape(parameter) for parameter in parameters.values()]
    described = [*zip(parameters, shapes, strict=True)]
    _same_on_all_ranks(model, (config, iterations, scaler is not None, whole_steps, described))
    integer("iterations", iterations, 1)
    _refuse_stages(config)
    compressed = {
        name: ((shape[0], shape[1]), 8 * parameter.element_size())
        for shape, (name, parameter) in zip(shapes, parameters.items(), strict=True)
        if compressible(shape, config.min_compression_elements)
    }
    tables = embeddings(model.module)
    looked_up = {name for name, parameter in parameters.items() if parameter in tables}
    group = process_group or own_group(model.process_group)
    engine = Engine(
        config,
        stage=0,
        shapes=[[shape for shape, _ in compressed.values()]],
        iterations=iterations,
        exchange_group=group,
        observer=observer,
        deferred=whole_steps,
        overlapped=True,
        gradient_bits=mean_bits(compressed.values()),
        embeddings=looked_up,
        embedding_shapes=[shape for name, (shape, _) in compressed.items() if name in looked_up],
    )
    # Also of those that need no gradient: they may have been frozen after DDP had put them into buckets.
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    device = next(iter(parameters.values())).device
    # As many as DDP has put into buckets, of which some may have been frozen since; it does not always say which bucket
    # is the last.
    count = int(model._get_ddp_logging_data()["num_parameter_tensors"])
    own = process_group is None
    handle = Handle(engine, names, count, device, group, model.process_group, scaler, own=own)
    handle.log = log
    model.register_comm_hook(handle, hook)
    return handle


def _refuse_stages(config: EDGCConfig) -> None:
    """Refuse what only pipeline stages, or Megatron's other parallelism, have a use for."""
    one, values = "a plain data-parallel job has one stage", dotted(config.to_dict())
    for key, unused, word, why in (
        ("pipeline.rank", None, "null", one),
        ("fused_embedding", False, "false", one),
        ("compressed_stages", 1, "1", one),
        ("alignment", "off", "off", one),
        ("compress_experts", True, "true", "a plain data-parallel job has no expert parallelism"),
    ):
        if (value := values.get(key, unused)) != unused:
            where, fix = "edgc.ddp.register", f"{why}; set {key}: {word}"
            raise UserError(f"{key} = {value!r} cannot be used", where=where, fix=fix)


def _parameters(model: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters whose gradients DDP averages, by name.

    Raises:
        UserError: if this model's gradients cannot be reduced here.
    """
    if not isinstance(model, DistributedDataParallel):
        what = f"edgc.ddp.register was given a {type(model).__name__}"
        raise UserError(what, fix="wrap the module in DistributedDataParallel first, and compile it afterwards")
    model._comm_hooks = [pair for pair in model._comm_hooks if not isinstance(pair[1], Unregistered)]
    if model._comm_hooks:
        what = "the model already has a communication hook"
        raise UserError(what, fix="register once per model, and wrap it without mixed_precision")
    for name, module in model.module.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise UserError(f"module {name} has sparse gradients", fix="build it with sparse=False")
    parameters = {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in model.parameters_to_ignore
    }
    if len({parameter.device for parameter in parameters.values()}) > 1:
        raise UserError("the model's parameters are on several devices", fix="use one device per process")
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise UserError(f"parameter {name} has type {parameter.dtype}", fix="use real floating-point types")
    return parameters


def _same_on_all_ranks(model: DistributedDataParallel, mine: Any) -> None:
    """Refuse on every rank what differs between ranks, before it becomes collectives that do not match."""
    gathered = gather_objects(repr(mine), model.process_group)
    other = [rank for rank, item in enumerate(gathered) if item != gathered[0]]
    if other:
        what = f"config, iterations, options or parameters differ between ranks 0 and {', '.join(map(str, other))}"
        raise UserError(what, where="edgc.ddp.register", fix="give the same on every rank")
