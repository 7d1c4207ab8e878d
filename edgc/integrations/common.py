"""What the frameworks share: the model inside what they have wrapped, numbers to log, and a file of state per rank."""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

import edgc.ddp
import edgc.fsdp
from edgc.checkpoints import rank_files
from edgc.config import EDGCConfig
from edgc.errors import UserError
from edgc.runtime.groups import gather_objects, refuse_differing, together

Handle = edgc.ddp.Handle | edgc.fsdp.Handle

LOST = "what error feedback owed is lost, and the controller begins anew"


def register(model: Any, config: EDGCConfig, *, iterations: int, scaler: Any) -> Handle:
    """:func:`edgc.ddp.register` or :func:`edgc.fsdp.register` for what a framework has wrapped and, perhaps, told
    torch to compile.

    Raises:
        UserError: on every rank, if it is neither under DDP nor sharded by FSDP2, with what it is.
    """
    inner = getattr(model, "_orig_mod", model)  # of torch.compile, which compiles at the first call
    if isinstance(inner, DistributedDataParallel):
        return edgc.ddp.register(inner, config, iterations=iterations, scaler=scaler)
    if (root := sharded(model)) is not None:
        handle = edgc.fsdp.register(root, config, iterations=iterations, scaler=scaler)
        assert isinstance(handle, edgc.fsdp.Handle)  # without a strategy
        return handle
    kinds = {kind.__name__ for kind in type(inner).__mro__}
    what, fix = f"the framework trains a {type(inner).__name__}, not one under DDP or FSDP2", "let it use one of them"
    if "DeepSpeedEngine" in kinds:
        what = "DeepSpeed averages gradients itself, at any ZeRO stage, and lets nobody else do it"
    elif "FullyShardedDataParallel" in kinds:
        what, fix = "FSDP1 shards the model, and has no place for this", "let the framework use FSDP2 (fsdp_version=2)"
    elif len(gather_objects(None)) == 1:
        what, fix = "one process has no gradients to average", "start several (torchrun), or leave EDGC out"
    raise UserError(what, where="edgc.integrations", fix=fix)


def sharded(model: nn.Module) -> Any:
    """The outermost module that FSDP2 shards, which need not be ``model`` itself; None if nothing is sharded.

    Raises:
        UserError: if there are several beside each other.
    """
    if isinstance(model, FSDPModule):
        return model
    found = [root for child in model.children() if (root := sharded(child)) is not None]
    if len(found) > 1:
        what = f"FSDP2 shards {len(found)} modules of {type(model).__name__}, and none that holds them all"
        raise UserError(what, where="edgc.integrations", fix="call fully_shard on that one, too, after its parts")
    return found[0] if found else None


def metrics(handle: Handle) -> dict[str, float]:
    """Numbers of this rank's last iteration for a log, those that there are.

    ``edgc_bytes`` sent, ``edgc_rank`` in use, ``edgc_error``, the share of its gradient and error feedback that this
    rank kept back, and ``edgc_entropy`` in nats, as it was last measured. On a GPU the host waits for them.
    """
    last = handle.last
    if last is None:
        return {}
    monitor = getattr(handle.engine, "monitor", None)  # a reduce-scatter follows no entropy
    found = {
        "edgc_bytes": last.statistics.bytes,
        "edgc_rank": last.rank,
        "edgc_error": last.statistics.worker_error,
        "edgc_entropy": monitor and monitor.entropy_sampled,
    }
    return {key: value for key, value in found.items() if value is not None and math.isfinite(value)}


def save(handle: Handle, folder: str | Path, name: str = "edgc") -> None:
    """Save the state of every rank in ``folder``; all files are whole when it returns, and none of a run with another
    number of ranks is left. To be called on every rank.

    Raises:
        UserError: on every rank, if one cannot write its file.
    """
    file = Path(folder) / f"{name}-{_place(handle)}.pt"

    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        rank_files.dump(part := file.with_suffix(".part"), handle.state_dict())
        part.replace(file)

    together(write)
    for other in _files(folder, name):
        if other.stem.split("-")[-1] != file.stem.split("-")[-1]:
            other.unlink(missing_ok=True)


def load(handle: Handle, folder: str | Path, name: str = "edgc") -> None:
    """Go on from what :func:`save` left in ``folder``, also with another number of ranks. To be called on every rank.

    Raises:
        UserError: on every rank, if some files are missing, cannot be read or are of another iteration than the others,
            as after a job that was killed while it saved.

    Warns:
        UserWarning: if there are none.
    """
    files = [Path(folder) / f"{name}-{_place(handle)}.pt"]
    own = gather_objects(files[0].is_file())  # also waits for a rank that is still saving what is the framework's
    if not all(own):
        files = _files(folder, name)
        if not any(gather_objects(len(files))):
            if dist.get_rank() == 0:
                warnings.warn(f"edgc: no state in {folder}: {LOST}", stacklevel=2)
            return

    def read() -> Any:
        states = [rank_files.load_plain(file, file.parent, file.name, map_location="cpu") for file in files]
        return states[0] if all(own) else states

    state = together(read)
    together(lambda: handle.load_state_dict(state))
    what, fix = "iterations of the saved states", "go on from an older checkpoint"
    refuse_differing(what, handle.engine.iteration, where=str(folder), fix=fix)


def _files(folder: str | Path, name: str) -> list[Path]:
    """Those of any number of ranks; not of a model whose name begins with this one."""
    usual = re.compile(rf"{re.escape(name)}-\d+-of-\d+")
    return sorted(file for file in Path(folder).glob("*.pt") if usual.fullmatch(file.stem))


def _place(handle: Handle) -> str:
    group = handle.group if isinstance(handle, edgc.ddp.Handle) else None  # a model is sharded over all ranks
    return f"{dist.get_rank(group)}-of-{dist.get_world_size(group)}"
