"""EDGC as a communication hook of PyTorch's ``DistributedDataParallel``; :mod:`edgc.ddp.registration` attaches it.

Buckets are reduced beside backward, several in flight (:mod:`edgc.buckets`). Ranks pair collectives by order, and
ours depends on the sequence of buckets alone, never on timing. State is keyed by parameter name,
so it survives buckets being cut anew after the first iteration.

What follows from how DDP works:

* An iteration is one synchronised backward; those under ``no_sync`` only accumulate. (With a static graph torch itself
  fails, with or without a hook, if the very first backward is under ``no_sync``: its issue 143580.)
* A parameter that no rank used keeps the ``.grad`` that it had, and DDP throws the result away. No rank knows what the
  others used when it has to send; so one that did not use a parameter itself sends zeros and keeps its error feedback.
  A ``.grad`` that was left from an earlier step is sent later where others did use the parameter, and else stays
  where it is. What arrives in ``.grad`` and the mean of what is kept are what was computed.
* If any rank's gradient is not finite, the bucket is not finite on any rank, so every rank's ``GradScaler`` (or own
  check) skips the same step. Error feedback, warm starts and the controller's means of all buckets are then as if the
  step had never been, at the price of a second error feedback.
* A ``GradScaler`` has to be given to :func:`~edgc.ddp.registration.register`: error feedback is kept in the unit of
  the gradients, and entropies are those of the gradients without the scale. With scales that are powers of two, as
  torch's are, ranks, bytes and decisions are those of a run without one, bit for bit.
* Parameters of more than two dimensions are compressed as matrices, first dimension by the rest.
"""

# No `from __future__ import annotations`: DDP checks the hook's annotations and wants them as objects.
import warnings
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from edgc.buckets import Bucket, BucketWorker
from edgc.checkpoints.saved_state import State, refuse_other_parameters, state_for
from edgc.checks import need
from edgc.compressors import Gradient
from edgc.compressors.base import matrix_shape
from edgc.engine import Engine, Scaler, loss_scale
from edgc.errors import UserError, copied
from edgc.handle import EngineHandle
from edgc.runtime.groups import all_here

PATIENCE = timedelta(seconds=10)
"""For ranks that may be lost."""


class Slot:
    """State of DDP's hook. DDP takes one per model and holds it for good: handles come and go in it.

    Without a handle gradients are averaged plainly.

    Args:
        group: process group of the model; None in a copy of a model, which has no hook any more.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group: Any = group
        self.handle: Any = None  # Handle, or edgc.ddp.strategy.StrategyHandle

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle of the model averages plainly, as with the hooks of torch; it can be registered anew."""
        return Slot, ()


def hook(slot: Slot, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of DDP's, as the handle in ``slot`` does it."""
    future: torch.futures.Future[torch.Tensor]
    future = allreduce_hook(slot.group, bucket) if slot.handle is None else slot.handle._reduce(bucket)
    return future


class Handle(EngineHandle):
    """EDGC on one rank of a DDP job; made by :func:`~edgc.ddp.registration.register`.

    It must not refer to the model: the model holds it, by ways that the garbage collector does not see.

    Attributes:
        group: process group of the reductions, made for this handle, which ends it.

    Args:
        slot: of the model.
        find_unused: whether backward may leave out parameters, whose ``.grad`` is then left as it was.
    """

    def __init__(
        self,
        engine: Engine,
        names: dict[Tensor, str],
        parameters: int,
        device: torch.device,
        group: dist.ProcessGroup,
        slot: Slot,
        scaler: Scaler | None = None,
        *,
        find_unused: bool = False,
    ) -> None:
        self.engine, self.group, self._ended = engine, group, False
        self._world, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._names, self._scaler = names, scaler
        self._slot, self._model_group = weakref.ref(slot), slot.group
        self._worker = BucketWorker(engine, group, device, parameters, gathers=True)
        self._stop = weakref.finalize(self, self._worker.stop)
        self._earlier: list[tuple[Tensor, int]] = []  # gradients from before this iteration, with their versions
        self._hooks: list[Any] = []
        # Parameters that backward has come by since their gradients were last averaged, also under no_sync; of those
        # that have no hook, since they are frozen, nothing is known, and they count as used.
        self._used: set[str] = set()
        self._watched: set[str] = set()
        for parameter, name in names.items() if find_unused else ():
            if parameter.requires_grad:
                self._watched.add(name)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(_note, self._used, name)))

    @property
    def active(self) -> bool:
        """True while EDGC averages the gradients: until :meth:`remove`."""
        return bool(self._stop.alive)

    @property
    def skipped(self) -> int:
        """Number of steps given up so far because a gradient was not finite; methods without state do not look."""
        self._settle()
        return self._worker.skipped

    def state_dict(self) -> dict[str, Any]:
        """State that this rank needs, besides model and optimizer, to go on: save one per rank.

        A run that goes on with it equals one that never stopped, bit for bit if it was saved after the first two
        iterations, in which DDP settles its buckets.

        Raises:
            UserError: inside an iteration.
        """
        self._refuse_inside_iteration()
        return {
            "world": self._world,
            "rank": self._rank,
            "engine": self.engine.state_dict(),
            "layout": self._worker.layout,
            "memory": self._memory,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: State | Sequence[State], *, changed_settings: bool = False) -> None:
        """Go on from this rank's :meth:`state_dict`, or from those of all ranks in a list.

        The list is for another number of ranks than it was saved from: error feedback is then redistributed so that
        the average owes what it owed before (:mod:`edgc.checkpoints.saved_state`).

        Args:
            changed_settings: go on with the settings given to :func:`~edgc.ddp.registration.register` where the state
                is of others (but of the same method), instead of refusing it.

        Raises:
            UserError: inside an iteration; for a state that is not this rank's or not this model's, whose parameters
                had another memory format, that lacks something, or that is of other settings, which are named.

        Warns:
            UserWarning: when error feedback was redistributed.
        """
        self._refuse_inside_iteration()
        state = state_for(state, world=self._world, rank=self._rank)
        need(state, ("layout", "memory", "skipped"), "state")
        refuse_other_parameters(state, {name: matrix_shape(p.shape) for p, name in self._names.items()})
        saved, here = state["memory"], self._memory
        for name in saved.keys() | here.keys():
            if saved.get(name) != here.get(name):
                orders = [f"order {order}" if order else "usual order" for order in (saved.get(name), here.get(name))]
                what = f"{name} has its dimensions in the {orders[0]} in the saved memory, in the {orders[1]} here"
                raise UserError(what, fix="give the model the memory_format that it had, and wrap it anew")
        stream = self._worker.stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        # The tensors belong to the worker's stream, which alone uses and frees them.
        with torch.cuda.stream(stream):
            self.engine.load_state_dict(state["engine"], changed_settings=changed_settings)
            if self._scaler is None:  # nobody else brings what is kept from the saved loss scale to that of now
                self.engine.rescale(1.0)
        self._worker.skipped = state["skipped"]
        self._worker.replay(state["layout"])

    @property
    def _memory(self) -> dict[str, list[int]]:
        """Order in which the dimensions of parameters lie in memory, the one of the largest stride first, where that is
        not the usual one and error feedback lies as they do."""
        orders = {}
        for parameter, name in self._names.items():
            if parameter.dim() <= 2:  # also of frozen subclasses that answer no more than they must
                continue
            strides = _strides(parameter)
            axes = [axis for axis, size in enumerate(parameter.shape) if size > 1]
            order = sorted(axes, key=lambda axis: -strides[axis])
            if order != axes:
                orders[name] = order
        return orders

    def refuse_sparse(self, module: torch.nn.Module) -> None:
        """Refuse sparse gradients of ``module``'s matrices when they come, before DDP meets them, where only then they
        are known to be sparse: in modules that are not torch's own."""
        for owner in module.modules():
            if not type(owner).__module__.startswith("torch.nn."):
                for parameter in owner.parameters(recurse=False):
                    if parameter.dim() == 2 and parameter.requires_grad and parameter in self._names:
                        refuse = partial(_refuse_sparse, self._names[parameter])
                        self._hooks.append(parameter.register_post_accumulate_grad_hook(refuse))

    def remove(self) -> None:
        """End EDGC: from now on DDP averages plainly. What error feedback still holds is dropped.

        To be called on every rank between the same two iterations; the model can be registered anew. Waits for the
        other ranks, as long as the timeout of the model's group says; after an error, for seconds.

        Warns:
            UserWarning: if another rank is lost; this one has then ended alone.
        """
        if torch._C._current_graph_task_id() >= 0:  # and not whether an iteration has ended: a backward may have failed
            raise UserError("edgc.ddp was called inside an iteration", fix="call it after backward")
        self._settle()
        self._stop()
        while self._hooks:
            self._hooks.pop().remove()
        slot = self._slot()
        if slot is not None and slot.handle is self:
            slot.handle = None
        if not self._ended:
            self._ended = True
            try:
                all_here(self._model_group, PATIENCE if self._worker.error is not None else None)
            except RuntimeError as error:
                reason = (str(error).splitlines() or ["no message"])[0]
                warnings.warn(f"edgc.ddp: not every rank came to handle.remove(): {reason}", stacklevel=2)
            dist.destroy_process_group(self.group)

    def _refuse_inside_iteration(self) -> None:
        if self._worker.busy:
            raise UserError("edgc.ddp was called inside an iteration", fix="call it after backward")
        self._settle()

    def _settle(self) -> None:
        if not self._worker.busy:
            self._worker.settle()

    def _loss_scale(self, device: torch.device) -> float | None:
        """Loss scale of this iteration; None if it is known already or nobody knows it."""
        if self._scaler is None or (self._worker.inline and self._worker.busy):
            return None
        return loss_scale(self._scaler, device, where="edgc.ddp")

    def _reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Start to average a bucket; DDP calls this in the same order of buckets on every rank."""
        if self._worker.error is not None:
            raise copied(self._worker.error)
        buffer = bucket.buffer()
        on_gpu = buffer.device.type == "cuda"
        storage = buffer.untyped_storage().data_ptr()
        gradients = [
            Gradient(self._names[parameter], _matrix(parameter, view), unused=self._unused(parameter, storage))
            for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        if any(gradient.tensor.untyped_storage().data_ptr() != storage for gradient in gradients):
            raise RuntimeError("edgc.ddp: this version of torch does not give gradients as views of their bucket")
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if on_gpu else None)
        ready = torch.cuda.current_stream(buffer.device).record_event() if on_gpu else None
        # DDP reads the future in C++, where an error set from Python is seen only by way of `then`.
        checked = future.then(torch.futures.Future.value)
        scale = self._loss_scale(buffer.device)
        self._worker.put(Bucket(bucket.is_last(), gradients, buffer, future, ready, scale=scale))
        if bucket.is_last() and torch._C._current_graph_task_id() >= 0:
            # Raises an error of the worker in the thread that called backward, as it is and in one line.
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._averaged(future))
        return checked

    def _unused(self, parameter: Tensor, storage: int) -> bool:
        """True if DDP leaves the parameter's ``.grad`` as it is unless other ranks have used it."""
        name, gradient = self._names[parameter], parameter.grad
        used = name in self._used or name not in self._watched
        self._used.discard(name)
        if gradient is None:
            return True
        # A .grad that lies in the bucket gets the result in any case.
        if used or gradient.untyped_storage().data_ptr() == storage:
            return False
        self._earlier.append((parameter, gradient._version))
        return True

    def _averaged(self, future: torch.futures.Future[Tensor]) -> None:
        """Note that all buckets are averaged, and that DDP is about to copy them to where they belong."""
        try:
            future.wait()
        except Exception as error:
            # The future keeps what it raises, and is itself kept by the model, so the frames must not be.
            raise copied(error.with_traceback(None)) from error.__cause__
        if self._earlier:
            torch.autograd.Variable._execution_engine.queue_callback(self._copied)

    def _copied(self) -> None:
        """DDP has written every result that it does not throw away."""
        earlier, self._earlier = self._earlier, []
        for parameter, version in earlier:
            gradient = parameter.grad
            if gradient is not None and gradient._version == version:
                flat = gradient.new_empty(gradient.numel())
                flat.as_strided(gradient.shape, _strides(parameter)).copy_(gradient)
                self._worker.take_back(self._names[parameter], _matrix(parameter, flat.view(gradient.shape)))


def _note(used: set[str], name: str, _: Tensor) -> None:
    used.add(name)


def _refuse_sparse(name: str, parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise UserError(f"parameter {name} has a sparse gradient", where="edgc.ddp", fix="look it up with sparse=False")


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """Strides of a parameter's gradient in its bucket: its own where it has memory to itself and leaves no gaps."""
    alike = torch.empty_like(parameter, device="meta").stride()
    return alike if alike == parameter.stride() else torch.empty(parameter.shape, device="meta").stride()


def _matrix(parameter: Tensor, view: Tensor) -> Tensor:
    """The gradient as the matrix (or vector) that it is.

    ``view`` has the parameter's shape, but DDP lays gradients out in memory as their parameters lie: under a
    transposed parameter its entries are in the wrong places.
    """
    if view.dim() == 2 and not parameter.is_contiguous() and parameter.mT.is_contiguous():
        return view.view(view.shape[::-1]).mT
    return view.flatten(1) if view.dim() > 2 else view
