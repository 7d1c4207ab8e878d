"""EDGC in frameworks that wrap a model in PyTorch's DDP, each in a module of its own that alone imports the framework:
``transformers``, ``accelerate``, ``lightning``."""

from edgc.integrations.common import metrics

__all__ = ["metrics"]
