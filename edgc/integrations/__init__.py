"""EDGC in frameworks that train under PyTorch's DDP or FSDP2, each in a module of its own that alone imports the
framework: ``transformers``, ``accelerate``, ``lightning``, ``torchtitan``."""

from edgc.integrations.common import metrics

__all__ = ["metrics"]
