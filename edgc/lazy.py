"""torch, imported when it is first used.

A compressor is one file: its settings, how it is drawn, and its algorithm. Settings are read where there is no torch (a
login node, a plan of the pipeline), so such a file says ``from edgc.lazy import Tensor, torch``. ``Tensor`` is for
annotations; at run time it is ``torch.Tensor``.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:
    Tensor = Any

    class _Torch(ModuleType):
        """Stands for torch; once asked for a name it takes over all of them, so that later ones cost nothing more."""

        def __getattr__(self, name: str) -> Any:
            module = importlib.import_module("torch")
            vars(self).update(vars(module))
            return getattr(module, name)

    torch = _Torch("torch")
