"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(number: int) -> Callable[[], None]:
    """A function after which the calling process gets signal ``number`` when its parent ends (Linux only)."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return lambda: None
    return lambda: prctl(PR_SET_PDEATHSIG, number)
