"""EDGC for PyTorch's ``DistributedDataParallel``: ``edgc.ddp.register(model, config, iterations=...)``."""

from edgc.ddp.hook import Handle, register

__all__ = ["Handle", "register"]
