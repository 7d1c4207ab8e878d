"""Processes that must not outlive the one that started them, or that have to end."""

from __future__ import annotations

import ctypes
import os
import signal
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


def children_die_with_this() -> None:
    """Every process that this one forks from now on ends with it, such as those that write a checkpoint's files.

    Orphaned, one would hold open what it inherited for ever: locks, pipes, the memory of a whole rank.
    """
    set_death_signal = die_with_parent(signal.SIGKILL)

    def follow() -> None:
        set_death_signal()
        if os.getppid() == 1:
            os._exit(1)  # it had ended before

    os.register_at_fork(after_in_child=follow)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process, gently first, and wait for its end; one that has ended stays as it is."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
