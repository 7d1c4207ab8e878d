"""torch's ``powerSGD_hook``, run on a buffer, with its collectives watched or answered without a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as original

from edgc.compressors.base import Statistics
from edgc.compressors.powersgd.state import random_factor
from edgc.runtime.channel import Mark, mark
from experiments.bench.gradients import Shape, name, views
from experiments.bench.variants import SEED, Variant


class OneRank:
    """A process group of one rank, without a backend."""

    def size(self) -> int:
        return 1


class _Done:
    """A collective that is finished when it starts."""

    def __init__(self, tensor: Tensor) -> None:
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result([tensor])

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


class _Noted:
    """A collective and its future in one; tells when the hook goes on after it, in whichever way the hook waits."""

    def __init__(self, work: dist.Work, note: Callable[[], None]) -> None:
        self._future, self._note = work.get_future(), note

    def get_future(self) -> _Noted:
        return self

    def wait(self) -> Any:
        value = self._future.wait()
        self._note()
        return value

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        def noted(future: torch.futures.Future[Any]) -> Any:
            self._note()
            return callback(future)

        return self._future.then(noted)


class Watched:
    """``torch.distributed`` as the hook sees it, noting when each all-reduce starts and ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.started: list[Mark] = []
        self.ended: list[Mark] = []
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: Tensor, *, group: Any, async_op: bool) -> Any:
        self.started.append(mark(self.device))
        if isinstance(group, OneRank):
            self.ended.append(mark(self.device))
            return _Done(tensor)
        self.bytes += 2 * (group.size() - 1) * tensor.numel() * tensor.element_size() // group.size()
        work = dist.all_reduce(tensor, group=group, async_op=async_op)
        return _Noted(work, lambda: self.ended.append(mark(self.device)))


class TorchHook(Variant):
    """torch's hook, with the first Q of :class:`experiments.bench.variants.Ours`, so that errors can be compared.

    Args:
        group: None answers every all-reduce at once with what was sent, as one rank.
    """

    def __init__(self, shapes: Sequence[Shape], rank: int, group: dist.ProcessGroup | None, like: Tensor) -> None:
        self.shapes = shapes
        self.state = original.PowerSGDState(
            cast(Any, group or OneRank()), matrix_approximation_rank=rank, start_powerSGD_iter=2
        )
        self.state.iter = 2  # the two iterations that the hook would send uncompressed are over
        first = [random_factor(SEED, 1, name(i), shape[1], min(rank, *shape)) for i, shape in enumerate(shapes)]
        # The hook keeps its factors shape by shape, and begins with those that it finds.
        order = [i for shape in dict.fromkeys(shapes) for i, other in enumerate(shapes) if other == shape]
        self.state.q_memory_dict[0] = torch.cat([first[i].reshape(-1) for i in order]).to(like)
        size = sum(rows * q.shape[1] for (rows, _), q in zip(shapes, first, strict=True))
        self.state.p_memory_dict[0] = like.new_empty(size)

    def step(self, buffer: Tensor) -> Statistics:
        matrices = views(buffer, self.shapes)
        bucket: Any = SimpleNamespace(
            buffer=lambda: buffer, gradients=lambda: matrices, index=lambda: 0, is_last=lambda: True
        )
        watch, done = Watched(buffer.device), Statistics()
        with mock.patch.object(original, "dist", watch):
            marks = [mark(buffer.device)]
            original.powerSGD_hook(self.state, bucket).wait()
            finished = mark(buffer.device)
        # Everything before the last all-reduce is compression, all that follows it decompression.
        for started, ended in zip(watch.started, watch.ended, strict=True):
            done.compress.add(marks[-1], started)
            done.communicate.add(started, ended)
            marks.append(ended)
        done.decompress.add(marks[-1], finished)
        done.bytes = watch.bytes
        return done

    def kept(self) -> Tensor:
        return self.state.error_dict[0]
