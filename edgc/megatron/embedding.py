"""Fused embedding synchronisation under Megatron-Core (Optimus-CC: Song et al., ASPLOS 2023).

With tied embeddings the first and the last pipeline stage hold a copy each. Megatron averages the gradient of each copy
over its W replicas and then adds the two in one more all-reduce: of n bytes a rank sends 2(W-1)/W n and then n, which
nobody counts here. Fused, one all-reduce over the 2W ranks of both stages gives the same sum of two means, for
(2W-1)/W n that count.

It runs when the last bucket group of a rank has finished, where Megatron's own would follow: all data-parallel
reductions of the rank are over by then and so is all traffic between stages, and nothing else uses the group. So every
rank of it comes there once per iteration, whatever the schedule and whether or not reductions overlap with backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from torch import Tensor

from edgc.compressors import Gradient
from edgc.compressors.base import finite
from edgc.engine import Engine
from edgc.errors import UserError
from edgc.runtime.groups import gather_objects, groups_of, timeout_of

_GROUPS = ["tp", "pp", "embd", "pos_embd", "dp_cp"]  # those that finalize_model_grads asks for
_WHERE = "fused_embedding"


class FusedEmbedding:
    """The tied weight of this rank, one of the two end stages; made by :func:`fuse`.

    Attributes:
        parameter: its gradient is left to :meth:`reduce`.
    """

    def __init__(
        self, name: str, parameter: Any, group: dist.ProcessGroup, alone: dist.ProcessGroup, copies: int
    ) -> None:
        self.name, self.parameter = name, parameter
        self._group, self._alone, self._copies = group, alone, copies
        self._finishing = False
        self.restore: Callable[[], None] = lambda: None

    def wrapped(self, finalize: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``finalize``, which Megatron's schedules call, to leave out its own all-reduce between the copies."""

        def finalize_model_grads(model: Any, num_tokens: Any = None, pg_collection: Any = None, **options: Any) -> Any:
            if pg_collection is None:
                groups = ProcessGroupCollection.use_mpu_process_groups(_GROUPS)
            else:
                groups = copy.copy(pg_collection)
            # Megatron looks None up again, and skips a group of one rank.
            groups.embd = self._alone
            self._finishing = True
            try:
                return finalize(model, num_tokens, pg_collection=groups, **options)
            finally:
                self._finishing = False

        return finalize_model_grads

    def reduce(self, engine: Engine) -> Tensor:
        """Make the gradient the sum of the means of both copies; returns if that is finite, as a tensor.

        To be called on all ranks of both stages, once per iteration, when their other reductions are over.

        Raises:
            UserError: Megatron would add the copies once more, because its function was called past the schedule.
        """
        if not self._finishing:
            fix = "call config.finalize_model_grads_func, as Megatron's schedules do"
            raise UserError("finalize_model_grads was called directly", where=_WHERE, fix=fix)
        gradient = self.parameter.main_grad
        engine.reduce_across_stages([Gradient(self.name, gradient)], self._group)
        gradient *= self._copies  # the mean over all ranks was one of the copies, too
        return finite([gradient], gradient.device)

    def remove(self) -> None:
        """End the process groups; Megatron adds the copies itself from now on."""
        self.restore()
        for group in {self._group, self._alone}:
            dist.destroy_process_group(group)


def fuse(chunks: Sequence[DistributedDataParallel], names: dict[Any, str]) -> FusedEmbedding | None:
    """Set up the fused all-reduce; None on stages that hold no copy of a tied weight, or where none is tied.

    To be called on every rank of the world, after ``finalize_model_grads_func`` is set.

    Raises:
        UserError: on every rank, for what is not supported.
    """
    trained = [parameter for chunk in chunks for parameter in chunk.params_with_grad]
    tied = next((parameter for parameter in trained if getattr(parameter, "shared_embedding", False)), None)
    replicas = dist.get_process_group_ranks(chunks[0].dp_cp_group)
    ends = [] if tied is None else dist.get_process_group_ranks(parallel_state.get_embedding_group())
    rows = gather_objects((replicas, ends))
    if not any(ends for _, ends in rows):
        return None
    config = get_model_config(chunks[0])
    if config.finalize_model_grads_func is None:
        fix = "set it before attach, or fused_embedding to false"
        raise UserError("finalize_model_grads_func is not set", where="TransformerConfig", fix=fix)
    for holder, key in ((chunks[0].ddp_config, "use_distributed_optimizer"), (config, "mtp_num_layers")):
        if value := getattr(holder, key, None):
            what = f"fused_embedding does not work with {key} = {value}"
            raise UserError(what, where=_WHERE, fix="set fused_embedding to false")
    if any(not rows[rank][1] for _, ends in rows for rank in ends):
        fix = "freeze both copies or none, before the model is wrapped"
        raise UserError("one copy of the tied embedding is frozen, the other is not", where=_WHERE, fix=fix)
    ranks, alone = tuple(sorted({rank for end in ends for rank in rows[end][0]})), (dist.get_rank(),)
    timeout = timeout_of(chunks[0].dp_cp_group)
    groups = groups_of({} if tied is None else dict.fromkeys((ranks, alone), timeout))
    if tied is None:
        return None
    fused = FusedEmbedding(names[tied], tied, groups[ranks], groups[alone], len(ranks) // len(replicas))
    finalize = config.finalize_model_grads_func
    config.finalize_model_grads_func = fused.wrapped(finalize)
    fused.restore = partial(setattr, config, "finalize_model_grads_func", finalize)
    return fused
