"""Checks of what is to be rehearsed: the model, the optimizer and the settings."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from edgc.config import CompressingConfig, EDGCConfig
from edgc.control.settings import PolicyConfig
from edgc.errors import UserError
from edgc.strategies.process import refuse_no_optimizer

WHERE = "edgc.rehearsal"


def checked(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.device:
    """The one device of a model and optimizer that can be rehearsed.

    Raises:
        UserError: they cannot.
    """
    if isinstance(model, DistributedDataParallel):
        raise UserError("the model is DistributedDataParallel already", where=WHERE, fix="give what it was made of")
    refuse_no_optimizer(WHERE, optimizer)
    parameters = list(model.parameters())
    if not any(p.requires_grad for p in parameters):
        raise UserError("the model has no parameter to train", where=WHERE, fix="let some require gradients")
    devices = sorted({str(p.device) for p in parameters})
    if len(devices) > 1:
        raise UserError(f"the model lies on {', '.join(devices)}", where=WHERE, fix="move it to one device")
    own, stepped = set(parameters), [p for group in optimizer.param_groups for p in group["params"]]
    others = [p for p in stepped if p not in own]
    if others:
        what = f"the optimizer steps {len(others)} tensors that are no parameters of the model"
        raise UserError(what, where=WHERE, fix="make it of model.parameters(), after the model is on its device")
    return parameters[0].device


def refuse_other_names(buckets: Sequence[Sequence[str]], parameters: Collection[str]) -> None:
    """Refuse buckets that do not hold every parameter that is trained once."""
    given = [name for bucket in buckets for name in bucket]
    for name in [*given, *parameters]:
        if name not in parameters or given.count(name) != 1:
            what = f"buckets hold {name} {given.count(name)} times"
            if name not in parameters:
                what = f"buckets hold {name}, which is not trained"
            raise UserError(what, where=WHERE, fix="name every parameter that requires gradients once")


def refuse_times(config: EDGCConfig) -> None:
    """Refuse settings that are decided by the time of communication, of which there is none here."""
    refused = ""
    if isinstance(config, PolicyConfig) and not config.gives_ranks and config.r_max is None:
        refused = "r_max = None is searched by timing communication"
    elif isinstance(config, PolicyConfig) and config.alignment == "measured":
        refused = "alignment = 'measured' is of times of communication"
    elif isinstance(config, CompressingConfig) and config.cost_gate:
        refused = "cost_gate = True times communication"
    if refused:
        fix = "give r_max" if "r_max" in refused else f"leave out {refused.partition(' ')[0]}"
        raise UserError(f"{refused}, and a rehearsal has none", fix=fix)  # a caller knows the settings' file
