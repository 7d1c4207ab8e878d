"""``edgc.fsdp.register``: what it refuses, and how the engine of a sharded model is made."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from edgc.checks import integer
from edgc.compressors.base import compressible
from edgc.config import EDGCConfig, refuse_stages
from edgc.control.adaptive import NO_MATRIX
from edgc.engine import Engine, Matrix, Scaler
from edgc.entropy.meter import embeddings
from edgc.errors import UserError
from edgc.fsdp.handle import Handle
from edgc.fsdp.layout import Layout, layout_of, refuse_waiting
from edgc.fsdp.scatter import ScatterHandle, refuse_method
from edgc.fsdp.strategy import StrategyHandle
from edgc.fsdp.strategy import refuse as refuse_strategy
from edgc.fsdp.units import WHERE, Part, Unit, units_of
from edgc.fsdp.whole import owners_of
from edgc.runtime.groups import agreed, gather_objects, refuse_differing
from edgc.strategies.base import StrategyConfig, refuse_other_types
from edgc.training_loop import refuse_scaler, warn_of_scaler


def register(
    model: nn.Module,
    config: EDGCConfig,
    *,
    iterations: int,
    replicas: Any = None,
    scaler: Scaler | Literal[False] | None = None,
    strategy: StrategyConfig | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Handle | StrategyHandle:
    """Average the gradients of ``model`` as ``config`` says, from the next backward on.

    Sharded over a 2-D mesh, replicas by shards, torch reduce-scatters within a shard group, and what goes between
    replicas is compressed. Sharded over all ranks the reduce-scatter itself is quantised, with error feedback.

    To be called on every rank, before or after the model gets its weights and not inside an iteration. A refusal leaves
    nothing behind.

    Args:
        model: the root of what ``fully_shard`` was called on.
        iterations: length of the run in backward passes that average (warm-up is a share of it).
        replicas: the 1-D mesh of the replicas, where ``fully_shard`` was given the 1-D mesh of the shards.
        scaler: the ``GradScaler`` (or anything with its ``scale``) that the loss is multiplied with, on all ranks.
            False says that there is none, or one that is to be ignored; without it units that reduce in fp16 are
            refused, and a ``GradScaler`` that makes the first step is warned of. A strategy refuses one.
        strategy: what replicas exchange, and when (:mod:`edgc.strategies`); by default the gradients of every step.
        optimizer: the one whose steps a strategy counts.

    Raises:
        UserError: for a model or settings that this cannot work with, on every rank.

    Warns:
        UserWarning: on the first rank, if these settings will compress nothing in this model, and if a ``GradScaler``
            makes the steps that was not given.
    """
    units, layout = _agreed(model, config, iterations, replicas, scaler, strategy, optimizer)
    tables = embeddings(model)
    looked_up = {name for unit in units for name, p in unit.parameters.items() if p in tables}
    handle: Handle | StrategyHandle
    if strategy is not None and strategy.name != "every_step":
        assert optimizer is not None
        handle = StrategyHandle(units, layout, config, strategy, optimizer, iterations, looked_up)
    elif layout.replicas is None:
        handle = scattering = ScatterHandle(config, model, units, layout, scaler or None)
        compresses = scattering.engine.method is None or any(_compressed(unit, config) for unit in units)
        if not compresses and dist.get_rank() == 0:
            warnings.warn(f"edgc: nothing is compressed in this run: {NO_MATRIX}", stacklevel=2)
    else:
        owners = {}
        if config.build().has_rank:
            parts = [part for unit in units if unit.by_rows for part in _compressed(unit, config)]
            owners = owners_of(parts, layout.shards.size())
        engine = Engine(
            config,
            stage=0,
            stages=[_matrices(units, config, owners, looked_up)],
            iterations=iterations,
            overlapped=units[0].device.type == "cuda",
            embeddings=looked_up,
        )
        handle = Handle(engine, model, units, layout, scaler or None, owners=owners)
    handle.start()
    if scaler is None and isinstance(handle, Handle) and dist.get_rank() == 0:
        # As they are by then: torch may put others in the place of those of now.
        warn_of_scaler(
            handle, config, lambda handle: [p for unit in handle._units for p in unit.parameters.values()], where=WHERE
        )
    return handle


def _compressed(unit: Unit, config: EDGCConfig) -> list[Part]:
    """Parameters that are large enough to be compressed as a whole."""
    bits = 8 * unit.dtype.itemsize
    return [part for part in unit.parts if compressible(part.whole, config.min_compression_elements, bits)]


def _matrices(
    units: Sequence[Unit], config: EDGCConfig, owners: Mapping[str, int], looked_up: set[str]
) -> list[Matrix]:
    """Matrices that are compressed on any rank, whole or shards as large as the first rank's: equal on all ranks."""
    found = []
    for unit in units:
        bits = 8 * unit.dtype.itemsize
        for part in _compressed(unit, config):
            shape = part.whole if part.name in owners else part.padded
            if compressible(shape, config.min_compression_elements, bits):
                found.append(Matrix(shape[0], shape[1], bits, part.name in looked_up))
    return found


def _agreed(
    model: nn.Module,
    config: EDGCConfig,
    iterations: int,
    replicas: Any,
    scaler: Any,
    strategy: StrategyConfig | None,
    optimizer: torch.optim.Optimizer | None,
) -> tuple[list[Unit], Layout]:
    """The units and groups, if every rank can and means the same.

    Raises:
        UserError: on every rank, before there is anything to be left behind.
    """

    def check() -> tuple[list[Unit], Layout]:
        refuse_other_types(config, strategy, WHERE)
        units = units_of(model)
        layout = layout_of(units, replicas)
        refuse_waiting(units, layout)
        integer("iterations", iterations, 1)
        refuse_stages(config, WHERE, "FSDP2")
        refuse_scaler(scaler, config, {part.name: unit.dtype for unit in units for part in unit.parts}, where=WHERE)
        if strategy is not None and strategy.name != "every_step":
            refuse_strategy(strategy, units, layout, optimizer, scaler)
        elif layout.replicas is None:
            refuse_method(config, units)
        return units, layout

    units, layout = agreed(check, where=WHERE)
    places = gather_objects(layout.place)
    if any(places[other][0] != shard for shard, others in places for other in others):
        what, fix = "replicas is a mesh of ranks that hold different shards", "give both dimensions of one mesh"
        raise UserError(what, where=WHERE, fix=fix)
    settings = repr((config, iterations, scaler in (None, False), strategy))
    refuse_differing("config, iterations or options", settings, where=WHERE, fix="give the same on every rank")
    parts = repr([(part.name, part.whole) for unit in units for part in unit.parts])
    cut = layout.tensor is not None
    fix = "let the size of every dimension that is cut be divisible" if cut else "build the same model on every rank"
    refuse_differing("parameters or their shapes", parts, where=WHERE, fix=fix)
    return units, layout
