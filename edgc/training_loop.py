"""Checks of the user's loss scale, also at the first step."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from edgc.config import CompressingConfig, EDGCConfig
from edgc.errors import UserError

Driver = TypeVar("Driver")


class _Watched(NamedTuple):
    """How messages call a driver, and what gives the parameters of its handle."""

    where: str
    parameters: Callable[[Any], Iterable[Tensor]]


_unscaled: weakref.WeakKeyDictionary[Any, _Watched] = weakref.WeakKeyDictionary()
"""Handles that were given no scaler, until their first step."""


def refuse_scaler(scaler: object, config: EDGCConfig, types: Mapping[str, torch.dtype], *, where: str) -> None:
    """Refuse what is no loss scale, and fp16 where nobody has said whether there is one.

    Args:
        types: of the gradients, by name.
    """
    if scaler is not None and scaler is not False and not callable(getattr(scaler, "scale", None)):
        raise UserError(f"scaler = {scaler!r} is not valid", where=where, fix="give a GradScaler, or False")
    half = [name for name, dtype in types.items() if dtype == torch.float16]
    if half and scaler is None and isinstance(config, CompressingConfig):
        fix = "give the GradScaler as scaler=..., or scaler=False if the loss is not scaled"
        raise UserError(f"the gradient of {half[0]} is in fp16, and no scaler was given", where=where, fix=fix)


def warn_of_scaler(
    handle: Driver, config: EDGCConfig, parameters: Callable[[Driver], Iterable[Tensor]], *, where: str
) -> None:
    """Warn if a ``GradScaler`` makes the first step of a model whose ``handle`` was not given one. Gradients do not
    show that they come multiplied by a number, but a scaler makes the optimizer step itself.

    Args:
        parameters: gives those of a handle, and holds none itself.
    """
    if isinstance(config, CompressingConfig):
        _watch_steps()
        _unscaled[handle] = _Watched(where, parameters)


@cache
def _watch_steps() -> None:
    # For good: torch goes through its hooks while they run, and none may leave then.
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _unscaled:
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for handle, (where, parameters) in list(_unscaled.items()):
        if stepped.isdisjoint(map(id, parameters(handle))):
            continue
        del _unscaled[handle]
        if handle.active and scaler_steps():
            what = f"{where} was given no scaler, but a GradScaler makes the steps: error feedback and"
            fix = "entropies follow its scale; give scaler=..., or scaler=False to leave it so"
            warnings.warn(f"{what} {fix}", stacklevel=2)


def scaler_steps() -> bool:
    """True if one of the callers is a method of a ``GradScaler`` that is enabled."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler) and caller.is_enabled():
            return True
        frame = frame.f_back
    return False
