"""torchtitan: ``register(trainer, EDGCConfig(...))`` between ``trainer = config.build()`` and ``trainer.train()``."""

from __future__ import annotations

from functools import wraps
from typing import Any

from edgc.config import EDGCConfig
from edgc.errors import UserError
from edgc.integrations import common
from edgc.integrations.common import Handle


def register(trainer: Any, config: EDGCConfig) -> Handle:
    """Compress the gradients of a torchtitan trainer, add numbers to what it logs, and keep the state of every rank in
    its checkpoints, as ``edgc``.

    torchtitan averages in every backward, also when it accumulates gradients, and each is an iteration.

    Args:
        trainer: not trained yet, nor loaded.

    Raises:
        UserError: on every rank, for settings under which backward is not one, or not in Python.
    """
    settings = trainer.config
    for used, what, fix in (
        (len(trainer.model_parts) > 1, "the model has several pipeline stages here", "set pipeline_parallel_degree: 1"),
        (
            getattr(trainer.model_parts[0], "_skip_lm_head", False),
            "ChunkedLossWrapper reduces the last unit in a backward of its own",
            "use its loss_fn alone: loss=CrossEntropyLoss.Config()",
        ),
        (
            not settings.training.disable_cuda_graphs and trainer.device.type == "cuda",
            "backward is recorded in a CUDA graph, in which nothing is decided",
            "set training.disable_cuda_graphs",
        ),
    ):
        if used:
            raise UserError(what, where="edgc.integrations.torchtitan", fix=fix)
    iterations = settings.training.steps * trainer.gradient_accumulation_steps
    handle = common.register(trainer.model_parts[0], config, iterations=iterations, scaler=None)
    if trainer.checkpointer.enable:
        trainer.checkpointer.states["edgc"] = handle
    log = trainer.metrics_processor.log

    @wraps(log)
    def log_more(*args: Any, extra_metrics: dict[str, Any] | None = None, **kwargs: Any) -> None:
        numbers = common.metrics(handle) if handle.active else {}
        log(*args, extra_metrics={**(extra_metrics or {}), **numbers}, **kwargs)

    trainer.metrics_processor.log = log_more
    return handle
