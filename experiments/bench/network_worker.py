"""One rank of the network benchmark: a model per method, all of them trained in turns, one step when asked.

Runs on a host of the testbed, as one of :func:`experiments.bench.children.ranks`.
"""

# No `from __future__ import annotations`: DDP checks the annotations of a hook and wants them as objects.
import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from edgc.config import EDGCConfig
from edgc.ddp import Handle, register
from experiments.bench import gpt
from experiments.bench.children import serve
from experiments.bench.collectives import Recording, Sent, join, seconds_of
from experiments.bench.testbed import sent_bytes

ONE_BUCKET_MB = 4096  # more than the model has
WARM_UP = 4  # steps: buckets are rebuilt after the first, torch's hook starts at the third
ITERATIONS = 1000000  # a length of training that no benchmark reaches
TIMEOUT = timedelta(seconds=60)


def bf16_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's ``bf16_compress_hook``; under that name DDP takes it for NCCL alone."""
    return default_hooks.bf16_compress_hook(group, bucket)


class Method:
    """A model with one way of averaging its gradients.

    Attributes:
        moments: of the last step, seconds since its start: end of forward, of backward, of the step.
        complete: of the last step of hook ``ready``, which sends nothing: per bucket, the seconds since the step's
            start and its entries.
    """

    def __init__(self, size: gpt.Size, settings: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = gpt.GPT(size)
        self.model = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB if settings.get("one_bucket") else None)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.hook = str(settings["hook"])
        self.entries = sum(parameter.numel() for parameter in model.parameters())
        self.moments: tuple[float, ...] = ()
        self.complete: list[tuple[float, int]] = []
        self.handle: Handle | None = None
        self.started = 0.0
        self.expected = self._register(settings)

    def _register(self, settings: dict[str, Any]) -> Callable[[], int | None]:
        """Install the communication; returns the function that tells the bytes of the last step by formula."""
        ring = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        if self.hook in ("compute", "ready"):
            if self.hook == "ready":
                self.model.register_comm_hook(self, _ready)
            return lambda: 0
        if self.hook == "dense":
            return lambda: round(4 * ring * self.entries)
        if self.hook == "bf16":
            self.model.register_comm_hook(dist.group.WORLD, bf16_hook)
            return lambda: round(2 * ring * self.entries)
        if self.hook == "torch":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=settings["rank"], start_powerSGD_iter=2)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            return self._of_torch(state, ring)
        config = {"method": "powersgd"} | {key: value for key, value in settings.items() if key != "hook"}
        handle = self.handle = register(self.model, EDGCConfig(**config), iterations=ITERATIONS)
        return lambda: handle.last.statistics.bytes if handle.last is not None else None

    def messages(self, text: torch.Tensor) -> list[list[Sent]]:
        """What this rank sends in a step of our methods: per bucket, collective by collective."""
        assert self.handle is not None
        opened: list[Recording] = []

        def record(*options: Any) -> Recording:
            opened.append(Recording(*options))
            return opened[-1]

        with mock.patch.object(self.handle.engine, "open_channel", record):
            self.step(text)
        return [channel.messages for channel in opened]

    @staticmethod
    def _of_torch(state: powerSGD_hook.PowerSGDState, ring: float) -> Callable[[], int | None]:
        total = 0

        def last() -> int:
            nonlocal total
            before, total = total, state.total_numel_after_compression
            return round(4 * ring * (total - before))

        return last

    def step(self, text: torch.Tensor) -> None:
        """One training step."""
        alone = self.model.no_sync() if self.hook == "compute" else contextlib.nullcontext()
        self.complete.clear()
        self.started = time.perf_counter()
        with alone:
            loss = self.model(text)
            forward = time.perf_counter()
            loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.moments = tuple(at - self.started for at in (forward, backward, time.perf_counter()))


def _ready(method: Method, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sends nothing, and notes that a bucket is complete."""
    method.complete.append((time.perf_counter() - method.started, bucket.buffer().numel()))
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Rank:
    """Handlers of this process."""

    def start(self, size: gpt.Size) -> None:
        """Join the process group."""
        join(TIMEOUT)
        self.size, self.methods = size, dict[str, Method]()
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def prepare(self, name: str, settings: dict[str, Any]) -> None:
        """Build a method and train it for a few steps."""
        method = self.methods[name] = Method(self.size, settings)
        for _ in range(WARM_UP):
            method.step(gpt.batch(self.size, self.generator))
            method.expected()

    def step(self, name: str) -> dict[str, Any]:
        """One timed step: seconds, bytes by formula, and bytes that left the interface."""
        method, text = self.methods[name], gpt.batch(self.size, self.generator)
        dist.barrier()
        sent, started = sent_bytes(), time.perf_counter()
        method.step(text)
        seconds = time.perf_counter() - started
        # The peer may still be waiting for what lies in this host's queue.
        dist.barrier()
        wire = sent_bytes() - sent
        answer = {"seconds": seconds, "bytes": method.expected(), "wire": wire}
        return answer | {"moments": method.moments, "complete": method.complete}

    def messages(self, name: str) -> list[list[Sent]]:
        """What a step of one of our methods sends, per bucket."""
        return self.methods[name].messages(gpt.batch(self.size, self.generator))

    def counted(self, name: str) -> int | None:
        """Bytes that a method says this rank has sent in its last step."""
        return self.methods[name].expected()

    def collective(self, kind: str, entries: int) -> dict[str, float | int]:
        """Time one collective on a buffer of so many fp32 numbers."""
        dist.barrier()
        sent = sent_bytes()
        seconds = seconds_of(kind, entries)
        dist.barrier()
        return {"seconds": seconds, "wire": sent_bytes() - sent}


if __name__ == "__main__":
    serve(Rank())
