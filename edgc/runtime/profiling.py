"""Names for the parts of a reduction in the traces of ``torch.profiler``, and in those of tools that listen to it.

``edgc::compress`` is what a reduction does before its last wait for a collective, ``edgc::decompress`` what comes after
it; ``edgc::all_reduce``, ``edgc::reduce_scatter``, ``edgc::all_to_all`` and ``edgc::all_gather`` start a collective,
and ``edgc::wait`` waits for all that were started: on a GPU the stream does, and the host goes on at once.

Buckets of DDP and Megatron-Core are reduced in a thread of their own. Of other threads than its own torch's profiler
shows only kernels, unless it is told to take all of them::

    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=all_threads) as profiler:
        ...
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from edgc.lazy import torch

P = ParamSpec("P")
R = TypeVar("R")
_END = object()
_NOTHING = contextlib.nullcontext()


def span(name: str) -> contextlib.AbstractContextManager[object]:
    """What happens inside is called ``name`` in a trace. Without a profiler it is nothing: a range that nobody
    looks at takes 15 us, and a step has hundreds of them."""
    # Should a version of torch not say whether there is a profiler, that is the price.
    profiler = torch.autograd.profiler
    return profiler.record_function(name) if getattr(profiler, "_is_profiler_enabled", True) else _NOTHING


def named(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Every call of the function is a :func:`span` of its own, in whichever threads they are."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(name):
                return function(*args, **kwargs)

        return call

    return decorate


def parts(steps: Iterator[None], waits: int) -> Iterator[None]:
    """``steps`` of a reduction that waits so often, its parts named. One that turns out to wait less, since it
    compresses nothing or has one worker only, has only parts called ``edgc::compress``."""
    done = 0
    while True:
        with span("edgc::compress" if done < waits else "edgc::decompress"):
            if next(steps, _END) is _END:
                return
        done += 1
        yield
