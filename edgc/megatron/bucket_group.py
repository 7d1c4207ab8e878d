"""Megatron-Core's data-parallel bucket group with its collective replaced."""

from __future__ import annotations

from typing import Any

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from edgc.compressors import Gradient


class _Finished:
    """A handle for a reduction that is over when it returns."""

    def wait(self) -> None:
        pass


class CompressedBucketGroup(_ParamAndGradBucketGroup):
    """Reduces its gradients through an :class:`edgc.engine.Engine` instead of one all-reduce.

    Megatron has no injection API for this, so :func:`edgc.megatron.attach` sets the class of existing bucket groups
    and gives them ``edgc_attachment`` and ``edgc_names`` (parameter to name).
    """

    edgc_attachment: Any
    edgc_names: dict[Any, str]
    grad_reduce_handle: Any

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return
        if self.ddp_config.check_for_nan_in_grad or self.ddp_config.check_for_large_grads:
            self.check_grads(
                check_for_nan_or_inf=self.ddp_config.check_for_nan_in_grad,
                check_for_large=self.ddp_config.check_for_large_grads,
            )
        gradients = []
        for bucket in self.buckets:
            self._scale_for_mean(bucket)
            # Names sort the same on every rank; bucket.params_list follows the order of creation, which does too,
            # but error feedback is looked up by name and should not depend on how buckets were cut.
            gradients += [Gradient(self.edgc_names[p], p.main_grad) for p in bucket.params_list]
        self.edgc_attachment.engine.reduce(gradients, self.data_parallel_group)
        # The reduction above is synchronous; with overlap Megatron still waits on a handle.
        self.grad_reduce_handle = _Finished() if self.ddp_config.overlap_grad_reduce else None

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        super().finish_grad_sync(force_all_reduce=force_all_reduce)
        self.edgc_attachment.group_finished()

    def _scale_for_mean(self, bucket: Any) -> None:
        """Scale so that the mean over replicas equals what Megatron's scaled sum (or average) would give."""
        factor = bucket.gradient_scaling_factor
        if not self.ddp_config.average_in_collective:
            factor *= self.data_parallel_group.size()
        if factor != 1.0:
            bucket.grad_data *= factor
