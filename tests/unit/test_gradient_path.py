"""How many files of the library one gradient passes on its way through a step under DDP.

Counted are calls of the library's functions, a generator that is resumed among them, from the hook to the closed
iteration, of an iteration in which nothing is measured and no window ends; comprehensions and lambdas belong to the
function they are in.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import edgc
from edgc import EDGCConfig
from edgc.ddp import register
from tests import examples
from tests.workers import run_workers

ROOT = Path(edgc.__file__).parent
QUIET, DUE = 5, 10  # of each ten iterations the last is measured
Call = tuple[str, str]  # file, function


def calls_of(settings: dict[str, Any], iteration: int) -> list[list[Call]]:
    """What one bucket with one matrix calls in one iteration, by thread, in order."""
    threads: dict[int, list[Call]] = {}
    watching = False

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if watching and event == "call" and ROOT in file.parents and not frame.f_code.co_name.startswith("<"):
            call = file.relative_to(ROOT).as_posix(), frame.f_code.co_qualname
            threads.setdefault(threading.get_ident(), []).append(call)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        model = DistributedDataParallel(torch.nn.Linear(64, 64, bias=False))
        handle = register(model, EDGCConfig(**settings), iterations=100)
        for step in range(1, iteration + 1):
            loss = model(torch.randn(8, 64)).sum()
            watching = step == iteration
            loss.backward()
            watching = False
        assert handle.last is not None and handle.last.iteration == iteration
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
        sys.setprofile(None)
    return list(threads.values())


def passed(threads: list[list[Call]]) -> set[str]:
    """Distinct files."""
    return {file for calls in threads for file, _ in calls}


def paths() -> tuple[dict[str, set[str]], list[set[str]]]:
    """The files that a gradient of every method passes, by the name of its example; and those of one method without and
    with something due."""
    settings = {name: {**examples.settings_of(name), "window": 50} for name in examples.FOUND}
    each = {name: passed(calls_of(values, QUIET)) for name, values in settings.items()}
    return each, [passed(calls_of({"method": "powersgd", "rank": 4}, iteration)) for iteration in (QUIET, DUE)]


def test_a_gradient_passes_few_files_and_what_measures_only_where_something_is_due() -> None:
    for files_of, due in run_workers(2, paths):
        for name, files in files_of.items():
            assert {"ddp/hook.py", "buckets.py", "engine.py", "runtime/channel.py", "compressors/base.py"} < files
            assert len(files) <= 10, name
        for asked, files in enumerate(due):
            assert ("monitor.py" in files) == ("measurement/mean_error.py" in files) == bool(asked)
