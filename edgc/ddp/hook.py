"""EDGC as a communication hook of PyTorch's ``DistributedDataParallel``; :mod:`edgc.ddp.registration` attaches it.

Buckets are reduced beside backward, several in flight (:mod:`edgc.buckets`). Ranks pair collectives by order, and
ours depends on the sequence of buckets alone, never on timing. State is keyed by parameter name,
so it survives buckets being cut anew after the first iteration.

What follows from how DDP works:

* An iteration is one synchronised backward; those under ``no_sync`` only accumulate. (With a static graph torch itself
  fails, with or without a hook, if the very first backward is under ``no_sync``: its issue 143580.)
* A parameter that this rank did not use has a gradient of zero, but its error feedback is sent. If no rank used it,
  DDP throws the result away, and what was sent of the error with it.
* If any rank's gradient is not finite, the bucket is not finite on any rank, so every rank's ``GradScaler`` (or own
  check) skips the same step. Error feedback, warm starts and the controller's means of all buckets are then as if the
  step had never been, at the price of a second error feedback (``whole_steps``).
* A ``GradScaler`` has to be given to :func:`register`: error feedback is kept in the unit of the gradients, and
  entropies are those of the gradients without the scale. With scales that are powers of two, as torch's are, ranks,
  bytes and decisions are those of a run without one, bit for bit.
* Parameters of more than two dimensions are compressed as matrices, first dimension by the rest.
"""

# No `from __future__ import annotations`: DDP checks the hook's annotations and wants them as objects.
import math
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from edgc.buckets import Bucket, BucketWorker, Log
from edgc.checkpoints.saved_state import State, refuse_other_parameters, state_for
from edgc.checks import need
from edgc.compressors import Gradient
from edgc.control.controller import Decision
from edgc.engine import Engine, Iteration
from edgc.errors import UserError, copied
from edgc.runtime.groups import all_here


class Scaler(Protocol):
    """What is asked of a ``GradScaler``."""

    def scale(self, outputs: Any) -> Any:
        """``outputs`` times the loss scale."""


class Handle:
    """EDGC on one rank of a DDP job; made by :func:`register`.

    It must not refer to the model: the model holds it, by ways that the garbage collector does not see.

    Attributes:
        engine: reduces the gradients; not to be called from outside.
        group: process group of the reductions.

    Args:
        own: whether ``group`` was made for this handle, which then ends it.
    """

    def __init__(
        self,
        engine: Engine,
        names: dict[Tensor, str],
        parameters: int,
        device: torch.device,
        group: dist.ProcessGroup,
        model_group: dist.ProcessGroup,
        scaler: Scaler | None = None,
        *,
        own: bool = False,
    ) -> None:
        self.engine = engine
        self.group = group
        self._own = own
        self._world, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._names = names
        self._model_group = model_group
        self._scaler = scaler
        self._worker = BucketWorker(engine, group, device, parameters)
        self._stop = weakref.finalize(self, self._worker.stop)

    @property
    def last(self) -> Iteration | None:
        """The last iteration: bytes, rank, entropy, times and errors; None before the first."""
        self._settle()
        return self.engine.last

    @property
    def decision(self) -> Decision | None:
        """The controller's decision at the end of the last iteration; None if it took none."""
        self._settle()
        return self.engine.decision

    def add_loss(self, loss: float) -> None:
        """Tell policy ``loss`` the training loss, without a loss scale, after every backward, on at least one rank.

        Raises:
            UserError: inside an iteration.
        """
        self._refuse_inside_iteration()
        self.engine.add_loss(loss)

    @property
    def skipped(self) -> int:
        """Steps that were given up so far because a gradient was not finite; stateless methods do not look.

        Without ``whole_steps`` it counts reductions.
        """
        self._settle()
        return int(self._worker.skipped)

    @property
    def log(self) -> Log | None:
        """Called with what :attr:`last` and :attr:`decision` are, after each iteration and in another thread."""
        return self._worker.log

    @log.setter
    def log(self, log: Log | None) -> None:
        self._worker.log = log

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs, besides model and optimizer, to go on: save one per rank.

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
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: State | Sequence[State], *, changed_settings: bool = False) -> None:
        """Go on from this rank's :meth:`state_dict`, or from those of all ranks in a list.

        The list is for another number of ranks than it was saved from: error feedback is then redistributed so that
        the average owes what it owed before (:mod:`edgc.checkpoints.saved_state`).

        Args:
            changed_settings: go on with the settings given to :func:`register` where the state is of others (but of the
                same method), instead of refusing it.

        Raises:
            UserError: inside an iteration; for a state that is not this rank's or not this model's, that lacks
                something, or that is of other settings, which are named.

        Warns:
            UserWarning: when error feedback was redistributed.
        """
        self._refuse_inside_iteration()
        own = state_for(state, world=self._world, rank=self._rank)
        need(own, ("layout", "skipped"), "state")
        refuse_other_parameters(own, {name: matrix_shape(p) for p, name in self._names.items()})
        stream = self._worker.stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        # The tensors belong to the worker's stream, which alone uses and frees them.
        with torch.cuda.stream(stream):
            self.engine.load_state_dict(own["engine"], changed_settings=changed_settings)
        self._worker.skipped = own["skipped"]
        self._worker.replay(own["layout"])

    def remove(self) -> None:
        """End EDGC: from now on DDP averages plainly. What error feedback still holds is dropped.

        To be called on every rank between the same two iterations.
        """
        self._refuse_inside_iteration()
        self._stop()
        if self._own:
            self._own = False
            all_here(self._model_group)
            dist.destroy_process_group(self.group)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle of the model averages plainly, as with the hooks of torch; it can be registered anew."""
        return Unregistered, ()

    def _refuse_inside_iteration(self) -> None:
        if self._worker.busy:
            raise UserError("edgc.ddp was called inside an iteration", fix="call it after backward")
        self._settle()

    def _settle(self) -> None:
        if not self._worker.busy:
            self._worker.settle()

    def _loss_scale(self, device: torch.device) -> float | None:
        """What the gradients of this iteration come multiplied by; None if it is known or nobody knows it."""
        if self._scaler is None or (self._worker.inline and self._worker.busy):
            return None
        scale = float(self._scaler.scale(torch.ones((), dtype=torch.float32, device=device)))
        if not 0 < scale < math.inf:
            raise UserError(f"the loss scale is {scale}", where="edgc.ddp", fix="use a finite scale above 0")
        return scale

    def _reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """What DDP calls for every bucket, always in the same order of buckets."""
        if not self._stop.alive:
            return allreduce_hook(self._model_group, bucket)
        if self._worker.error is not None:
            raise copied(self._worker.error)
        buffer = bucket.buffer()
        on_gpu = buffer.device.type == "cuda"
        gradients = [
            Gradient(self._names[parameter], _matrix(parameter, view))
            for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        storage = buffer.untyped_storage().data_ptr()
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
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _wait(future))
        return checked


class Unregistered:
    """What a copied model has in place of its handle."""

    def _reduce(self, bucket: Any) -> Any:
        raise RuntimeError("edgc.ddp: this is a copy of a registered model; register it anew")


def hook(handle: Handle, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return handle._reduce(bucket)


def _wait(future: torch.futures.Future[Tensor]) -> None:
    try:
        future.wait()
    except Exception as error:
        # The future keeps what it raises, and is itself kept by the model, so the frames must not be.
        raise copied(error.with_traceback(None)) from error.__cause__


def matrix_shape(parameter: Tensor) -> tuple[int, ...]:
    shape = tuple(parameter.shape)
    return shape if len(shape) <= 2 else (shape[0], parameter[0].numel())


def _matrix(parameter: Tensor, view: Tensor) -> Tensor:
    """The gradient as the matrix (or vector) that it is.

    ``view`` has the parameter's shape, but DDP lays gradients out in memory as their parameters lie: under a
    transposed parameter its entries are in the wrong places.
    """
    if view.dim() == 2 and not parameter.is_contiguous() and parameter.mT.is_contiguous():
        return view.view(view.shape[::-1]).mT
    return view.flatten(1) if view.dim() > 2 else view
