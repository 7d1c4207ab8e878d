"""One variant of :mod:`experiments.bench.step_profile`: trains a GPT under DDP in a world of one rank, when asked."""

from __future__ import annotations

import contextlib
import itertools
import math
import resource
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import edgc.ddp
from edgc.compressors.base import Statistics
from edgc.config import EDGCConfig
from edgc.runtime.channel import Mark, mark, seconds_between
from experiments.bench.children import serve
from experiments.bench.collectives import join
from experiments.bench.gpt import GPT, Size, batch
from experiments.bench.kernels import Kernel, kernels
from experiments.bench.step_profile import BUCKET_MB, TORCH, bucketed, settings
from experiments.bench.variants import Mirror

BATCHES = 4
SETTLE = 5  # DDP cuts its buckets anew after the first, torch's hook begins to compress after the second
ITERATIONS = 1_000_000  # of the run that the hook is told of; no warm-up ends within what is timed


class Training:
    """The model of one variant."""

    def start(self, size: Size, device: str, autocast: bool, variant: str, rank: int) -> None:
        """Build it and train a few steps."""
        self.device, self.size = torch.device(device), size
        on_gpu = self.device.type == "cuda"
        join(backend="nccl" if on_gpu else "gloo")
        torch.manual_seed(0)
        self.autocast = autocast and on_gpu and torch.cuda.is_bf16_supported()
        method, bucket_mb = bucketed(variant)
        model = GPT(self.size).to(self.device)
        cap = bucket_mb if bucket_mb != BUCKET_MB else None  # given its own size, DDP's first bucket would be as large
        self.model = DistributedDataParallel(model, bucket_cap_mb=cap, gradient_as_bucket_view=True)
        self.handle: edgc.ddp.Handle | None = None
        if method == TORCH:
            state = powerSGD_hook.PowerSGDState(cast(Any, None), matrix_approximation_rank=rank, start_powerSGD_iter=2)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif options := settings(variant, rank):
            config = EDGCConfig.from_dict(options)
            self.handle = edgc.ddp.register(self.model, config, iterations=ITERATIONS)
            self.handle.engine.open_channel = lambda *_: Mirror()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(1)
        self.batches = [batch(self.size, generator).to(self.device) for _ in range(BATCHES)]
        self.turn = 0
        self.loss = torch.tensor(math.nan)
        for _ in range(SETTLE):
            self._step()
        if on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

    def _step(self) -> list[Mark]:
        """One step; marks of its start, of the ends of forward and backward, and of its end."""
        text = self.batches[self.turn % BATCHES]
        self.turn += 1
        marks = [mark(self.device)]
        self.optimizer.zero_grad()
        bf16 = torch.autocast("cuda", torch.bfloat16) if self.autocast else contextlib.nullcontext()
        with bf16:
            loss = self.model(text)
        marks.append(mark(self.device))
        loss.backward()
        marks.append(mark(self.device))
        self.optimizer.step()
        marks.append(mark(self.device))
        self.loss = loss.detach()
        return marks

    def steps(self, count: int) -> list[dict[str, float]]:
        """Seconds of each part of ``count`` steps; the device is idle at the start of each."""
        found = []
        for _ in range(count):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            began = time.perf_counter()
            marks = self._step()
            host = time.perf_counter() - began
            parts = [seconds_between(*span) for span in itertools.pairwise(marks)]
            times = dict(zip(("forward", "backward", "optimizer"), parts, strict=True))
            times |= {"step": seconds_between(marks[0], marks[-1]), "host": host}
            last = self._last()
            for name in ("compress", "communicate", "decompress"):
                times[name] = getattr(last, name).seconds if last else math.nan
            found.append(times)
        return found

    def _last(self) -> Statistics | None:
        """What our hook has done in the last step; its times are those of its own stream."""
        return self.handle.last.statistics if self.handle is not None and self.handle.last else None

    def facts(self) -> dict[str, Any]:
        """Memory of the steps so far (of the whole process on a CPU), and what the hook reports."""
        if self.device.type == "cuda":
            peak, resting = (of(self.device) for of in (torch.cuda.max_memory_allocated, torch.cuda.memory_allocated))
        else:
            peak, resting = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, None
        last = self._last()
        return {
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "autocast": "bf16" if self.autocast else "",
            "peak_memory_mib": peak / 2**20,
            "resting_memory_mib": None if resting is None else resting / 2**20,
            "bytes": last.bytes if last else None,
            "relative_error": last.worker_error if last else None,
            "loss": float(self.loss),
        }

    def kernels(self, steps: int, trace: Path | None) -> list[Kernel]:
        """Kernels of one step, the longest first."""
        return kernels(self._step, self.device, steps=steps, trace=trace)


if __name__ == "__main__":
    serve(Training())
