"""What the frameworks share: the model inside what they have wrapped, numbers to log, and a file of state per rank."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import edgc.ddp
from edgc.config import EDGCConfig
from edgc.errors import UserError
from edgc.runtime.groups import gather_objects

LOST = "what error feedback owed is lost, and the controller begins anew"


def register(model: Any, config: EDGCConfig, *, iterations: int, scaler: Any) -> edgc.ddp.Handle:
    """:func:`edgc.ddp.register` for what a framework has wrapped and, perhaps, told torch to compile.

    Raises:
        UserError: on every rank, if it is not a model under DDP, with what it is.
    """
    inner = getattr(model, "_orig_mod", model)  # of torch.compile, which compiles at the first call
    if not isinstance(inner, DistributedDataParallel):
        kinds = {kind.__name__ for kind in type(inner).__mro__}
        what, fix = f"the framework trains a {type(inner).__name__}, not one under DDP", "let it use DDP"
        if "DeepSpeedEngine" in kinds:
            what = "DeepSpeed averages gradients itself, at any ZeRO stage, and lets nobody else do it"
        elif kinds & {"FSDPModule", "FullyShardedDataParallel"}:
            what = "FSDP shards the model, and only models that are whole on every rank can be registered here"
        elif len(gather_objects(None)) == 1:
            what, fix = "one process has no gradients to average", "start several (torchrun), or leave EDGC out"
        raise UserError(what, where="edgc.integrations", fix=fix)
    return edgc.ddp.register(inner, config, iterations=iterations, scaler=scaler)


def metrics(handle: edgc.ddp.Handle) -> dict[str, float]:
    """Numbers of this rank's last iteration for a log, those that there are.

    ``edgc_bytes`` sent, ``edgc_rank`` in use, ``edgc_error``, the share of its gradient and error feedback that this
    rank kept back, and ``edgc_entropy`` in nats, as it was last measured. On a GPU the host waits for them.
    """
    last = handle.last
    if last is None:
        return {}
    found = {
        "edgc_bytes": last.statistics.bytes,
        "edgc_rank": last.rank,
        "edgc_error": last.statistics.worker_error,
        "edgc_entropy": handle.engine.monitor.entropy_sampled,
    }
    return {key: value for key, value in found.items() if value is not None and math.isfinite(value)}


def save(handle: edgc.ddp.Handle, folder: str | Path, name: str = "edgc") -> None:
    """Save the state of every rank in ``folder``; all files are whole when it returns. To be called on every rank."""
    state = handle.state_dict()
    file = Path(folder) / f"{name}-{state['rank']}-of-{state['world']}.pt"
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, part := file.with_suffix(".part"))
    part.replace(file)
    gather_objects(None)


def load(handle: edgc.ddp.Handle, folder: str | Path, name: str = "edgc") -> None:
    """Go on from what :func:`save` left in ``folder``, also with another number of ranks. To be called on every rank.

    Raises:
        UserError: if some files are missing.

    Warns:
        UserWarning: if there are none.
    """
    rank, world = dist.get_rank(handle.group), dist.get_world_size(handle.group)
    files = [Path(folder) / f"{name}-{rank}-of-{world}.pt"]
    own = gather_objects(files[0].is_file())  # also waits for a rank that is still saving what is the framework's
    if not all(own):
        files = sorted(Path(folder).glob(f"{name}-*-of-*.pt"))
        if not any(gather_objects(len(files))):
            if rank == 0:
                warnings.warn(f"edgc: no state in {folder}: {LOST}", stacklevel=2)
            return
    states = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
    handle.load_state_dict(states[0] if all(own) else states)
