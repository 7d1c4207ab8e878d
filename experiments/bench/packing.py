"""Time that quantised factors take to pack and unpack, measured inside a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from edgc.compressors.quantization.blocks import Blocks
from edgc.runtime.channel import Stopwatch, mark


def watch_packing() -> Stopwatch:
    """From now on every call of :class:`Blocks` in this process adds to the stopwatch that is returned."""
    watch = Stopwatch()

    def watched(method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def call(blocks: Blocks, source: Tensor, target: Tensor, **options: Any) -> None:
            started = mark(source.device)
            method(blocks, source, target, **options)
            watch.add(started, mark(source.device))

        return call

    for name in ("pack", "unpack"):
        setattr(Blocks, name, watched(getattr(Blocks, name)))
    return watch
