"""Hugging Face's Accelerate: ``register(accelerator, model, EDGCConfig(...), iterations=...)`` after ``prepare``."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator

from edgc.config import EDGCConfig
from edgc.errors import UserError
from edgc.integrations import common
from edgc.integrations.common import Handle

_handles: WeakKeyDictionary[Accelerator, dict[str, Handle]] = WeakKeyDictionary()


def register(
    accelerator: Accelerator, model: Any, config: EDGCConfig, *, iterations: int, name: str = "edgc"
) -> Handle:
    """Compress the gradients of a model that ``accelerator.prepare`` has wrapped in DDP or sharded by FSDP2.

    ``accelerator.save_state`` then saves a state per rank, and ``load_state`` waits for them and loads them. For
    ``accelerator.log`` there is :func:`edgc.integrations.metrics`.

    Args:
        iterations: length of the run in steps of the optimizer.
        name: of the state's files, for a second model.
    """
    handles = _handles.setdefault(accelerator, {})
    if name in handles and handles[name].active:
        raise UserError(f"{name!r} is registered already", fix="give a second model another name, or remove the first")
    handle = common.register(model, config, iterations=iterations, scaler=accelerator.scaler)
    if name not in handles:

        def save(models: Any, weights: Any, folder: str) -> None:
            if handles[name].active:
                common.save(handles[name], folder, name)

        def load(models: Any, folder: str) -> None:
            if handles[name].active:
                common.load(handles[name], folder, name)

        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
    handles[name] = handle
    return handle
