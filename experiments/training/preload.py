"""What a run is trained by, imported as fast as that goes and without the warnings of its libraries."""

from __future__ import annotations

import gc
import logging
import warnings

from edgc.megatron.cpu_shims import without_compiler

gc.disable()  # nothing that is imported is garbage, and there are half a million objects of it to walk through
# Megatron warns on every import about each optional package that is absent.
warnings.filterwarnings("ignore", module=r"megatron\.")
# Nor is it this project that gives torch the sharded tensors which torch calls deprecated: Megatron's checkpoints do.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.checkpoint")
logging.getLogger("megatron").setLevel(logging.ERROR)
with without_compiler():
    import torch._dynamo  # noqa: F401 (an optimizer imports it when it is made: here once, not in every rank)

    from experiments.training.train import work as work
gc.freeze()  # nor is it later: a rank's full collection took 0.4 s
gc.enable()
