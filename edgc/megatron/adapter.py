"""Entry for users of Megatron-Core: ``edgc.megatron.attach(model_chunks, config, iterations=...)``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, overload

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from edgc.checks import integer
from edgc.compressors.base import compressible
from edgc.config import CompressingConfig, EDGCConfig
from edgc.control.settings import PolicyConfig
from edgc.engine import Engine, Matrix, Observer
from edgc.entropy.meter import embeddings
from edgc.errors import UserError
from edgc.megatron.attachment import Attachment, CompressedBucketGroup, OwnBucketGroup
from edgc.megatron.embedding import fuse
from edgc.megatron.pipeline_traffic import CompressedP2P
from edgc.megatron.strategy import StrategyHandle, refuse
from edgc.runtime.groups import agreed, gather_objects
from edgc.strategies.base import StrategyConfig, refuse_other_types


@overload
def attach(
    model_chunks: Sequence[DistributedDataParallel] | DistributedDataParallel,
    config: EDGCConfig,
    *,
    iterations: int,
    optimizer: Any = None,
    observer: Observer | None = None,
) -> Attachment: ...
@overload
def attach(
    model_chunks: Sequence[DistributedDataParallel] | DistributedDataParallel,
    config: EDGCConfig,
    *,
    iterations: int,
    optimizer: Any = None,
    observer: Observer | None = None,
    strategy: StrategyConfig | None,
) -> Attachment | StrategyHandle: ...


def attach(
    model_chunks: Sequence[DistributedDataParallel] | DistributedDataParallel,
    config: EDGCConfig,
    *,
    iterations: int,
    optimizer: Any = None,
    observer: Observer | None = None,
    strategy: StrategyConfig | None = None,
) -> Attachment | StrategyHandle:
    """Reduce the data-parallel gradients of ``model_chunks`` as ``config`` says, from the next iteration on.

    To be called on every rank, after the model is wrapped in Megatron's ``DistributedDataParallel`` and before the
    first iteration. Gradients are taken from ``param.main_grad``; under tensor parallelism the shapes are those of
    the local shard, and every tensor-parallel rank compresses its own.

    Tied embeddings: each end stage reduces its own copy, compressed like any matrix, before Megatron adds the two.
    The sum of two compressed means is the compressed sum, each with its own error feedback, so the copies get the same
    gradient bit for bit; leaving them dense would send the largest matrix of the model whole. With ``fused_embedding``
    they are left dense, and both steps are one (:mod:`edgc.megatron.embedding`).

    Pipeline traffic: with ``config.pipeline.rank`` set, ``attachment.pipeline`` is the communicator that compresses it;
    the training loop has to hand it to Megatron's schedule (:mod:`edgc.megatron.pipeline_traffic`), and the first
    iteration without it is an error.

    Distributed optimizer: what goes dense is reduce-scattered; of what is compressed the factors are all-reduced.

    Frozen stages: what is frozen when the model is wrapped is in no bucket, and a rank without buckets takes part in
    the decisions of all. Under method ``edgc`` the first stage is the first one that has a matrix to compress:
    ``decision.ranks[0]`` is its rank.

    Strategies: with another one than ``every_step`` what replicas exchange goes as ``config`` says, but for gradients
    in the steps in which the strategy averages them, which are Megatron's own matter (:mod:`edgc.megatron.strategy`).
    The model has its weights by then, the same on every replica, for they are what a round starts from.

    Args:
        model_chunks: this rank's chunk, or its list of chunks under an interleaved schedule.
        iterations: length of the run in iterations (warm-up is a share of it).
        optimizer: Megatron's, which then does not step on gradients that are not finite; required for fp16, whose loss
            scale error feedback must follow. Without it, such gradients are NaN on all ranks, and
            ``attachment.last.skipped`` says so.
        observer: called with the local gradients of each bucket group before they are reduced; under
            ``overlap_grad_reduce`` in another thread.
        strategy: what replicas exchange, and when (:mod:`edgc.strategies`); by default the gradients of every step.

    Raises:
        UserError: for chunks that already have an attachment, and for what is not supported; of strategies, on every
            rank.

    Warns:
        UserWarning: for a setting that is about several pipeline stages where there is one.
    """
    chunks = [model_chunks] if isinstance(model_chunks, DistributedDataParallel) else list(model_chunks)
    integer("iterations", iterations, 1)
    refuse_other_types(config, strategy, "edgc.megatron.attach")
    for chunk in chunks:
        _check(chunk)
    dense = [group for chunk in chunks for group in chunk.bucket_groups]
    expert = [group for chunk in chunks for group in chunk.expert_parallel_bucket_groups]
    names = {
        parameter: f"chunk{index}.{name}" if len(chunks) > 1 else name
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.module.named_parameters()
    }
    if strategy is not None and strategy.name != "every_step":

        def made() -> StrategyHandle:
            refuse(chunks, config, strategy.name, optimizer, observer)
            return StrategyHandle(chunks, names, config, strategy, optimizer, iterations)

        handle = agreed(made, where="edgc.megatron.attach")
        handle.start()
        return handle
    fused = fuse(chunks, names) if config.fused_embedding else None
    uncompressed = [] if isinstance(config, CompressingConfig) and config.compress_experts else expert
    tables = {parameter for chunk in chunks for parameter in embeddings(chunk.module)}
    matrices = [
        Matrix(parameter.shape[0], parameter.shape[1], 8 * parameter.main_grad.element_size(), parameter in tables)
        for group in dense + expert
        for parameter in sorted(group.params, key=names.__getitem__)
        if group not in uncompressed and (fused is None or parameter is not fused.parameter)
        if compressible(parameter.shape, config.min_compression_elements)
    ]
    stage = parallel_state.get_pipeline_model_parallel_rank()
    # The same on every rank; the first rank of a stage speaks for it.
    by_stage = dict(reversed(gather_objects((stage, matrices))))
    stages = [by_stage[index] for index in sorted(by_stage)]
    leads = [index for index, each in enumerate(stages) if each or not isinstance(config, PolicyConfig)]
    first = leads[0] if leads else 0  # whose entropy and times the other stages follow
    overlap = any(chunk.ddp_config.overlap_grad_reduce for chunk in chunks)
    engine = Engine(
        config,
        stage=max(stage - first, -1),  # -1: nothing that is measured here counts for any stage
        stages=stages[first:],
        iterations=iterations,
        observer=observer,
        overlapped=overlap,
        embeddings={names[parameter] for parameter in tables},
    )
    for group in dense + expert:
        group.__class__ = CompressedBucketGroup
    pipeline = _communicator(chunks[0], config)
    attachment = Attachment(
        engine, dense + expert, chunks[-1], names, uncompressed, overlap=overlap, fused=fused, pipeline=pipeline
    )
    if optimizer is not None:
        attachment.guard(optimizer)
    if isinstance(config, PolicyConfig) and config.alignment == "measured":
        for chunk in chunks:
            attachment.hooks.append(chunk.module.register_forward_hook(attachment.time_backward))
    return attachment


def _check(chunk: DistributedDataParallel) -> None:
    """Refuse what cannot work, in one line."""
    settings = chunk.ddp_config
    attached = any(isinstance(group, OwnBucketGroup) for group in chunk.bucket_groups)
    if attached or "finish_grad_sync" in vars(chunk):  # without bucket groups only the last chunk tells
        raise UserError("these model chunks already have an attachment", fix="call attach once per model")
    if settings.num_distributed_optimizer_instances > 1:
        what = f"num_distributed_optimizer_instances = {settings.num_distributed_optimizer_instances} is not supported"
        raise UserError(what, where="DistributedDataParallelConfig", fix="set it to 1")
    if getattr(settings, "use_megatron_fsdp", False):
        fix = "set it to False; use_distributed_optimizer is supported"
        raise UserError("use_megatron_fsdp is not supported", where="DistributedDataParallelConfig", fix=fix)


def _communicator(chunk: DistributedDataParallel, config: EDGCConfig) -> CompressedP2P | None:
    """Communicator that compresses the traffic between stages; None unless the settings ask for it."""
    settings = config.pipeline
    if parallel_state.get_pipeline_model_parallel_world_size() == 1 and dist.get_rank() == 0:
        for key, used in (("pipeline.rank", settings.rank is not None), ("fused_embedding", config.fused_embedding)):
            if used:
                warnings.warn(f"edgc: {key} has no effect: there is one pipeline stage", stacklevel=3)
    if settings.rank is None:
        return None
    group = parallel_state.get_pipeline_model_parallel_group()
    return CompressedP2P(pp_group=group, config=chunk.config, pipeline=settings, seed=config.seed)
