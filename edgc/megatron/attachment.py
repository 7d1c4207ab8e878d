"""EDGC on one rank of a Megatron-Core job: Megatron's bucket groups, which reduce through an engine."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from torch import Tensor

from edgc.buckets import Bucket, BucketWorker
from edgc.checkpoints.saved_state import refuse_other_parameters, state_for
from edgc.checks import need
from edgc.compressors import Gradient
from edgc.compressors.base import finite
from edgc.engine import Engine
from edgc.errors import UserError, copied
from edgc.handle import EngineHandle
from edgc.megatron.embedding import FusedEmbedding
from edgc.megatron.pipeline_traffic import CompressedP2P
from edgc.runtime.channel import Mark, Stopwatch, mark, seconds_between
from edgc.runtime.groups import groups_of, timeout_of


class Pending:
    """A reduction that goes on in another thread."""

    def __init__(self, worker: BucketWorker, future: torch.futures.Future[Tensor]) -> None:
        self._worker, self._future = worker, future

    def wait(self) -> None:
        """Wait for the means; raises what went wrong in that thread."""
        # Always, done or not: what a rank sends must not depend on who is faster.
        self._worker.flush()
        self._future.wait()


class OwnBucketGroup(_ParamAndGradBucketGroup):
    """Bucket group that does not reduce its gradients as Megatron does.

    Megatron has no injection API for this, so :func:`edgc.megatron.attach` sets the class of existing bucket groups,
    and what was attached sets ``edgc`` to itself.
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

    def edgc_begin(self) -> None:
        """Check gradients as Megatron does, and scale them so that their mean over replicas equals what its scaled sum
        (or average) would give."""
        if self.ddp_config.check_for_nan_in_grad or self.ddp_config.check_for_large_grads:
            self.check_grads(
                check_for_nan_or_inf=self.ddp_config.check_for_nan_in_grad,
                check_for_large=self.ddp_config.check_for_large_grads,
            )
        for bucket in self.buckets:
            factor = bucket.gradient_scaling_factor
            if not self.ddp_config.average_in_collective:
                factor *= self.edgc_replicas.size()
            if factor != 1.0:
                bucket.grad_data *= factor


class CompressedBucketGroup(OwnBucketGroup):
    """Bucket group that reduces its gradients through an :class:`edgc.engine.Engine` instead of one collective."""

    edgc: Attachment

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return
        self.edgc_begin()
        scatters = self.ddp_config.use_distributed_optimizer and not force_all_reduce
        gradients: list[Gradient] = []
        for bucket in self.buckets:
            # Error feedback is looked up by name: it does not depend on how buckets were cut.
            gradients += [
                Gradient(self.edgc.names[p], p.main_grad)
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


class Attachment(EngineHandle):
    """EDGC on one rank of a Megatron-Core job; made by :func:`edgc.megatron.attach`.

    With ``overlap_grad_reduce`` reductions go on beside backward (:mod:`edgc.buckets`; on a CPU in a thread, over
    process groups of its own); without, they happen in the caller's thread. An iteration ends with
    ``finish_grad_sync`` of the last model chunk, also on a rank that trains nothing. There all ranks of all stages
    learn whether any averaged gradient was not finite (one all-reduce of one number). If so, the step is skipped
    everywhere: gradients become NaN, the guarded optimizer does not step, and error feedback, warm start and the
    controller's means stay as they were before the iteration.

    Args:
        groups: the bucket groups of this rank; none where all parameters are frozen.
        last_chunk: the last of this rank's model chunks.
        names: of the parameters, by which error feedback is kept.
        uncompressed: groups that are sent dense.

    Attributes:
        groups: the bucket groups of this rank.
        skipped: steps skipped so far.
        skipped_in_a_row: up to and with the last iteration.
        averaged_at: when the last gradients of the last iteration were averaged here, before any rank waits for those
            of other stages; a mark of :mod:`edgc.runtime.channel`. None if nothing is trained here.
        hooks: on the model, to be removed at the end.
        pipeline: the communicator that compresses the traffic between pipeline stages, under ``config.pipeline``. Its
            error feedback follows the loss scale and is part of the state.
    """

    def __init__(
        self,
        engine: Engine,
        groups: Sequence[CompressedBucketGroup],
        last_chunk: DistributedDataParallel,
        names: Mapping[Any, str],
        uncompressed: Sequence[CompressedBucketGroup] = (),
        *,
        overlap: bool,
        fused: FusedEmbedding | None = None,
        pipeline: CompressedP2P | None = None,
    ) -> None:
        self.engine, self.groups, self.names = engine, list(groups), names
        self._uncompressed, self._fused, self.pipeline = uncompressed, fused, pipeline
        self.fused_parameter = None if fused is None else fused.parameter
        self.skipped = self.skipped_in_a_row = 0
        # Where Megatron makes its gradient buffers.
        self.device = torch.device(torch.cuda.current_device())
        self.hooks: list[Any] = []
        self.averaged_at: Mark | None = None
        self._finite: list[Tensor] = []
        self._exposed = Stopwatch()
        self._backward: list[tuple[Mark, Mark]] = []
        self._worker: BucketWorker | None = None
        self._worker_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._needs_scale = bool(last_chunk.config.fp16)  # until an optimizer tells it
        self._guarded: Any = None  # the optimizer
        self._loaded = False  # whether a state was loaded and no iteration has begun since
        if pipeline is not None:
            pipeline.starting = weakref.WeakMethod(self.catch_up)
        if overlap:
            parameters = sum(len(group.params) for group in groups) - (fused is not None)
            self._worker = BucketWorker(engine, None, self.device, parameters, closes=False)
            if not self._worker.inline:
                # Collectives of two threads on one group could mix.
                shared = [group.edgc_replicas for group in groups]
                self._worker_groups = groups_of({tuple(dist.get_process_group_ranks(g)): timeout_of(g) for g in shared})
            # The thread must not keep the attachment alive, which ends it.
            self._stop = weakref.finalize(self, self._worker.stop)
        for group in groups:
            group.edgc = self
        self._last_chunk, finish = last_chunk, last_chunk.finish_grad_sync

        def finish_grad_sync(*arguments: Any, **options: Any) -> None:
            finish(*arguments, **options)
            self._end_iteration()

        last_chunk.finish_grad_sync = finish_grad_sync

    def guard(self, optimizer: Any) -> None:
        """Let skipped steps be skipped by ``optimizer``, a Megatron optimizer, and follow its loss scale.

        Error feedback is kept in the unit of the gradients, so it is rescaled when the loss scale changes.
        """
        prepare = optimizer.prepare_grads
        reference = weakref.ref(self)

        def prepare_grads() -> bool:
            overflow = bool(prepare())
            attachment = reference()
            if attachment is None:
                return overflow
            attachment._follow(float(optimizer.get_loss_scale()))
            return overflow or attachment.skipped_in_a_row > 0

        optimizer.prepare_grads = prepare_grads
        self._guarded = optimizer
        self._follow(float(optimizer.get_loss_scale()))
        self._needs_scale = False

    def catch_up(self) -> None:
        """Follow the loss scale that the first iteration after loading has, which may not be the saved one."""
        loaded, self._loaded = self._loaded, False
        if loaded and self._guarded is not None:
            self._follow(float(self._guarded.get_loss_scale()))

    def _follow(self, scale: float) -> None:
        factor = self.engine.rescale(scale)
        if self.pipeline is not None:
            self.pipeline.compressor.rescale(factor)

    def reduce(
        self, gradients: list[Gradient], source: CompressedBucketGroup, shards: tuple[Tensor, ...]
    ) -> Pending | None:
        """Average the gradients of a bucket group; None if that is done when it returns.

        Raises:
            UserError: under fp16 without an optimizer.
        """
        if self._needs_scale:
            fix = "give attach the optimizer, or call attachment.guard(optimizer) before the first iteration"
            raise UserError("edgc.megatron does not know the loss scale", where="attach", fix=fix)
        self.catch_up()
        group, compress = source.edgc_replicas, source not in self._uncompressed
        if self._worker is None:
            self.engine.reduce(gradients, group, compress=compress, shards=shards)
            return None
        if self._worker.error is not None:
            raise copied(self._worker.error)
        on_gpu = self.device.type == "cuda"
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[self.device] if on_gpu else None)
        if gradients:
            ready = torch.cuda.current_stream(self.device).record_event() if on_gpu else None
            group = self._worker_groups.get(tuple(dist.get_process_group_ranks(group)), group)
            self._worker.put(Bucket(False, gradients, gradients[0].tensor, future, ready, group, compress, shards))
        else:  # a group that holds nothing but a tied embedding
            future.set_result(torch.empty(0, dtype=torch.float32, device=self.device))
        return Pending(self._worker, future)

    def group_finished(self, started: Mark, ended: Mark, finite: Tensor) -> None:
        """Take in what a bucket group has done, once per iteration.

        Args:
            started, ended: of the wait for the group's means.
            finite: true if they are, a scalar.
        """
        self._exposed.add(started, ended)
        self._finite.append(finite)
        self.averaged_at = ended

    def _end_iteration(self) -> None:
        if self._fused is not None:
            self._finite.append(self._fused.reduce(self.engine))
        if self.pipeline is not None:
            self.pipeline.check_used()
        bad = torch.zeros((), dtype=torch.float32, device=self.device)
        for flag in self._finite:
            bad += flag.logical_not()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        skipped = bool(bad)
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if skipped:
            for group in self.groups:
                for bucket in group.buckets:
                    bucket.grad_data.fill_(torch.nan)
            if self.pipeline is not None:
                self.pipeline.compressor.give_up()
        backward = [seconds_between(*span) for span in self._backward]
        self.engine.end_iteration(backward, exposed=self._exposed, skipped=skipped)
        self._finite, self._exposed, self._backward = [], Stopwatch(), []

    def remove(self) -> None:
        """Give Megatron its own reduction back; on every rank, between two iterations.

        What error feedback still holds is dropped. A second call does nothing.
        """
        while self.groups:
            self.groups.pop().edgc_leave()
        vars(self._last_chunk).pop("finish_grad_sync", None)  # that of its class comes back
        if self._worker is not None:
            self._stop()
        while self._worker_groups:
            dist.destroy_process_group(self._worker_groups.popitem()[1])
        if self._fused is not None:
            self._fused.remove()
        while self.hooks:
            self.hooks.pop().remove()
        if self._guarded is not None:
            del self._guarded.prepare_grads  # likewise
        self._fused = self._guarded = self.pipeline = None

    def time_backward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Forward hook: time the backward pass of each micro-batch, from the output's gradient to the last node."""
        if not (isinstance(output, Tensor) and output.requires_grad):
            return

        def started(gradient: Tensor) -> None:
            begin = mark(self.device)

            def finished() -> None:
                self._backward.append((begin, mark(self.device)))

            torch.autograd.Variable._execution_engine.queue_callback(finished)

        output.register_hook(started)

    def state_dict(self) -> dict[str, Any]:
        """State that this rank needs, besides model and optimizer, to go on exactly: save one per rank."""
        return {
            **_replica(),
            "place": place(),
            "engine": self.engine.state_dict(),
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "pipeline": None if self.pipeline is None else self.pipeline.compressor.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], *, changed_settings: bool = False) -> None:
        """Go on from this rank's :meth:`state_dict`, or from what :func:`edgc.checkpoints.saved_state.state_for` made
        of all.

        Args:
            changed_settings: go on with the settings of this attachment where the state is of others (but of the same
                method), instead of refusing it.

        Raises:
            UserError: the state is another rank's or of another model, lacks something, or is of other settings, which
                are named.
        """
        state = dict(state_for(state, **_replica()))
        need(state, ("place", "skipped", "skipped_in_a_row", "pipeline"), "state")
        refuse_other_place(state["place"])
        parameters = (parameter for group in self.groups for parameter in group.params)
        refuse_other_parameters(state, {self.names[p]: tuple(p.main_grad.shape) for p in parameters})
        if (state["pipeline"] is None) != (self.pipeline is None) and not changed_settings:
            what = "the saved state's pipeline is of a run that compressed the traffic between stages otherwise"
            raise UserError(what, fix="set pipeline.rank as it was, or load with changed_settings=True")
        self.engine.load_state_dict(state["engine"], changed_settings=changed_settings)
        if self.pipeline is not None and state["pipeline"] is not None:
            self.pipeline.compressor.load_state_dict(state["pipeline"])
        self.skipped = int(state["skipped"])
        self.skipped_in_a_row = int(state["skipped_in_a_row"])
        self._loaded = True


def place() -> dict[str, int]:
    """Coordinates of this rank in Megatron's layout; with context parallelism its ranks count as replicas, for their
    gradients are averaged in the same reduction."""
    return {
        "tensor": parallel_state.get_tensor_model_parallel_rank(),
        "pipeline": parallel_state.get_pipeline_model_parallel_rank(),
        "data": parallel_state.get_data_parallel_rank(with_context_parallel=True),
        "expert": parallel_state.get_expert_model_parallel_rank(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_rank(),
    }


def refuse_other_place(saved: Mapping[str, int]) -> None:
    """Refuse a state that was saved at another place than this rank's, but for its replica."""
    other = [key for key, here in place().items() if key != "data" and saved[key] != here]
    if other:
        what = f"the saved state is of {other[0]} parallel rank {saved[other[0]]}, not {place()[other[0]]}"
        raise UserError(what, fix="save and load one state per rank")


def _replica() -> dict[str, int]:
    """Number of the replica that this rank belongs to, and of how many."""
    return {
        "world": parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        "rank": place()["data"],
    }
