"""Compressed backward traffic between the pipeline stages of Megatron-Core.

Optimus-CC's compressed backpropagation with lazy error propagation (Song et al., ASPLOS 2023), through the public
``p2p_communicator`` argument of Megatron's forward-backward functions::

    communicator = attachment.pipeline  # of edgc.megatron.attach, where edgc_config.pipeline has a rank
    for every training iteration:
        communicator.begin_iteration(micro_batches)
        forward_backward(..., **communicator.schedule_arguments())

A stage's backward messages are compressed as in :mod:`edgc.megatron.activation`, each model chunk with its own error
feedback and warm start, on every tensor-parallel rank its own shard or copy. What micro-batch i left out goes with
micro-batch i + 1, what the last one left out with the first of the next iteration. Activations are never compressed,
so evaluation is not touched. Error feedback is in units of the scaled loss: the attachment lets it follow.

``epilogue_only`` compresses what the receiving stage uses in its cool-down (the epilogue), where no forward pass is
left to hide a transfer: with w warm-up micro-batches there, the last w that it is sent; under 1F1B w = min(stages -
stage - 1, micro_batches). The public code of Optimus-CC marks these as flush, and leaves interleaved schedules alone;
there w is Megatron's number of warm-up steps, less those that start from the loss. What goes uncompressed leaves the
error feedback as it is, as in that code.

This cannot dead-lock where Megatron would not: a call posts what Megatron's own would post, to the same peers, all of
it before it waits. Only the sizes of backward messages differ, and both ends know them by counting. Messages carry no
tag, so where both neighbours are one rank (two stages, interleaved) they are told apart by their order alone. There the
schedules' calls with traffic in both directions pair off, one on each rank, and a call posts its forward messages
before its backward ones on every rank. (Megatron's own batched call would, with ``batch_p2p_comm``, swap the two.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, _p2p_ops
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from edgc.errors import UserError
from edgc.megatron.activation import ActivationCompressor, Layout, Traffic
from edgc.sections import PipelineConfig

_GROUPS = ["tp", "cp", "embd", "pos_embd", "pp", "dp_cp"]  # those that the schedules ask for
_REFUSED = ("variable_seq_lengths", "use_ring_exchange_p2p", "mtp_standalone", "overlap_moe_expert_parallel_comm")


@dataclass(frozen=True, kw_only=True)
class BackwardSchedule:
    """Order of backward steps under 1F1B (``chunks`` None) or interleaved 1F1B: plain counting.

    Link i carries gradients from stage i + 1 to stage i; under an interleaved schedule the last link goes from stage 0
    to the last stage. A stage runs its backward steps in one order, the same on every stage, so over a link gradients
    come in the order in which the receiver uses them, and "the last n transfers" means the same on both ends.

    Args:
        stages: pipeline size P.
        chunks: model chunks a stage, V; None without interleaving.
        group: micro-batches that a chunk runs one after another (``microbatch_group_size_per_vp_stage``).
    """

    stages: int
    chunks: int | None = None
    group: int = 1

    def steps(self, micro_batches: int) -> list[int]:
        """Model chunk of every backward step of an iteration, in order."""
        count = self.chunks or 1
        return [
            chunk
            for start in range(0, micro_batches, self.group if self.chunks else micro_batches)
            for chunk in reversed(range(count))
            for _ in range(start, min(start + self.group, micro_batches) if self.chunks else micro_batches)
        ]

    def warmup(self, stage: int, micro_batches: int) -> int:
        """Forward steps before the first backward step: as many backward steps are left for the cool-down."""
        later = self.stages - stage - 1
        if self.chunks is None:
            return min(later, micro_batches)
        steps = 2 * later + (self.chunks - 1) * self.group
        return min(steps, micro_batches * self.chunks)

    def sent(self, stage: int, micro_batches: int) -> list[int]:
        """Model chunk of the sender of every gradient that ``stage`` sends in an iteration, in order."""
        if self.stages == 1:
            return []
        # The model's first chunk, the first one of stage 0, has nobody to send to.
        return [chunk for chunk in self.steps(micro_batches) if stage > 0 or chunk > 0]

    def cooldown(self, receiver: int, micro_batches: int) -> int:
        """Number of the gradients sent to ``receiver`` that it uses in its cool-down; they are the last ones."""
        steps = self.steps(micro_batches)
        last = steps[len(steps) - self.warmup(receiver, micro_batches) :]
        # The model's last chunk, on the last stage, starts from the loss.
        loss = (self.chunks or 1) - 1 if receiver == self.stages - 1 else None
        return sum(chunk != loss for chunk in last)


class CompressedP2P(P2PCommunicator):
    """Megatron's communicator between pipeline stages, with the backward direction compressed.

    Args:
        pp_group: the pipeline-parallel group.
        config: Megatron's ``TransformerConfig`` (or any ``ModelParallelConfig``).
        pipeline: without a rank everything is sent as it is, and counted.
        seed: of the first Q (``EDGCConfig.seed``).

    Attributes:
        compressor: holds error feedback and warm starts.
        traffic: of the iteration in progress, or of the last one.

    Raises:
        UserError: Megatron's settings have messages whose shapes or order are not known beforehand.
    """

    def __init__(self, *, pp_group: dist.ProcessGroup, config: Any, pipeline: PipelineConfig, seed: int = 0) -> None:
        for key in _REFUSED:
            if getattr(config, key, False):
                what = f"edgc compresses no pipeline traffic under {key}"
                raise UserError(what, where=type(config).__name__, fix=f"set {key} to False, or pipeline.rank to null")
        super().__init__(pp_group, config)
        self.stage, stages = pp_group.rank(), pp_group.size()
        self.next_stage, self.prev_stage = (self.stage + 1) % stages, (self.stage - 1) % stages
        self.epilogue_only = pipeline.epilogue_only
        self.schedule = BackwardSchedule(
            stages=stages,
            chunks=config.virtual_pipeline_model_parallel_size,
            group=config.microbatch_group_size_per_vp_stage or stages,
        )
        self.compressor = ActivationCompressor(pipeline.rank, seed)
        self.traffic = Traffic()
        self._to_send: Iterator[tuple[int, bool]] = iter(())
        self._to_receive: Iterator[tuple[int, bool]] = iter(())
        self._expected = (0, 0)
        self._begun = False
        self.starting: weakref.WeakMethod[Callable[[], None]] | None = None  # called when an iteration begins

    def schedule_arguments(self) -> dict[str, Any]:
        """Arguments that Megatron's forward-backward function is to be called with, besides its usual ones."""
        groups = ProcessGroupCollection.use_mpu_process_groups(_GROUPS)
        return {"p2p_communicator": self, "pg_collection": groups}

    def begin_iteration(self, micro_batches: int) -> None:
        """Begin an iteration: call it on every rank before each forward-backward call that trains.

        Args:
            micro_batches: that this iteration runs through the pipeline (``num_microbatches``).

        Raises:
            UserError: the last iteration ran through another number of micro-batches than was said.
        """
        counts = (self.traffic.sent, self.traffic.received)
        if counts != self._expected:
            what = f"the last iteration sent and received {counts} gradients, {self._expected} were announced"
            fix = "give it the num_microbatches that the forward-backward function is called with"
            raise UserError(what, where="CompressedP2P.begin_iteration", fix=fix)
        if self.starting is not None and (starting := self.starting()) is not None:
            starting()
        self.compressor.begin_iteration()
        self._begun = True
        to_send = self._plan(self.stage, self.prev_stage, micro_batches)
        to_receive = self._plan(self.next_stage, self.stage, micro_batches)
        self._expected = (len(to_send), len(to_receive))
        self._to_send, self._to_receive = iter(to_send), iter(to_receive)
        self.traffic = Traffic()

    def _plan(self, sender: int, receiver: int, micro_batches: int) -> list[tuple[int, bool]]:
        """For each gradient over a link: the sender's model chunk, and whether it may be compressed."""
        chunks = self.schedule.sent(sender, micro_batches)
        first = len(chunks) - self.schedule.cooldown(receiver, micro_batches) if self.epilogue_only else 0
        return [(chunk, i >= first) for i, chunk in enumerate(chunks)]

    def check_used(self) -> None:
        """Check, at the end of every iteration, that it ran with this communicator.

        Raises:
            UserError: the iteration ran without this communicator, so that nothing was compressed.
        """
        if self.pp_group.size() > 1 and not self._begun:
            what = "pipeline.rank is set, but the schedule ran without attachment.pipeline"
            fix = "call its begin_iteration(num_microbatches) and pass **attachment.pipeline.schedule_arguments()"
            raise UserError(what, where="edgc.megatron", fix=fix)
        self._begun = False

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, Any]:
        if tensor_send_prev is None and not recv_next:
            return super()._communicate(
                tensor_send_next=tensor_send_next,
                tensor_send_prev=None,
                recv_prev=recv_prev,
                recv_next=False,
                tensor_shape=tensor_shape,
                wait_on_reqs=wait_on_reqs,
            )
        assert wait_on_reqs or not self.config.batch_p2p_comm

        def empty() -> Tensor:  # to receive into, as Megatron makes it
            device, dtype = torch.cuda.current_device(), self.config.pipeline_dtype
            return torch.empty(tensor_shape, requires_grad=True, device=device, dtype=dtype)

        activation, gradient = empty() if recv_prev else None, empty() if recv_next else None
        arriving, finish = self._incoming(gradient) if gradient is not None else (None, None)
        leaving = self._outgoing(tensor_send_prev) if tensor_send_prev is not None else None
        requests = self._start(tensor_send_next, activation, leaving, arriving)
        if wait_on_reqs:
            for request in requests if isinstance(requests, list) else requests.values():
                request.wait()
            if self.config.batch_p2p_comm and self.config.batch_p2p_sync:
                torch.cuda.synchronize()
            if finish is not None:
                finish()
            return activation, gradient, None
        if finish is not None:
            requests["recv_next"] = _Pending(requests["recv_next"], finish)
        if leaving is not None:
            requests["send_prev"] = _Pending(requests["send_prev"], keep=leaving)
        return activation, gradient, requests

    def _outgoing(self, gradient: Tensor) -> Tensor:
        """Message that goes over the link for the next gradient."""
        chunk, compress = self._next(self._to_send)
        layout = self.compressor.layout(gradient.shape, gradient.dtype) if compress else None
        message, statistics = gradient, self.traffic.statistics
        if layout is not None:
            message = self.compressor.compress(f"chunk{chunk}", gradient, layout, statistics)
            self.traffic.sent_compressed += 1
        self.traffic.sent += 1
        self.traffic.dense_bytes += gradient.nbytes
        statistics.bytes += message.nbytes
        return message

    def _incoming(self, gradient: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
        """Tensor that the next gradient is received into, and what then remains to be done."""
        _, compressed = self._next(self._to_receive)
        layout: Layout | None = self.compressor.layout(gradient.shape, gradient.dtype) if compressed else None
        self.traffic.received += 1
        if layout is None:
            return gradient, None
        self.traffic.received_compressed += 1
        message = layout.empty(gradient.device)
        return message, partial(self.compressor.decompress, message, layout, gradient, self.traffic.statistics)

    def _next(self, plan: Iterator[tuple[int, bool]]) -> tuple[int, bool]:
        try:
            return next(plan)
        except StopIteration:
            what = "more gradients between pipeline stages than were announced"
            fix = "call begin_iteration with num_microbatches before each training iteration"
            raise UserError(what, where="CompressedP2P", fix=fix) from None

    def _start(
        self, send_next: Tensor | None, recv_prev: Tensor | None, send_prev: Tensor | None, recv_next: Tensor | None
    ) -> Any:
        """Post everything; the requests in the container that the schedules expect."""
        if not self.config.batch_p2p_comm:
            # Forward before backward, with Megatron's rule for which group carries which of them.
            return _p2p_ops(
                tensor_send_prev=send_prev,
                tensor_recv_prev=recv_prev,
                tensor_send_next=send_next,
                tensor_recv_next=recv_next,
                group=self.pp_group,
                prev_pipeline_rank=self.prev_rank,
                next_pipeline_rank=self.next_rank,
            )
        messages = (
            (dist.irecv, recv_prev, self.prev_rank),
            (dist.isend, send_next, self.next_rank),
            (dist.isend, send_prev, self.prev_rank),
            (dist.irecv, recv_next, self.next_rank),
        )
        present = [(operation, tensor, peer) for operation, tensor, peer in messages if tensor is not None]
        return dist.batch_isend_irecv([dist.P2POp(*message, self.pp_group) for message in present])


class _Pending:
    """A request whose message lives as long as it; :meth:`wait` may end with work on what has arrived."""

    def __init__(self, request: Any, finish: Callable[[], None] | None = None, *, keep: Tensor | None = None) -> None:
        self._request, self._finish, self._keep = request, finish, keep

    def wait(self) -> None:
        self._request.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
