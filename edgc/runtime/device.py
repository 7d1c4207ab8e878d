"""Values on a device, and who looks at them; modes of torch that the library works in.

On a CPU the host reads whether a result is finite and decides. On a GPU reading would make the host wait for the
device, so everything goes on there and writes are masked: the *masked path*. Tests run that path without a GPU, on CPU
tensors, with :func:`masked_path`.

Whatever the modes of its caller are, the library has its own. Autograd, autocast and inference mode belong to a thread,
deterministic mode and the precision of products to the process. The former are set at every entry of the library
(:func:`own_modes`); the latter only where the caller waits for it, for another thread may be in the middle of its own
backward. There, which is on a CPU, products that the process rounds to less than fp32 are made in fp64
(:func:`reduced_products`). The default type is asked for nowhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from edgc.lazy import Tensor, torch

_masked = False
_LIBRARIES = ("cuda", "mkldnn")
_EXACT = {"none", "ieee", "highest"}


def host_decides(device: torch.device) -> bool:
    """True if the host may read values that lie on ``device`` within a step."""
    return device.type == "cpu" and not _masked


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """``values``, which lie on the CPU, on ``device``: to a GPU from pinned memory, or the host would wait until the
    GPU comes to it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class StreamTensor:
    """A tensor that is made in one stream of a GPU and used in another one later."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._done = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def use(self) -> Tensor:
        """The tensor, for work that is queued in the current stream from now on."""
        if self._done is not None:
            stream = torch.cuda.current_stream(self._tensor.device)
            stream.wait_event(self._done)
            self._tensor.record_stream(stream)
        return self._tensor


class HostCopy:
    """A small tensor that the host reads later, without waiting for work queued on its device since."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> Any:
        """Plain values, as of ``Tensor.tolist``."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensor.tolist()


@contextlib.contextmanager
def masked_path(on: bool = True) -> Iterator[None]:
    """Treat the CPU as a GPU inside (for tests): nothing is read, writes are masked."""
    global _masked
    previous, _masked = _masked, on
    try:
        yield
    finally:
        _masked = previous


@contextlib.contextmanager
def own_modes(*, waited_for: bool = True) -> Iterator[None]:
    """Work without autograd, autocast or inference mode inside and, if the caller's thread waits, neither with
    deterministic algorithms, of which this library has no others, nor with products of less than fp32. Also a decorator
    of entries of the library."""
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if waited_for and torch.are_deterministic_algorithms_enabled():
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            torch.use_deterministic_algorithms(False)
            stack.callback(torch.use_deterministic_algorithms, True, warn_only=warns)
        if waited_for and not _EXACT.issuperset(map(_precision, _LIBRARIES)):
            stack.enter_context(_whole_products())
        stack.enter_context(torch.no_grad())
        yield


def reduced_products() -> bool:
    """True if the process lets products of fp32 matrices on a CPU be rounded to less."""
    return _precision("mkldnn") not in _EXACT


def _precision(library: str) -> str:
    """Precision of products of fp32. The properties of ``torch.backends`` say the same in twenty times the time;
    torch before 2.9 has one precision for all libraries."""
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    return torch.get_float32_matmul_precision() if getter is None else getter(library, "matmul")


@contextlib.contextmanager
def _whole_products() -> Iterator[None]:
    precisions, older = {name: _precision(name) for name in _LIBRARIES}, None
    with contextlib.suppress(RuntimeError):  # torch gives none where the libraries differ
        older = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        if hasattr(torch._C, "_get_fp32_precision_getter"):
            for library, precision in precisions.items():
                getattr(torch.backends, library).matmul.fp32_precision = precision
