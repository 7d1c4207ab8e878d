"""Times of a call: processor time and wall time; time on the device by kernel, from torch's profiler; on a CPU, where
there are no kernels, by operation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from edgc.runtime.channel import mark, seconds_between


def timed(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Run ``call`` once and wait for it: seconds of ``cpu`` (of all threads of the process) and of ``wall`` (on a GPU
    between two events of its stream)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    cpu, started = time.process_time(), mark(device)
    call()
    ended = mark(device)
    wall = seconds_between(started, ended)  # waits
    return {"cpu": time.process_time() - cpu, "wall": wall}


@dataclass(frozen=True)
class Kernel:
    """One kernel (or copy, or operation of a CPU) in one step: how often it ran, and for how many seconds in all."""

    name: str
    calls: float
    seconds: float


def kernels(
    call: Callable[[], object],
    device: torch.device,
    *,
    steps: int = 3,
    before: Callable[[], object] = lambda: None,
    trace: Path | None = None,
) -> list[Kernel]:
    """Kernels of one step of ``call``, means over ``steps``, the longest first.

    Times under a profiler are those of the device's own clock; the host is slower than without, so wall times are
    to be taken in other steps. On a CPU only operations of the calling thread and of backward's are seen.

    Args:
        before: called before each step; not counted.
        trace: where the last step's trace is written, for Perfetto or chrome://tracing; ``.gz`` packs it.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    sums: dict[str, tuple[float, float]] = {}
    for step in range(steps):
        before()
        if on_gpu:
            torch.cuda.synchronize(device)
        with profile(activities=activities) as profiler:
            call()
            if on_gpu:
                torch.cuda.synchronize(device)
        for kernel in of_events(profiler.key_averages(), on_gpu):
            calls, seconds = sums.get(kernel.name, (0.0, 0.0))
            sums[kernel.name] = calls + kernel.calls, seconds + kernel.seconds
        if trace is not None and step == steps - 1:
            profiler.export_chrome_trace(str(trace))
    means = [Kernel(name, calls / steps, seconds / steps) for name, (calls, seconds) in sums.items()]
    return sorted(means, key=lambda kernel: kernel.seconds, reverse=True)


def of_events(events: Iterable[Any], on_gpu: bool) -> list[Kernel]:
    """Kernels that ran on the device, from the profiler's averages.

    On a GPU each kernel is an event of its own, and its time is told once more with the operation that launched it;
    only the first is counted, and no ranges that a user has named.
    """
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    seconds = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    own = [event for event in events if event.device_type == device and not event.is_user_annotation]
    return [Kernel(event.key, event.count, getattr(event, seconds) / 1e6) for event in own]


def kernel_rows(kernels: Iterable[Kernel]) -> Iterator[dict[str, Any]]:
    """Name, calls and milliseconds of each kernel."""
    for of in kernels:
        yield {"kernel": of.name, "calls": of.calls, "ms": 1e3 * of.seconds}


def kernel_sums(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Columns of all kernels together."""
    return {"kernel_ms": 1e3 * sum(of.seconds for of in kernels), "kernel_calls": sum(of.calls for of in kernels)}
