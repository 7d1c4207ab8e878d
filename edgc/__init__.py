"""Entropy-driven dynamic gradient compression for distributed training (arXiv 2511.10333).

``register`` attaches settings to a model under PyTorch's ``DistributedDataParallel`` (:mod:`edgc.ddp`), ``attach`` to
a Megatron-Core model (:mod:`edgc.megatron`). Needs torch only (and the numpy that torch's collectives of objects use),
and until one of the two is asked for not even that, so that settings can be checked on a login node.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from edgc.config import EDGCConfig
from edgc.errors import UserError
from edgc.sections import EntropyConfig, PipelineConfig

if TYPE_CHECKING:
    from edgc.ddp import Handle, register
    from edgc.megatron import Attachment, attach

__version__ = "0.1.0"
__all__ = [
    "Attachment",
    "EDGCConfig",
    "EntropyConfig",
    "Handle",
    "PipelineConfig",
    "UserError",
    "__version__",
    "attach",
    "register",
]
_FROM = {"Handle": "edgc.ddp", "register": "edgc.ddp", "Attachment": "edgc.megatron", "attach": "edgc.megatron"}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FROM[name]), name)
