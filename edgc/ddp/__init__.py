"""EDGC for PyTorch's ``DistributedDataParallel``: ``edgc.ddp.register(model, config, iterations=...)``."""

from edgc.ddp.hook import Handle
from edgc.ddp.registration import register

__all__ = ["Handle", "register"]
