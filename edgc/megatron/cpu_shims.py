"""Lets Megatron-Core train on CPU with gloo: the few places where it takes a CUDA device for granted.

Installed only where CUDA is absent; with CUDA :func:`install` does nothing. Everything else that CPU training needs is
a public setting (see ``experiments/training/model.py``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn", "empty_like", "zeros_like")
_installed = False
_device = torch.device("cpu")


def install(device: torch.device | None = None) -> bool:
    """Install the shims once; returns whether they are in force.

    Args:
        device: what stands for the CUDA device from now on; the CPU, or the meta device to learn sizes.
    """
    global _installed, _device
    if torch.cuda.is_available():
        return False
    _device = device or torch.device("cpu")
    if not _installed:
        _patch()
        _installed = True
    return True


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Import Megatron inside this on a CPU machine: its functions decorated with ``torch.compile`` stay as they are.

    The decoration alone loads the compiler, a third of the import time of every process, and with the fused kernels
    off nothing that it decorates is used.
    """
    if torch.cuda.is_available():
        yield
        return
    module: Any = torch
    original = torch.compile

    def unchanged(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        return function if function is not None else lambda decorated: decorated

    module.compile = unchanged
    try:
        yield
    finally:
        module.compile = original


def _patch() -> None:
    cuda: Any = torch.cuda
    module: Any = torch
    tensor_type: Any = torch.Tensor
    # device=torch.cuda.current_device() in layers, buffers and optimizers
    cuda.current_device = lambda: _device
    # timers and dist_checkpointing wait for the device
    cuda.synchronize = lambda *args, **kwargs: None
    # factory calls with device="cuda" spelled out
    for name in _FACTORIES:
        setattr(module, name, _without_cuda(getattr(torch, name)))
    # tensor.cuda() on scalars that are reduced; self on a CPU
    tensor_type.cuda = lambda self, *args, **kwargs: self.to(_device)
    # mixtures of experts: a name that Megatron leaves undefined where Transformer Engine is not installed
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # clip_grads groups gradients by the name of the CUDA tensor type
    original = torch.Tensor.type

    def cuda_type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        name = original(self).removeprefix("torch.").removeprefix("meta.")
        return f"torch.cuda.{name}"

    tensor_type.type = cuda_type_name


def _without_cuda(factory: Any) -> Any:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and not isinstance(device, int) and str(device).startswith("cuda"):
            kwargs["device"] = _device
        return factory(*args, **kwargs)

    return wrapped
