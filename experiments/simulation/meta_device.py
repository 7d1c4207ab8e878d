"""The meta device in a GPU's place: tensors with shapes and without memory, and a count of what they would take."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edgc.compressors.powersgd import state
from edgc.errors import UserError
from edgc.megatron import cpu_shims

META = torch.device("meta")


class Ledger(TorchDispatchMode):
    """Counts the memory that the meta tensors made inside it would take.

    Wherever a program reads a number out of a meta tensor (whether gradients are finite, a norm) it gets 1.

    Attributes:
        live: bytes of what is alive, each storage once.
        peak: the largest ``live`` since it was last set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device == META:
            return {torch.bool: True}.get(args[0].dtype, 1.0)
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.device == META:
                self._see(value.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def stand_in_for_cuda() -> None:
    """Megatron asks for the current CUDA device wherever it allocates: it gets the meta device, for good.

    Raises:
        UserError: where there is a GPU.
    """
    if not cpu_shims.install(META):
        raise UserError("the dry run needs a process that sees no GPU", fix="set CUDA_VISIBLE_DEVICES to nothing")
    functional: Any = torch.nn.functional
    functional.dropout = _dropout
    state.random_factor = _drawn


def _drawn(seed: int, draw: int, name: str, length: int, rank: int) -> Tensor:
    return torch.empty(length, rank, device=META)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As on a GPU, where a mask of one byte an entry is kept; elsewhere it would be of the input's type."""
    return torch.native_dropout(x, p, training)[0] if training and p > 0 else x
