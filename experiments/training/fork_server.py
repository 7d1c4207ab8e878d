"""Imported once by the server that forks a CPU machine's ranks; a rank that is spawned imports it itself.

The server ends with the launcher that started it. By itself it would outlive a killed launcher for as long as a rank
lives, and the ranks as long as the server: each forked rank holds a copy of the pipe by whose end the server notices
that it is no longer needed. Ctrl-C reaches every process of a terminal; the server and its ranks leave it to the
launcher.
"""

from __future__ import annotations

import gc
import logging
import signal
import warnings

from experiments.common.processes import die_with_parent

die_with_parent(signal.SIGKILL)()
signal.signal(signal.SIGINT, signal.SIG_IGN)

from edgc.megatron.cpu_shims import without_compiler  # noqa: E402 (torch takes seconds; a launcher may be killed before)

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
