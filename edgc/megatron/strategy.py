"""Strategies (:mod:`edgc.strategies`) of replicas that are data-parallel parts of a Megatron-Core job.

Each rank runs the strategy for its own parameters, which are shards and stages of a replica, with the ranks that hold
the same ones. In steps in which the strategy does not average gradients Megatron's bucket groups keep those of their
replica; what Megatron sums within a replica (tied embeddings, sequence parallelism) it sums as ever.

An iteration, with what is the strategy's in capitals: backward, bucket groups, sums within the replica, clipping by the
replica's own norm, BEFORE_STEP with the clipped gradients, the step of torch's optimizer, AFTER_STEP, Megatron's copy
of fp32 main parameters to the model's. Where there are main parameters, in bf16, it is these that are exchanged.

A gradient that is not finite on one rank becomes NaN on all of its replica before BEFORE_STEP (one all-reduce of one
number), so that the step or round is void on all stages and shards. A weight that overflows later than that, in the
last step of a round, makes it void on its own stage and shard alone.

What a replica holds twice stays one: after every step, what tensor-parallel ranks hold a copy of comes from the first
of them, and the last stage's tied embedding from the first stage. These broadcasts are not counted, nor is anything
else within a replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from edgc.checks import need
from edgc.config import EDGCConfig
from edgc.entropy.meter import embeddings
from edgc.errors import UserError
from edgc.megatron.attachment import OwnBucketGroup, place, refuse_other_place
from edgc.runtime.channel import all_reduce_bytes
from edgc.runtime.device import own_modes
from edgc.strategies.base import StrategyConfig
from edgc.strategies.process import ProcessStrategy, refuse_other_optimizer


class StrategyBucketGroup(OwnBucketGroup):
    """Bucket group that reduces its gradients, as Megatron does, in the steps in which a strategy says so."""

    edgc: StrategyHandle

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return
        if self.edgc.reduces:
            sizes = [bucket.grad_data.nbytes for bucket in self.buckets]
            self.edgc.bytes += sum(all_reduce_bytes(size, self.edgc_replicas.size()) for size in sizes)
            super().start_grad_sync(force_all_reduce=force_all_reduce)
            return
        self.edgc_begin()
        if self.ddp_config.overlap_grad_reduce:  # Megatron then waits for what was started
            self.grad_reduce_handle = SimpleNamespace(wait=lambda: None)


class StrategyHandle(ProcessStrategy):
    """Strategy of one rank of a Megatron-Core job; made by :func:`edgc.megatron.attach`.

    Attributes:
        names: of all parameters of this rank.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        names: Mapping[Any, str],
        config: EDGCConfig,
        settings: StrategyConfig,
        optimizer: Any,
        iterations: int,
    ) -> None:
        self.names, self._groups = names, [group for chunk in chunks for group in chunk.bucket_groups]
        held = {parameter for group in self._groups for parameter in group.params}
        trained = {name: parameter for parameter, name in names.items() if parameter in held}
        parameters = {name: _main(parameter) for name, parameter in trained.items()}
        tables = {parameter for chunk in chunks for parameter in embeddings(chunk.module)}
        looked_up = {name for name, parameter in trained.items() if parameter in tables}
        inner, replicas = optimizer.optimizer, chunks[0].dp_cp_group
        refuse_other_optimizer("edgc.megatron", parameters, inner)
        super().__init__("edgc.megatron", parameters, config, settings, inner, iterations, replicas, looked_up)
        self._within = [group for group in (parallel_state.get_model_parallel_group(),) if group.size() > 1]
        self._device = next(iter(parameters.values())).device
        self._copies = _copies(trained)

    def start(self) -> None:
        """Begin: what is not started leaves Megatron as it is."""
        for group in self._groups:
            group.__class__ = StrategyBucketGroup
            group.edgc = self
        self._hang()

    def _after_step(self) -> None:
        super()._after_step()
        self._unite()

    @own_modes()
    def _unite(self) -> None:
        """Take copies from the rank that has the first."""
        for group, copies in self._copies:
            flat = torch.cat([copy.reshape(-1) for copy in copies])
            dist.broadcast(flat, dist.get_process_group_ranks(group)[0], group=group)
            for copy, part in zip(copies, flat.split([copy.numel() for copy in copies]), strict=True):
                copy.copy_(part.view_as(copy))

    def state_dict(self) -> dict[str, Any]:
        """State that this rank needs, besides its part of the model and its optimizer, to go on exactly: save one per
        rank. ``shared`` is the same on every replica."""
        return {**super().state_dict(), "place": place()}

    def load_state_dict(self, state: Mapping[str, Any], *, changed_settings: bool = False) -> None:
        """Go on from :meth:`state_dict` of this rank, or of that of any replica where the number of replicas has
        changed: what is a replica's own is then left out. Model and optimizer have their state by then.

        Args:
            changed_settings: go on with the settings of now where the state is of others, instead of refusing it.

        Raises:
            UserError: the state is another rank's, lacks something, or is of other settings.
        """
        need(state, ("place",), "state")
        refuse_other_place(state["place"])
        super().load_state_dict({**state, "settings": self._settings} if changed_settings else state)

    def remove(self) -> None:
        """Give Megatron its own reduction back; on every rank, between two iterations. A second call does nothing."""
        self._let_go()
        while self._groups:
            self._groups.pop().edgc_leave()


def refuse(
    chunks: Sequence[DistributedDataParallel], config: EDGCConfig, name: str, optimizer: Any, observer: object
) -> None:
    """Refuse what a strategy of this name cannot work with, in one line."""
    each = getattr(optimizer, "chained_optimizers", [optimizer])
    shares = "shards one optimizer over replicas, which are to differ"
    for used, what, fix in (
        (not hasattr(optimizer, "prepare_grads"), "needs Megatron's optimizer", "give it as optimizer=..."),
        (observer is not None, "takes no observer", "leave it out"),
        (
            chunks[0].ddp_config.use_distributed_optimizer,
            f"does not work with use_distributed_optimizer, which {shares}",
            "set it to False",
        ),
        (
            any(chunk.expert_parallel_bucket_groups for chunk in chunks),
            "does not know expert parallelism",
            "set expert_model_parallel_size to 1, and with experts tensor_model_parallel_size, too",
        ),
        (
            parallel_state.get_context_parallel_world_size() > 1,
            "does not know context parallelism",
            "set context_parallel_size to 1",
        ),
        (
            any(getattr(one, "grad_scaler", None) for one in each),
            "does not work with a loss scale, by which replicas skip steps of their own",
            "train in bf16 or fp32, without loss_scale",
        ),
        (
            any(getattr(one, "is_stub_optimizer", False) for one in each) or len(each) != 1,
            "needs one optimizer with parameters to train on every rank",
            "freeze no whole stage",
        ),
        (
            bool(getattr(getattr(optimizer, "config", None), "optimizer_cpu_offload", False)),
            "does not work with optimizer_cpu_offload, which keeps parameters of its own",
            "set it to False",
        ),
        (config.pipeline.rank is not None, "does not compress traffic between stages", "set pipeline.rank: null"),
        (config.fused_embedding, "does not fuse embeddings", "set fused_embedding: false"),
    ):
        if used:
            raise UserError(f"strategy {name} {what}", where="edgc.megatron", fix=fix)


def _main(parameter: Any) -> Any:
    """The parameter that the optimizer steps, in fp32 where the model's is not."""
    return getattr(parameter, "main_param", parameter)


def _copies(trained: Mapping[str, Any]) -> list[tuple[dist.ProcessGroup, list[Tensor]]]:
    """Groups of ranks that hold copies of the same parameters, and these."""
    replicated = [_main(p) for p in trained.values() if not getattr(p, "tensor_model_parallel", False)]
    tied = [_main(p) for p in trained.values() if getattr(p, "shared_embedding", False)]
    held = [(parallel_state.get_tensor_model_parallel_group(), replicated)]
    if tied:
        held.append((parallel_state.get_embedding_group(), tied))
    return [(group, copies) for group, copies in held if copies and group.size() > 1]
