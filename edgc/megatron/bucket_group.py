"""Megatron-Core's data-parallel bucket group with its collective replaced."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch import Tensor

from edgc.buckets import BucketWorker
from edgc.compressors import Gradient
from edgc.compressors.base import finite
from edgc.runtime.channel import mark


class Pending:
    """A reduction that goes on in another thread."""

    def __init__(self, worker: BucketWorker, future: torch.futures.Future[Tensor]) -> None:
        self._worker, self._future = worker, future

    def wait(self) -> None:
        """Wait for the means; raises what went wrong in that thread."""
        # Always, done or not: what a rank sends must not depend on who is faster.
        self._worker.flush()
        self._future.wait()


class CompressedBucketGroup(_ParamAndGradBucketGroup):
    """Bucket group that reduces its gradients through an :class:`edgc.engine.Engine` instead of one collective.

    Megatron has no injection API for this, so :func:`edgc.megatron.attach` sets the class of existing bucket groups,
    and the attachment sets ``edgc`` to itself.
    """

    grad_reduce_handle: Any
    edgc: Any

    def edgc_leave(self) -> None:
        """Return to Megatron's own reduction."""
        self.__class__ = _ParamAndGradBucketGroup
        del self.edgc

    @property
    def edgc_replicas(self) -> dist.ProcessGroup:
        """The ranks that the gradients are averaged over."""
        if self.ddp_config.use_distributed_optimizer:
            return self.intra_distributed_optimizer_instance_group
        return self.data_parallel_group

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return
        if self.ddp_config.check_for_nan_in_grad or self.ddp_config.check_for_large_grads:
            self.check_grads(
                check_for_nan_or_inf=self.ddp_config.check_for_nan_in_grad,
                check_for_large=self.ddp_config.check_for_large_grads,
            )
        scatters = self.ddp_config.use_distributed_optimizer and not force_all_reduce
        gradients: list[Gradient] = []
        for bucket in self.buckets:
            # So that the mean over replicas equals what Megatron's scaled sum (or average) would give.
            factor = bucket.gradient_scaling_factor
            if not self.ddp_config.average_in_collective:
                factor *= self.edgc_replicas.size()
            if factor != 1.0:
                bucket.grad_data *= factor
            # Error feedback is looked up by name: it does not depend on how buckets were cut.
            gradients += [
                Gradient(self.edgc.names[p], p.main_grad, self._needed(bucket, p) if scatters else None)
                for p in bucket.params_list
                if p is not self.edgc.fused_parameter
            ]
        shards = tuple(bucket.grad_data for bucket in self.buckets) if scatters else ()
        self.grad_reduce_handle = self.edgc.reduce(gradients, self, shards)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        device = self.buckets[0].grad_data.device
        started = mark(device)
        super().finish_grad_sync(force_all_reduce=force_all_reduce)
        means = [bucket.grad_data for bucket in self.buckets]
        if self.ddp_config.use_distributed_optimizer:  # this rank has them in its shard
            means = [mean.view(self.edgc_replicas.size(), -1)[self.edgc_replicas.rank()] for mean in means]
        self.edgc.group_finished(started, mark(device), finite(means, device))

    def _needed(self, bucket: Any, parameter: Any) -> tuple[int, int]:
        """The entries of a gradient that lie in this rank's shard of the bucket."""
        gradient = parameter.main_grad
        size = bucket.grad_data.numel() // self.edgc_replicas.size()
        start = self.edgc_replicas.rank() * size
        first = gradient.storage_offset() - bucket.grad_data.storage_offset()
        low = min(max(start - first, 0), gradient.numel())
        return low, min(max(start + size - first, low), gradient.numel())
