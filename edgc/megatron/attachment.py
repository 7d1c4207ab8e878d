"""The one call that a Megatron-Core user adds: ``edgc.megatron.attach(model_chunks, config, iterations=...)``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from edgc.compressors.powersgd import compressible
from edgc.config import EDGCConfig
from edgc.engine import Engine, Observer
from edgc.errors import UserError
from edgc.megatron.bucket_group import CompressedBucketGroup


class Attachment:
    """EDGC on one rank of a Megatron-Core job; made by :func:`attach`."""

    def __init__(self, engine: Engine, groups: Sequence[CompressedBucketGroup]) -> None:
        self.engine = engine
        self.groups = list(groups)
        self._finished = 0
        self._backward_seconds: list[float] = []

    def group_finished(self) -> None:
        """Called by every bucket group once per iteration; the last one closes the iteration."""
        self._finished += 1
        if self._finished == len(self.groups):
            self._finished = 0
            self.engine.end_iteration(self._backward_seconds)
            self._backward_seconds = []

    def time_backward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Forward hook: time the backward pass of each micro-batch, from the output's gradient to the last node."""
        if not (isinstance(output, torch.Tensor) and output.requires_grad):
            return

        def started(gradient: torch.Tensor) -> None:
            begin = time.perf_counter()

            def finished() -> None:
                self._backward_seconds.append(time.perf_counter() - begin)

            torch.autograd.Variable._execution_engine.queue_callback(finished)

        output.register_hook(started)

    def state_dict(self) -> dict[str, Any]:
        return self.engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.engine.load_state_dict(state)


def attach(
    model_chunks: Sequence[DistributedDataParallel] | DistributedDataParallel,
    config: EDGCConfig,
    *,
    iterations: int,
    observer: Observer | None = None,
) -> Attachment:
    """Reduce the data-parallel gradients of ``model_chunks`` as ``config`` says, from the next iteration on.

    To be called on every rank, after the model is wrapped in Megatron's ``DistributedDataParallel`` and before the
    first iteration. Gradients are taken from ``param.main_grad``; under tensor parallelism the shapes are those of
    the local shard. Tied embeddings: each end stage reduces its own copy, before Megatron adds the two.

    Args:
        model_chunks: this rank's chunk, or its list of chunks under an interleaved schedule.
        iterations: length of the run in iterations (warm-up is a share of it).
        observer: called with the local gradients of each bucket group before they are reduced.

    Raises:
        UserError: for the distributed optimizer, and for chunks that already have an attachment.
    """
    chunks = [model_chunks] if isinstance(model_chunks, DistributedDataParallel) else list(model_chunks)
    groups = [
        group for chunk in chunks for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
    ]
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            raise UserError(
                "edgc.megatron does not reduce-scatter yet",
                where="DistributedDataParallelConfig",
                fix="set use_distributed_optimizer to False",
            )
    if any(isinstance(group, CompressedBucketGroup) for group in groups):
        raise UserError("these model chunks already have an attachment", fix="call attach once per model")
    names = {
        parameter: f"chunk{index}.{name}" if len(chunks) > 1 else name
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.module.named_parameters()
    }
    stage = parallel_state.get_pipeline_model_parallel_rank()
    own = [
        tuple(parameter.shape)
        for group in groups
        for parameter in sorted(group.params, key=names.__getitem__)
    ]
    own = [shape for shape in own if compressible(shape, config.min_compression_elements)]
    shapes = _shapes_of_all_stages(stage, own)
    attachment = Attachment(
        Engine(config, stage=stage, shapes=shapes, iterations=iterations, observer=observer), groups
    )
    for group in groups:
        group.__class__ = CompressedBucketGroup
        group.edgc_attachment, group.edgc_names = attachment, names
    if config.method == "edgc" and config.alignment == "measured":
        for chunk in chunks:
            chunk.module.register_forward_hook(attachment.time_backward)
    return attachment


def _shapes_of_all_stages(stage: int, own: list[tuple[int, ...]]) -> list[list[tuple[int, int]]]:
    """Matrix shapes per stage, the same list on every rank; the first rank of a stage speaks for it."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (stage, own))
    by_stage: dict[int, list[tuple[int, int]]] = {}
    for index, shapes in gathered:
        by_stage.setdefault(index, shapes)
    return [by_stage[index] for index in sorted(by_stage)]
