"""Processor time and wall time of a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from edgc.runtime.channel import mark, seconds_between


@dataclass(frozen=True)
class Timing:
    """Seconds. ``cpu`` is of all threads of the process; on a GPU ``wall`` is between two events of its stream."""

    cpu: float
    wall: float


def timed(call: Callable[[], object], device: torch.device) -> Timing:
    """Run ``call`` once and wait for it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    cpu, started = time.process_time(), mark(device)
    call()
    ended = mark(device)
    wall = seconds_between(started, ended)
    return Timing(cpu=time.process_time() - cpu, wall=wall)
