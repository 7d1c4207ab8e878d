"""One rank of a job of any size, on the meta device: memory and messages of a step, without memory or network.

The model, Megatron's gradient buffers and optimizer, EDGC's engine and its compressor are the ones of a training run,
built by the same functions. Their tensors have shapes and no memory, their process groups any size and no peers, so
the last stage of the 12.1 B model is built and taken through a step in seconds. Nothing here is a second formula: bytes
are counted where tensors are allocated (:class:`Ledger`) and where collectives are called
(:class:`~edgc.runtime.channel.Channel`).

What differs from a GPU: kernels that allocate scratch memory of their own, the allocator's rounding, and the memory
that CUDA and NCCL keep for themselves are not seen. It replaces functions of torch for the whole process, so it belongs
into a process of its own.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edgc.compressors.base import compressible
from edgc.compressors.powersgd import state
from edgc.errors import UserError
from edgc.megatron import cpu_shims
from experiments.simulation import placement
from experiments.spec.settings import RunConfig

with cpu_shims.without_compiler():
    from megatron.core import parallel_state, tensor_parallel

    from edgc.megatron import Attachment, adapter, attach
    from experiments.training.build import build_chunks, build_optimizer
    from experiments.training.model import transformer_config

META = torch.device("meta")
BY_VALUE = ("topk",)  # its selection of entries is sized by what it finds


class Ledger(TorchDispatchMode):
    """Counts the memory that the meta tensors made inside it would take.

    Wherever a program reads a number out of a meta tensor (whether gradients are finite, a norm) it gets 1.

    Attributes:
        live: bytes of what is alive, each storage once.
        peak: the largest ``live`` since it was last set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device == META:
            return {torch.bool: True}.get(args[0].dtype, 1.0)
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.device == META:
                self._see(value.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def stand_in_for_cuda() -> None:
    """Megatron asks for the current CUDA device wherever it allocates: it gets the meta device, for good.

    Raises:
        UserError: where there is a GPU.
    """
    if not cpu_shims.install(META):
        raise UserError("the dry run needs a process that sees no GPU", fix="set CUDA_VISIBLE_DEVICES to nothing")
    functional: Any = torch.nn.functional
    functional.dropout = _dropout
    state.random_factor = lambda seed, draw, name, length, rank: torch.empty(length, rank, device=META)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout as on a GPU, where a mask of one byte an entry is kept; elsewhere it would be of the input's type."""
    return torch.native_dropout(x, p, training)[0] if training and p > 0 else x


def not_followed(run: RunConfig) -> str | None:
    """Reason why a dry run cannot say what a method takes, if it cannot."""
    if run.edgc.method in BY_VALUE:
        return f"what {run.edgc.method} takes depends on values, which a dry run has none of"
    if run.edgc.fused_embedding:
        return "a fused embedding is sent after the reductions, where a dry run ends"
    return None


@dataclass(frozen=True)
class Step:
    """Memory and messages of a rank, in bytes. Its memory is at its highest in one of three parts of a step.

    Attributes:
        parameters, gradients, optimizer: what stays; Adam's moments, and masters where they are not the parameters.
        error_feedback: of the compressor, one set; None as :attr:`buffers`: nothing was compressed.
        buffers: what else the compressor keeps: the copy of error feedback that lets a step be taken back, factors,
            messages.
        activations: of one micro-batch, from the end of its forward pass to its backward pass.
        in_flight: micro-batches whose activations are held at the same time under 1F1B.
        working: what forward, backward and loss of one micro-batch take on top while they run.
        reducing, stepping: what the reduction and the optimizer's step take on top while they run.
        sent: by this rank in a step, to its data-parallel replicas.
    """

    parameters: int
    gradients: int
    optimizer: int
    error_feedback: int
    buffers: int
    activations: int
    in_flight: int
    working: int
    reducing: int
    stepping: int
    sent: int

    @property
    def kept(self) -> int:
        """Memory that is held between two steps."""
        return self.parameters + self.gradients + self.optimizer + self.error_feedback + self.buffers

    @property
    def all_activations(self) -> int:
        return self.in_flight * self.activations

    @property
    def total(self) -> int:
        """The highest memory in a step."""
        return self.kept + max(self.all_activations + self.working, self.reducing, self.stepping)


@dataclass(frozen=True)
class VirtualRank:
    """A rank of ``run``: ``rank`` is global, in Megatron's order: tensor fastest, then data, then pipeline."""

    run: RunConfig
    rank: int

    @property
    def coordinates(self) -> tuple[int, int, int]:
        """(data, tensor, pipeline)."""
        parallel = self.run.parallel
        rest, tensor = divmod(self.rank, parallel.tensor)
        return rest % parallel.data, tensor, rest // parallel.data

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations stage k of P holds under 1F1B: min(P - k, m) of m.

        Source: Narayanan et al., Efficient Large-Scale Language Model Training, arXiv 2104.04473, section 2.2.
        """
        return min(self.run.parallel.pipeline - self.coordinates[2], self.run.micro_batches)

    @property
    def _plain(self) -> RunConfig:
        """The run without what has no size: reductions that overlap with backward are the same in another thread, and
        clipping by the norm of the gradients takes a few numbers."""
        train = self.run.train.model_copy(update={"overlap_grad_reduce": False, "clip_grad": 0.0})
        return self.run.model_copy(update={"train": train})

    def step(self, rank: int | None = None) -> Step:
        """Take this rank through the second of two steps, when everything that stays has been allocated.

        Args:
            rank: of the low-rank approximation instead of the one that the method begins with; for ``edgc``, which
                begins with none.
        """
        with self.place() as (chunks, ledger):
            optimizer, _ = build_optimizer(self._plain, chunks)
            # A norm is read as a number, and takes a few.
            optimizer.get_grad_norm = float
            # The distributed optimizer gathers its parameters in place, by a collective that meta tensors lack.
            chunks[0].start_param_sync = lambda *_, **__: None
            attachment = self._attach(chunks)
            if rank is not None:
                engine = attachment.engine
                engine.plan = replace(engine.plan, ranks=tuple(rank for _ in engine.plan.ranks))
            parameters = _bytes([p.data for p in chunks[0].parameters()])
            kept_by_method, _ = self._reduce(attachment, ledger)
            before = ledger.live
            optimizer.step()
            kept_by_optimizer = ledger.live - before
            activations, working = self._micro_batch(chunks[0], ledger)
            more, reducing = self._reduce(attachment, ledger)
            before = ledger.peak = ledger.live
            optimizer.step()
            error_feedback = _bytes(getattr(attachment.engine.compressor, "errors", {}).values())
            assert attachment.last is not None
            return Step(
                parameters=parameters,
                gradients=_bytes([b.grad_data for b in (*chunks[0].buffers, *chunks[0].expert_parallel_buffers)]),
                optimizer=kept_by_optimizer + _masters(chunks[0], optimizer),
                error_feedback=error_feedback,
                buffers=kept_by_method + more - error_feedback,
                activations=activations,
                in_flight=self.in_flight,
                working=working,
                reducing=reducing,
                stepping=ledger.peak - before,
                sent=attachment.last.statistics.bytes,
            )

    @contextlib.contextmanager
    def place(self) -> Iterator[tuple[list[Any], Ledger]]:
        """This process as the rank: its process groups, its model chunk, and a ledger that is counting."""
        stand_in_for_cuda()
        run, parallel = self.run, self.run.parallel
        vocab_size = placement.shape_of(run).vocab_size
        dist.init_process_group("fake", rank=self.rank, world_size=parallel.world, store=FakeStore())
        try:
            parallel_state.initialize_model_parallel(
                parallel.tensor, parallel.pipeline, create_gloo_process_groups=False
            )
            tensor_parallel.model_parallel_cuda_manual_seed(run.seed, inference_rng_tracker=True)
            config = transformer_config(run)
            # As on a GPU: parameters are made on the device, without values here.
            config.use_cpu_initialization = config.perform_initialization = False
            with Ledger() as ledger:
                yield build_chunks(self._plain, vocab_size, config), ledger
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
            gc.collect()

    def _attach(self, chunks: list[Any]) -> Attachment:
        """Attach as :func:`edgc.megatron.attach`; the placement gives the other stages' answers to its one question."""
        run, least = self.run, self.run.edgc.min_compression_elements

        def gather_objects(answer: Any, group: Any = None) -> list[Any]:
            stages = []
            for stage in placement.build(placement.shape_of(run)):
                used = [t for t in stage.tensors if compressible(t.shape, least)]
                # 32 bits: fp32 gradients at every precision.
                matrices = [adapter.Matrix(t.shape[0], t.shape[1], 32, "embedding" in t.name) for t in used]
                stages.append((stage.stage, matrices))
            stages[answer[0]] = answer
            return stages

        with mock.patch.object(adapter, "gather_objects", gather_objects):
            attachment = attach(chunks, run.edgc, iterations=run.train.iterations)
        assert isinstance(attachment, adapter.Attachment)
        return attachment

    def _micro_batch(self, chunk: Any, ledger: Ledger) -> tuple[int, int]:
        """Forward and backward of one micro-batch: bytes held in between, and what the passes take on top."""
        run, stage = self.run, self.coordinates[2]
        size, length = run.train.micro_batch, run.model.sequence_length
        inner = getattr(chunk.module, "module", chunk.module)
        before = ledger.peak = ledger.live
        arriving = None
        if stage > 0:
            rows = length // run.parallel.tensor if run.parallel.sequence else length
            dtype = chunk.module.config.pipeline_dtype
            arriving = torch.empty(rows, size, run.model.hidden, dtype=dtype, device=META, requires_grad=True)
            inner.set_input_tensor(arriving)
        tokens = torch.empty(size, length, dtype=torch.int64, device=META)
        output = chunk(tokens, tokens, None, labels=tokens if stage == run.parallel.pipeline - 1 else None)
        if stage == run.parallel.pipeline - 1:
            output = output.float().mean()
        held = ledger.live - before
        torch.autograd.backward(output, torch.empty_like(output))
        del output, arriving, tokens
        inner.set_input_tensor(None)
        return held, ledger.peak - before - held

    def _reduce(self, attachment: Attachment, ledger: Ledger) -> tuple[int, int]:
        """The reductions of one step: bytes more that the method keeps since, and what they take while they run."""
        before = ledger.peak = ledger.live
        plan = attachment.engine.plan
        for group in attachment.groups:
            group.start_grad_sync()
            group.grad_reduce_handle = None
        attachment.engine.end_iteration()
        attachment.engine.plan = plan
        more = ledger.live - before
        return more, ledger.peak - ledger.live


def _bytes(tensors: Any) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _masters(chunk: Any, optimizer: Any) -> int:
    """Bytes of parameters that the optimizer keeps copies of from its making on."""
    parameters = {p.untyped_storage()._cdata for p in chunk.parameters()}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    return _bytes([p for p in stepped if p.untyped_storage()._cdata not in parameters])
