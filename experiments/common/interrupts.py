"""Ctrl-C: every process ends at once, nothing half-written is left, and one line says what is kept."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from types import FrameType

EXIT = 128 + signal.SIGINT  # as a shell reports it
KILLED_SECONDS = 2.0  # in which a killed process has to be gone


def while_starting() -> None:
    """Until the program has read its input: an interrupt ends it with one line and no traceback of an import."""

    def end(number: int, frame: FrameType | None) -> None:
        os.write(sys.stderr.fileno(), b"interrupted: nothing was started\n")
        os._exit(EXIT)

    signal.signal(signal.SIGINT, end)


def while_training() -> None:
    """Let the first interrupt from here on kill the ranks and raises ``KeyboardInterrupt``; further ones are ignored.

    The elastic agent would hand the signal on and wait half a minute for ranks that are deep in a collective. They
    have nothing to save: what a run goes on from lies in its checkpoints. Python's own handler is set anew even where
    interrupts are ignored, as they are in the jobs of a workflow.
    """

    def end(number: int, frame: FrameType | None) -> None:
        ignore()
        logging.disable(logging.WARNING)  # the agent would report each rank
        ranks = multiprocessing.active_children()
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join(KILLED_SECONDS)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, end)


def ignore() -> None:
    """Ignore Ctrl-C: the rest of this process is short, and is not to be left half-done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
