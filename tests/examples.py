"""The settings that the tests of all methods run: the examples in the methods' own files, by their names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from edgc.compressors import Compressor, Gradient
from edgc.compressors.ef21 import Estimates
from edgc.compressors.entrywise.feedback import EntrywiseConfig
from edgc.compressors.powersgd import LowRankConfig
from edgc.config import ConstantConfig, EDGCConfig, Example, methods
from edgc.control.settings import PolicyConfig

FOUND: dict[str, tuple[type[EDGCConfig], Example]] = {
    name: (kind, example) for kind in methods() for name, example in kind.examples.items()
}


def settings_of(name: str) -> dict[str, Any]:
    """The settings of an example, ``method`` and ``policy`` included, as a mapping."""
    kind, example = FOUND[name]
    policy = {"policy": kind.policy} if hasattr(kind, "policy") else {}
    return {"method": kind.method, **policy, **example.settings}


def config_of(name: str, **changes: Any) -> EDGCConfig:
    """An example with some settings changed."""
    return EDGCConfig.from_dict({**settings_of(name), **changes})


def below(*kinds: type[EDGCConfig]) -> list[str]:
    """The examples of some kinds of methods."""
    return [name for name, (kind, _) in FOUND.items() if issubclass(kind, kinds)]


POLICIES = [kind.policy for kind in methods() if issubclass(kind, PolicyConfig)]
EACH = {kind.method: settings_of(next(iter(kind.examples))) for kind in methods() if kind.examples}
"""The first example of every method, by the method's name."""
CONSTANT = below(ConstantConfig)
ENTRYWISE = below(EntrywiseConfig)
LOW_RANK = below(LowRankConfig)
DENSE = [name for name in FOUND if name not in ENTRYWISE + LOW_RANK]


def known(compressor: Compressor, gradient: Gradient) -> Tensor:
    """The estimate of a gradient that all replicas have, in fp64 on the CPU; zeros where there is none."""
    found = compressor.estimates.get(gradient.name) if isinstance(compressor, Estimates) else None
    shape = gradient.tensor.shape
    return torch.zeros(shape, dtype=torch.float64) if found is None else found.to("cpu", torch.float64)


def came_in(compressor: Compressor, gradient: Gradient) -> Tensor:
    """What a gradient brings, in fp64 on the CPU: itself or, under momentum correction, its next velocity; under EF21
    what it adds to the estimate that all replicas have (:func:`known`), which counts in."""
    own: Any = compressor
    if isinstance(own, Estimates):
        last = own.velocities.get(gradient.name)
        found = gradient.tensor.detach().to("cpu", torch.float64, copy=True)
        if last is not None and own.momentum:
            found = (1 - own.momentum) * found + own.momentum * last.to("cpu", torch.float64)
        started = own.started.get(gradient.name)
        base = 0 if started is None or last is None else last.to("cpu", torch.float64) * float(started)
        return found - base + known(compressor, gradient)
    found = gradient.tensor.detach().to("cpu", torch.float64, copy=True)
    momentum = own.velocities.momentum if hasattr(own, "velocities") else 0.0
    if momentum:
        last = own.velocities.tensors.get(gradient.name)
        found = (1 - momentum) * found + (0 if last is None else momentum * last.to("cpu", torch.float64))
    return found
