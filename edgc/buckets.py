"""Reduces the buckets of one model while backward goes on.

On a CPU a thread of its own does it, for collectives of gloo and the work between them block whoever waits. On a GPU
nothing blocks, and the caller's thread enqueues everything on a stream beside backward's: launched from two threads,
collectives of NCCL can wait for each other for ever (``docs/megatron.md``, order of launches). From one thread all
ranks launch in the order of the program: a bucket's next collectives where backward makes a bucket ready.

Several buckets are in flight, in an order that depends on their sequence alone. Collectives match between ranks by
their order. Backward makes buckets ready at different moments on every rank, but in the same sequence; so what is
started when must follow from that sequence and never from who is faster. (torch's PowerSGD hook starts its second
all-reduce in the callback of the first, in the order in which these finish: with several buckets the ranks pair
messages that do not belong together.) A reduction is a generator that yields where it must wait for what it has
started. A new one is taken to its first wait, then every older one a step further, oldest first, and then the new one
past all its waits but the last: so the transfers of one overlap with the work of the next, and none waits for it to
begin.

On a GPU a bucket of DDP's is too small: the host takes longer to launch its reduction than the GPU to do it. There
consecutive buckets are gathered (:data:`GATHER`) and reduced together; which ones follows from their bytes alone.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from edgc.compressors import Gradient
from edgc.compressors.base import Steps
from edgc.engine import Engine
from edgc.errors import UserError, copied
from edgc.runtime.device import host_decides, own_modes

GATHER = (25 << 20, 100 << 20)
"""Bytes of gradients, of the first group of buckets and of every later one, that are reduced together where launching
costs: the first is to be on its way soon, the other is the quicker of two sizes of DDP's (``docs/gpu.md``). What an
operation is launched for are the matrices of one shape, so their number does not count, as long as there are bytes."""
BucketNames = list[list[str]]
Part = tuple[list[Gradient], "Bucket | None"]
Reduction = tuple[Steps, list[Part]]
_END, _FLUSH = object(), object()


@dataclass(eq=False)
class Bucket:
    """Gradients that become ready together; ``future`` gets ``buffer``, which they are views of, once averaged.

    ``last`` is DDP's word that this one closes the iteration; in the first iteration of a static graph, where DDP
    numbers every bucket 0, it says so of none. On a GPU ``ready`` is reached when the gradients have been computed.
    ``group`` is for a bucket of other replicas than the worker's; ``compress`` and ``shards`` are those of
    :meth:`edgc.engine.Engine.reduce`. ``scale`` is the loss scale of its iteration, if somebody knows it.
    """

    last: bool
    gradients: list[Gradient]
    buffer: Tensor
    future: torch.futures.Future[Any]
    ready: torch.cuda.Event | None = None
    group: dist.ProcessGroup | None = None
    compress: bool = True
    shards: tuple[Tensor, ...] = ()
    scale: float | None = None


class BucketWorker:
    """Takes buckets in the order of :meth:`put`; collectives start in an order that follows from it alone.

    Args:
        engine: not used by anybody else while buckets are under way.
        group: used here alone, so that no other collective can come between.
        device: of the gradients.
        parameters: number of gradients in an iteration.
        gathers: whether buckets are reduced together where launching costs (the masked path counts as such).
        closes: whether the engine's iteration is closed here after the last bucket; if not, the caller does when it
            has all futures. On a GPU the host would have to wait to know whether all gradients were finite; most
            iterations (:attr:`edgc.engine.Engine.closes_at_once`) are therefore closed when the next one begins or
            when somebody asks for it (:meth:`settle`).

    Attributes:
        inline: whether the caller's thread does the work, as on a GPU.
        error: what stopped the worker; every later bucket gets it. None while all is well.
        skipped: steps given up so far because a gradient was not finite.
        layout: names of the gradients per bucket in the last iteration.
    """

    def __init__(
        self,
        engine: Engine,
        group: dist.ProcessGroup | None,
        device: torch.device,
        parameters: int,
        *,
        gathers: bool = False,
        closes: bool = True,
    ) -> None:
        self.engine, self.closes, self.group, self.parameters = engine, closes, group, parameters
        self.error: Exception | None = None
        self.skipped = 0
        self.layout: BucketNames = []
        self._replay, self._replays = list[list[str]](), 0
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._running: list[Reduction] = []  # oldest first
        self._gathered: list[Part] = []
        self._held: list[Bucket] = []
        self._unfinished: list[Bucket] = []
        self._current: BucketNames = []
        self._seen: set[str] = set()
        self._unsettled = False  # whether an iteration has ended and is not closed
        self._left: list[tuple[str, Tensor]] = []  # to be taken back once it is
        self._stopped = False
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.inline = not host_decides(device)
        self._gathers = gathers and self.inline
        self._thread: threading.Thread | None = None
        if not self.inline:
            self._thread = threading.Thread(target=self._run, name="edgc-buckets", daemon=True)
            self._thread.start()

    @property
    def busy(self) -> bool:
        """True if an iteration has begun and not ended."""
        return bool(self._seen) and self.error is None

    def replay(self, layout: BucketNames) -> None:
        """Reduce the gradients of the next iterations in these buckets, until DDP has settled its own.

        DDP cuts buckets anew after the first or, in a static graph, second iteration of a process. That changes
        nothing but the rounding of sums; with the buckets of the run that was saved, a resumed one is the same bit for
        bit. Buckets that fit are taken as they come, the others wait for the last one.
        """
        self._replay, self._replays = layout, 2 if layout else 0

    def put(self, bucket: Bucket) -> None:
        """Reduce a bucket; its future gets an error if this has been stopped."""
        if self._stopped:
            bucket.future.set_exception(RuntimeError("edgc: a bucket came after the reductions were ended"))
        else:
            self._do(bucket)

    def _do(self, item: object) -> None:
        if not self.inline:
            self._queue.put(item)
            return
        with own_modes(), torch.cuda.stream(self.stream):
            self._process(item)

    def take_back(self, name: str, gradient: Tensor) -> None:
        """:meth:`edgc.engine.Engine.take_back` for the iteration that has ended, before anything else is asked for."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
            gradient.record_stream(self.stream)
        with own_modes(), torch.cuda.stream(self.stream):
            if self._unsettled:
                self._left.append((name, gradient.clone()))
            else:
                self.engine.take_back(name, gradient)

    def flush(self) -> None:
        """Take everything that was put so far to its end, without waiting for further buckets.

        The order of collectives then depends on where among the buckets this is called: the same on every rank.
        """
        if not self._stopped:
            self._do(_FLUSH)

    def stop(self) -> None:
        """Take no more buckets; the thread ends after those it has. Waits at most a second, for a peer may be lost."""
        self._stopped = True
        self._queue.put(None)
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        with own_modes(waited_for=False), torch.cuda.stream(self.stream):
            while (item := self._queue.get()) is not None:
                self._process(item)

    def _process(self, item: object) -> None:
        if isinstance(item, Bucket):
            self._unfinished.append(item)
        stopping: BaseException | None = None
        try:
            if self.error is None and isinstance(item, Bucket):
                self._take(item)
            elif self.error is None:
                self._start()
                self._drain()
        except BaseException as error:  # also of a callback that exits: whoever waits for the bucket must hear of it
            self.error, stopping = self._described(error), error
        if self.error is not None:
            while self._running:
                self._running.pop()[0].close()
            while self._unfinished:
                self._unfinished.pop(0).future.set_exception(self.error)
        if self.inline and stopping is not None and not isinstance(stopping, Exception):
            raise stopping  # Ctrl-C in the caller's own thread

    def _take(self, bucket: Bucket) -> None:
        """Start the reduction of a bucket; after the last one, finish the iteration."""
        names = [gradient.name for gradient in bucket.gradients]
        if not self._seen:
            self.settle()
            if bucket.scale is not None:
                self.engine.rescale(bucket.scale)
        if not self._seen.isdisjoint(names):
            raise RuntimeError(f"{names[0]} came again before all gradients of the iteration had come")
        self._seen.update(names)
        bucket.last = bucket.last or len(self._seen) == self.parameters
        if self.stream is not None and bucket.ready is not None:
            self.stream.wait_event(bucket.ready)
        done = len(self._current)
        if self._held or (self._replays and self._replay[done : done + 1] != [names]):
            self._held.append(bucket)
        else:
            self._gather(bucket.gradients, bucket)
        if bucket.last:
            self._finish_iteration()

    def _gather(self, gradients: list[Gradient], bucket: Bucket | None) -> None:
        """Take in a bucket, and start to reduce what has been gathered once that is enough."""
        self._current.append([gradient.name for gradient in gradients])
        self._gathered.append((gradients, bucket))
        # What goes dense is launched once, and from where it lies only if that is one bucket.
        if self._gathers and self.engine.compresses:
            size = sum(gradient.tensor.nbytes for part, _ in self._gathered for gradient in part)
            if size < GATHER[len(self._current) > len(self._gathered)]:
                return
        self._start()

    def _start(self) -> None:
        """Start to reduce what has been gathered."""
        if not self._gathered:
            return
        parts, self._gathered = self._gathered, []
        gradients, bucket = [gradient for part, _ in parts for gradient in part], parts[0][1]
        if bucket is None:
            steps = self.engine.exchange(gradients, self.group)
        else:
            group = bucket.group or self.group
            steps = self.engine.exchange(gradients, group, compress=bucket.compress, shards=bucket.shards)
        new, older = (steps, parts), list(self._running)
        self._running.append(new)
        # Backward may be long in bringing the next bucket; until then only this one's transfers can use the link.
        for task in (new, *older, *[new] * (self.engine.waits - 1)):
            self._advance(task)

    def _drain(self) -> None:
        """Advance all reductions in turn until none is left."""
        while self._running:
            for task in list(self._running):
                self._advance(task)

    def _advance(self, task: Reduction) -> None:
        """Take a reduction a step further; one that ends hands over its buckets, but for the last of the iteration."""
        if next(task[0], _END) is _END and task in self._running:
            self._running.remove(task)
            for _, bucket in task[1]:
                if bucket is not None and not bucket.last:
                    self._unfinished.remove(bucket)
                    bucket.future.set_result(bucket.buffer)

    def _finish_iteration(self) -> None:
        if self._held:
            gradients = {gradient.name: gradient for bucket in self._held for gradient in bucket.gradients}
            rest = self._replay[len(self._current) :]
            if set(gradients) != {name for names in rest for name in names}:
                what = "the saved state is of a model with other parameters"
                raise UserError(what, fix="load it into the model it was saved from")
            for names in rest:
                self._gather([gradients[name] for name in names], None)
        self._start()
        self._drain()
        self._unsettled = self.closes
        if not self.inline or self.engine.closes_at_once:
            self.settle()
        # Everything about this iteration is settled before backward can return.
        self.layout, self._current, self._replays = self._current, [], max(0, self._replays - 1)
        self._held.clear()
        self._seen.clear()
        unfinished, self._unfinished = self._unfinished, []
        for bucket in unfinished:
            bucket.future.set_result(bucket.buffer)

    def settle(self) -> None:
        """Close the iteration that has ended, if that was put off; only between two iterations."""
        if not self._unsettled:
            return
        self._unsettled = False
        given_up = self.engine.given_up
        self.engine.end_iteration(skipped=given_up)
        self.skipped += given_up
        for name, gradient in self._left:
            self.engine.take_back(name, gradient)
        self._left.clear()

    def _described(self, error: BaseException) -> Exception:
        """The error in one line, with where it happened; as it is a mistake of the user's, and out of memory, which
        programs know by its type, without the frames that hold memory."""
        if isinstance(error, (UserError, torch.OutOfMemoryError)):
            return copied(error)
        reason = " ".join(str(error).split()) or "no message"
        # Of the world, and nothing here may fail: an error of this thread's own would leave its callers waiting.
        rank = dist.get_rank() if dist.is_initialized() else 0
        described = RuntimeError(
            f"edgc: gradient reduction stopped on rank {rank} in iteration "
            f"{self.engine.iteration}: {type(error).__name__}: {reason}"
        )
        described.__cause__ = error
        return described
