"""EDGC on one rank of an FSDP2 job: between replicas of a sharded model, at every unit's reduce-scatter.

What follows from how FSDP2 works:

* torch reduce-scatters a unit's gradients within the shard group, in backward; the hook then averages this rank's
  shards over the ranks that hold the same ones. Shards are blocks of rows; what is compressed entry by entry stays so,
  for low rank most matrices are put together on one rank first (:mod:`edgc.fsdp.whole`).
* An iteration is one backward that averages; those under ``set_requires_gradient_sync(False)`` only accumulate, and
  under ``set_requires_all_reduce(False)`` what the shard group has reduced waits for the next one that averages.
* It ends when torch has ended backward. There the ranks of a replica learn whether any gradient on any of them was not
  finite (an all-reduce of one number). If so the whole step is given up on all ranks: error feedback, warm starts and
  the controller's means are as if it had never been.
* On a GPU everything runs on a stream beside backward's, and the host waits for nothing but where a decision is due.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from edgc.checkpoints.saved_state import refuse_other_parameters, state_for
from edgc.checks import need
from edgc.engine import loss_scale
from edgc.errors import UserError
from edgc.fsdp.layout import Layout, refuse_waiting
from edgc.fsdp.state import Place, Saved
from edgc.fsdp.units import ShardsOnly, Unit, outputs
from edgc.fsdp.whole import WholeMatrices
from edgc.handle import EngineHandle
from edgc.runtime.device import HostCopy, own_modes


class Handle(EngineHandle):
    """EDGC on one rank of an FSDP2 job; made by :func:`edgc.fsdp.register`. A ``Stateful`` of torch's distributed
    checkpoints: ``dcp.save({"model": ..., "edgc": handle})``.

    Args:
        model: its root.
        scaler: follows the loss scale of this ``GradScaler``.
        owners: of matrices that one rank of a shard group averages whole (:mod:`edgc.fsdp.whole`).
    """

    def __init__(
        self,
        engine: Any,
        model: nn.Module,
        units: Sequence[Unit],
        layout: Layout,
        scaler: Any,
        *,
        owners: Mapping[str, int] | None = None,
    ) -> None:
        self.engine, self._units, self._layout, self._scaler = engine, list(units), layout, scaler
        self._device = units[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._whole = WholeMatrices(owners or {}, layout.shards)
        self._place = Place.of(layout)
        self._skipped = 0
        self._queued = False  # whether the end of a backward will call
        self._seen = set[int]()  # units that were reduced in this iteration
        self._bad: HostCopy | None = None  # of an iteration that has ended and is not closed: was it given up?
        self._root = model.register_forward_hook(self._watch)
        self._shards_only = ShardsOnly(units if layout.native and layout.replicas is not None else [])

    def start(self) -> None:
        """Begin: what is not started leaves the model as it is."""
        self._shards_only.begin()
        for unit in self._units:
            unit.set_all_reduce(partial(self._reduce, unit), self._stream)

    def remove(self) -> None:
        """End EDGC: from now on torch averages, over replicas too where it was given a 2-D mesh; a model on a mesh of
        shards alone is no longer averaged over replicas. What error feedback still holds is dropped; what
        ``set_requires_all_reduce(False)`` has kept back is not.

        To be called on every rank between the same two iterations; the model can be registered anew.
        """
        if torch._C._current_graph_task_id() >= 0:
            raise UserError("edgc.fsdp was called inside an iteration", fix="call it after backward")
        refuse_waiting(self._units, self._layout)
        self._root.remove()
        while self._units:
            self._let_go(self._units.pop())
        self._shards_only.end()

    def _let_go(self, unit: Unit) -> None:
        unit.set_all_reduce(None, None)

    # ------------------------------------------------------------------ an iteration

    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the root: backward will begin at what it returns."""
        if self._queued and torch._C._current_graph_task_id() < 0 and torch.is_grad_enabled():
            what = "the last backward did not come to its end, and error feedback is in the middle of it"
            raise UserError(
                what, where="edgc.fsdp", fix="call model.reset_iter_state() and handle.remove(), and register anew"
            )
        for tensor in outputs(output):
            tensor.register_hook(lambda _: self._queue())

    def _queue(self) -> None:
        """Have :meth:`_ended` called at the end of backward, after all that torch does there itself: it appends to the
        same list, from hooks that may come later than this."""
        if not self._queued:
            self._queued = True
            call = torch.autograd.Variable._execution_engine.queue_callback
            call(lambda: call(self._ended))

    def _begin(self, unit: Unit) -> None:
        """A unit's gradients are about to be averaged."""
        self._queue()
        if not self._seen:
            self._settle()
            if self._scaler is not None:
                self.engine.rescale(loss_scale(self._scaler, self._device, where="edgc.fsdp"))
        if id(unit) in self._seen:
            what = f"the unit of {unit.name} was reduced twice in one backward"
            fix = "call set_requires_gradient_sync(False) until the last use of it"
            raise UserError(what, where="edgc.fsdp", fix=fix)
        self._seen.add(id(unit))

    def _reduce(self, unit: Unit, flat: Tensor) -> None:
        """Average ``flat``, the result of a unit's reduce-scatter, over replicas; torch calls this in the same order of
        units on every rank."""
        if self._stream is not None:
            flat.record_stream(self._stream)
        if unit.accumulates(flat):
            return
        self._begin(unit)
        gradients, put_back = self._whole.take(unit.check(flat), flat)
        if gradients:
            self.engine.reduce(gradients, self._layout.replicas)
        put_back()
        if self._layout.native and unit.divides_by is not None:
            assert self._layout.replicas is not None
            flat.mul_(self._layout.replicas.size())  # torch would have added

    def _ended(self) -> None:
        self._queued = False
        if not self._seen:
            return
        self._seen.clear()
        with own_modes(), torch.cuda.stream(self._stream):
            bad = torch.zeros((), dtype=torch.float32, device=self._device)
            bad += self.engine.skips
            for group in self._layout.within:
                dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=group)
            self._bad = HostCopy(bad)
        if self._stream is None or self.engine.closes_at_once:
            self._settle()

    def _settle(self) -> None:
        """Close the iteration that has ended, if that was put off; on a GPU the host waits for it."""
        if self._bad is None:
            return
        bad, self._bad = bool(self._bad.read()), None
        self._skipped += bad
        with torch.cuda.stream(self._stream):
            self.engine.end_iteration(skipped=bad)

    # ------------------------------------------------------------------ what it has to say

    @property
    def skipped(self) -> int:
        """Number of steps given up so far because a gradient was not finite; methods without state do not look."""
        self._settle()
        return self._skipped

    @property
    def active(self) -> bool:
        """True while EDGC averages the gradients: until :meth:`remove`."""
        return bool(self._units)

    def _refuse_inside_iteration(self) -> None:
        if self._queued or self._seen:
            raise UserError("edgc.fsdp was called inside an iteration", fix="call it after backward")
        self._settle()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, bytes]:
        """State that this rank needs, besides its part of model and optimizer, to go on exactly, under a key that no
        other rank has (:mod:`edgc.fsdp.state`).

        Raises:
            UserError: inside an iteration.
        """
        self._refuse_inside_iteration()
        state = {"engine": self._engine_state(), "skipped": self._skipped}
        return self._place.packed({"world": self._place.replicas, "rank": self._place.replica, **state})

    def placeholders(self, replicas: int) -> dict[str, bytes]:
        """Keys of the states of this rank's part in a run of so many replicas, for ``dcp.load`` to read them into;
        :meth:`load_state_dict` then takes them."""
        return self._place.placeholders(replicas)

    def load_state_dict(self, state: Saved | Sequence[Saved], *, changed_settings: bool = False) -> None:
        """Go on from :meth:`state_dict` of this rank, or from those of all ranks, in a list or in one mapping.

        All are for another number of replicas than they were saved from: error feedback is then redistributed so that
        the average owes what it owed before (:mod:`edgc.checkpoints.saved_state`).

        Args:
            changed_settings: go on with the settings given to ``register`` where the state is of others (but of the
                same method), instead of refusing it.

        Raises:
            UserError: inside an iteration; for a state that is not this rank's or not this model's, that lacks
                something, or that is of other settings, which are named.

        Warns:
            UserWarning: when error feedback was redistributed.
        """
        self._refuse_inside_iteration()
        chosen = state_for(self._place.found(state), world=self._place.replicas, rank=self._place.replica)
        need(chosen, ("skipped",), "state")
        refuse_other_parameters(chosen, self._shapes())
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._load_engine(chosen["engine"], changed_settings)
            if self._scaler is None:  # nobody else brings what is kept from the saved loss scale to that of now
                self.engine.rescale(1.0)
        self._skipped = int(chosen["skipped"])

    # What differs where the reduce-scatter itself is compressed (edgc.fsdp.scatter).

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self._whole.shapes(part for unit in self._units for part in unit.all_parts)

    def _engine_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.engine.state_dict()
        return state

    def _load_engine(self, state: dict[str, Any], changed_settings: bool) -> None:
        self.engine.load_state_dict(state, changed_settings=changed_settings)
