"""Times of a call: processor time and wall time; on the device the time of all its kernels, from torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
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


def kernels(
    call: Callable[[], object],
    device: torch.device,
    *,
    steps: int = 2,
    before: Callable[[], object] = lambda: None,
    trace: Path | None = None,
) -> dict[str, float]:
    """Kernels of one step of ``call``, also those that ran at once: ``kernel_ms`` and ``kernel_calls``, means.

    Times under a profiler are those of the device's own clock; the host is slower than without, so wall times are
    to be taken in other steps. A CPU has operations in place of kernels, of the calling thread and of backward's.

    Args:
        before: called before each of the ``steps``; not counted.
        trace: where the last step's trace is written, for Perfetto or chrome://tracing; ``.gz`` packs it.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    found = []
    for _ in range(steps):
        before()
        if on_gpu:
            torch.cuda.synchronize(device)
        with profile(activities=activities) as profiler:
            call()
            if on_gpu:
                torch.cuda.synchronize(device)
        found.append(device_time(profiler.key_averages(), on_gpu))
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return {name: sum(step[name] for step in found) / steps for name in ("kernel_ms", "kernel_calls")}


def device_time(events: Iterable[Any], on_gpu: bool) -> dict[str, float]:
    """Kernels that ran on the device, from the profiler's averages; keys as in :func:`kernels`.

    On a GPU each kernel is an event of its own, and its time is told once more with the operation that launched it;
    only the first is counted, and no ranges that a user has named.
    """
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    seconds = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    counted = [event for event in events if event.device_type == device and not event.is_user_annotation]
    milliseconds = sum(getattr(event, seconds) for event in counted) / 1e3
    return {"kernel_ms": milliseconds, "kernel_calls": sum(event.count for event in counted)}
