"""Notices a ``GradScaler`` that :func:`edgc.ddp.register` was not given.

Gradients do not show that they come multiplied by a number. But a scaler makes the optimizer step itself, and torch
calls whoever asked for it before a step: so the first step of the model's parameters says whether there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import count
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

_watches: dict[int, tuple[set[int], Callable[[], None]]] = {}
_keys = count()


def watch_first_step(parameters: Iterable[Tensor], found: Callable[[], None]) -> Callable[..., Any]:
    """Call ``found`` if the first step of an optimizer that has one of ``parameters`` is made by a ``GradScaler``.

    Returns:
        What ends the watch, which that step ends too.
    """
    _listen()
    key = next(_keys)
    _watches[key] = {id(parameter) for parameter in parameters}, found  # they are the model's, to live and to die
    return partial(_watches.pop, key, None)


@cache
def _listen() -> None:
    # For good: torch goes through its hooks while they run, and none may leave then.
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _watches:
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for key, (watched, found) in list(_watches.items()):
        if not watched.isdisjoint(stepped):
            _watches.pop(key, None)
            if _scaler_steps():
                found()


def _scaler_steps() -> bool:
    """Whether one of the callers is a method of a ``GradScaler`` that is enabled."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler) and caller.is_enabled():
            return True
        frame = frame.f_back
    return False
