"""EDGC for PyTorch's FSDP2: ``edgc.fsdp.register(model, config, iterations=...)`` after ``fully_shard``."""

from edgc.fsdp.handle import Handle
from edgc.fsdp.registration import register
from edgc.fsdp.strategy import StrategyHandle

__all__ = ["Handle", "StrategyHandle", "register"]
