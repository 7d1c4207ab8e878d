"""Entropy-driven dynamic gradient compression for distributed training (arXiv 2511.10333).

Settings are here; :mod:`edgc.megatron` attaches them to a Megatron-Core model, :mod:`edgc.ddp` to a model under
PyTorch's ``DistributedDataParallel``. Needs torch only (and the numpy that torch's collectives of objects use), and
this package itself not even that, so that settings can be checked on a login node.
"""

from __future__ import annotations

from edgc.config import EDGCConfig
from edgc.errors import UserError
from edgc.sections import EntropyConfig, TimingConfig

__version__ = "0.1.0"
__all__ = ["EDGCConfig", "EntropyConfig", "TimingConfig", "UserError", "__version__"]
