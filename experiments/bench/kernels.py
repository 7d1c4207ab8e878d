"""Times of a call: processor time and wall time; time on the device by kernel, from torch's profiler; on a CPU, where
there are no kernels, by operation; and tables of such times."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import pandas as pd
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from edgc.runtime.channel import mark, seconds_between
from experiments.bench.terminal import spread

K = TypeVar("K")


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
    steps: int = 3,
    before: Callable[[], object] = lambda: None,
    trace: Path | None = None,
) -> pd.DataFrame:
    """Kernels of one step of ``call``, means over ``steps``, the longest first.

    Times under a profiler are those of the device's own clock; the host is slower than without, so wall times are
    to be taken in other steps. On a CPU only operations of the calling thread and of backward's are seen.

    Args:
        before: called before each step; not counted.
        trace: where the last step's trace is written, for Perfetto or chrome://tracing; ``.gz`` packs it.

    Returns:
        Columns ``kernel`` (or copy, or operation of a CPU), ``calls`` and ``ms``, all calls together.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    parts = []
    for _ in range(steps):
        before()
        if on_gpu:
            torch.cuda.synchronize(device)
        with profile(activities=activities) as profiler:
            call()
            if on_gpu:
                torch.cuda.synchronize(device)
        parts.append(device_events(profiler.key_averages(), on_gpu))
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    means = pd.concat(parts).groupby("kernel", sort=False).sum() / steps
    return means.sort_values("ms", ascending=False, kind="stable").reset_index()


def device_events(events: Iterable[Any], on_gpu: bool) -> pd.DataFrame:
    """Kernels that ran on the device, from the profiler's averages; columns as in :func:`kernels`.

    On a GPU each kernel is an event of its own, and its time is told once more with the operation that launched it;
    only the first is counted, and no ranges that a user has named.
    """
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    seconds = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    rows = [
        (event.key, event.count, getattr(event, seconds) / 1e3)
        for event in events
        if event.device_type == device and not event.is_user_annotation
    ]
    return pd.DataFrame(rows, columns=["kernel", "calls", "ms"])


@dataclass
class Timings(Generic[K]):
    """Answers of the workers, by what was timed.

    Attributes:
        facts: of one step, such as its bytes, or why there is no timing.
        rounds: seconds of each part, one entry a round; of several ranks the slowest one's.
        kernels: of one step, see :func:`kernels`.
    """

    facts: dict[K, dict[str, Any] | str] = field(default_factory=dict)
    rounds: dict[K, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    kernels: dict[K, pd.DataFrame] = field(default_factory=dict)

    def summary(self, key: K, parts: Sequence[str], count: str) -> dict[str, Any]:
        """Columns of a row: the status, how often it was timed (``count``), facts, medians and quartiles of each part
        in ms, and all kernels together."""
        fact = self.facts[key]
        if isinstance(fact, str):
            return {"status": fact}
        rounds = pd.DataFrame(self.rounds[key])
        row: dict[str, Any] = {"status": "ok", count: len(rounds), **fact}
        for part in parts:
            row |= spread(f"{part}_ms", 1e3 * rounds[part])
        if key in self.kernels:
            row |= {"kernel_ms": self.kernels[key]["ms"].sum(), "kernel_calls": self.kernels[key]["calls"].sum()}
        return row

    def round_table(self, columns: Callable[[K], dict[str, Any]], parts: Sequence[str], number: str) -> pd.DataFrame:
        """A row per round, in ms; ``number`` is the column of its number."""
        rows = [
            {**columns(key), number: index, **{f"{part}_ms": 1e3 * times[part] for part in parts}}
            for key, rounds in self.rounds.items()
            for index, times in enumerate(rounds)
        ]
        return pd.DataFrame(rows)

    def kernel_table(self, columns: Callable[[K], dict[str, Any]], top: int | None = None) -> pd.DataFrame:
        """The ``top`` longest kernels of each, and the others in a row of their own."""
        tables = [pd.DataFrame(columns=["kernel", "calls", "ms"])]
        for key, table in self.kernels.items():
            rest = table[top:] if top is not None else table[:0]
            others = {"kernel": f"{len(rest)} others", "calls": rest["calls"].sum(), "ms": rest["ms"].sum()}
            parts = [table[:top], pd.DataFrame([others])] if len(rest) else [table]
            tables += [pd.DataFrame(columns(key), part.index).join(part) for part in parts]
        return pd.concat(tables[1:] or tables, ignore_index=True)
