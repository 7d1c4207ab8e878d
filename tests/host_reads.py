"""Finds where the host would wait for a device, on tensors of the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# Values that are read, and results whose size is.
_READS = {
    _aten._local_scalar_dense,
    _aten.nonzero,
    _aten.nonzero_numpy,
    _aten.masked_select,
    _aten.equal,
    _aten.is_nonzero,
    _aten._unique,
    _aten._unique2,
    _aten.unique_dim,
    _aten.unique_consecutive,
    _aten.bincount,
    _aten.histc,
}
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
_MASKS = (torch.bool, torch.uint8)
_METHODS = ("tolist", "numpy", "cpu")


class HostRead(AssertionError):
    """The host would have to wait."""


class NoHostReads(TorchDispatchMode):
    """Raises :class:`HostRead` at the first operation that would make the host wait if its tensors were a GPU's."""

    def __init__(self) -> None:
        super().__init__()
        self._paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if not self._paused:
            packet = func.overloadpacket
            if packet in _READS:
                raise HostRead(str(func))
            if packet in _INDEXING and any(i is not None and i.dtype in _MASKS for i in args[1]):
                raise HostRead(f"{func} with a mask")
            if packet is _aten.repeat_interleave and options.get("output_size") is None:
                raise HostRead(f"{func} without the size of its result")
        return func(*args, **options)

    def __enter__(self) -> NoHostReads:
        self._methods = {name: getattr(Tensor, name) for name in _METHODS}
        for name, method in self._methods.items():
            setattr(Tensor, name, self._refusing(name, method))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for name, method in self._methods.items():
            setattr(Tensor, name, method)

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[None]:
        """For another thread than the one that has entered this."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def _refusing(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if not self._paused:
                raise HostRead(f"Tensor.{name}")
            return method(*arguments, **options)

        return call

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For work on tensors that are the host's own."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
