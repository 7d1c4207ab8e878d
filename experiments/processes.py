"""Processes that must not outlive the one that started them, or that have to end."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOP_SECONDS = 20.0  # from asking a process to end until it is killed


def die_with_parent(number: int) -> Callable[[], None]:
    """A function after which the calling process gets signal ``number`` when its parent ends (Linux only)."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return lambda: None
    return lambda: prctl(PR_SET_PDEATHSIG, number)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process, gently first, and wait for its end; one that has ended stays as it is."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
