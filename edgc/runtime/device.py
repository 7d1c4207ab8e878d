"""Who looks at values on a device: the host on a CPU, nobody on a GPU.

On a CPU the host reads whether a result is finite and decides. On a GPU reading would make the host wait for the
device, so everything goes on there and writes are masked: the *masked path*. Tests run that path without a GPU, on CPU
tensors, with :func:`masked_path` or, in processes that they start, with ``EDGC_MASKED_PATH=1`` in the environment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from edgc.lazy import Tensor, torch

_masked = os.environ.get("EDGC_MASKED_PATH", "") == "1"


def host_decides(device: torch.device) -> bool:
    """Whether the host may read values that lie on ``device`` within a step."""
    return device.type == "cpu" and not _masked


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """``values``, which lie on the CPU, on ``device``: to a GPU from pinned memory, or the host would wait until the
    GPU comes to it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class Made:
    """A tensor that is made in one stream of a GPU and used in another one later."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._done: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record()

    def use(self) -> Tensor:
        """The tensor, for what is queued in the current stream from now on."""
        if self._done is not None:
            stream = torch.cuda.current_stream(self._tensor.device)
            stream.wait_event(self._done)
            self._tensor.record_stream(stream)
        return self._tensor


class Later:
    """A small tensor that the host reads later, without waiting for what has been queued on its device since."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> Any:
        """Its plain values, as of ``Tensor.tolist``."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor.tolist()


@contextlib.contextmanager
def masked_path(on: bool = True) -> Iterator[None]:
    """Treat the CPU as a GPU inside (for tests): nothing is read, writes are masked."""
    global _masked
    before, _masked = _masked, on
    try:
        yield
    finally:
        _masked = before
