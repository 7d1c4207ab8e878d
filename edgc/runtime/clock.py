"""Wall time of work on a device, without making the device wait.

On a GPU a mark is an event in the current stream; the times between events are read when somebody asks for them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TypeAlias

from edgc.lazy import torch

Mark: TypeAlias = "float | torch.cuda.Event"


def mark(device: torch.device) -> Mark:
    """Now: seconds on a CPU, an event in the current stream on a GPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Seconds from one mark to another of the same device; waits until the GPU has reached ``end``."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@dataclass
class Stopwatch:
    """A sum of spans; on a GPU it stays unread until :attr:`seconds` is asked for."""

    total: float = 0.0
    spans: list[tuple[Mark, Mark]] = field(default_factory=list)

    def add(self, start: Mark, end: Mark) -> None:
        if isinstance(start, float) and isinstance(end, float):
            self.total += end - start
        else:
            self.spans.append((start, end))

    @property
    def seconds(self) -> float:
        self.total += sum(seconds_between(start, end) for start, end in self.spans)
        self.spans.clear()
        return self.total

    def __add__(self, other: Stopwatch) -> Stopwatch:
        return Stopwatch(self.total + other.total, self.spans + other.spans)
