"""Choice of the saved state that a rank goes on from, also when the number of ranks has changed.

A saved state is what one replica needs: ``{"world": W, "rank": r, "engine": Engine.state_dict(), ...}``. Only error
feedback differs between replicas in a way that matters: it is what a replica has not sent yet. Warm starts and the
controller's state are equal on all. With W replicas the average still owes ``sum_w E_w / W``; after a change of W every
new replica takes exactly that mean as its error, so that the same is owed, with the smallest norm that does it: the
differences between the old replicas, which cancel in the average, are not carried on. This works for every compressor
whose state has ``errors``, a dictionary from parameter name to tensor. ``velocities``, what momentum correction keeps
of a replica's own gradients, are replaced by their mean for the same reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from edgc.checks import differences, need
from edgc.config import EDGCConfig
from edgc.errors import UserError

State = Mapping[str, Any]
LOCAL = {"errors": "error feedback", "velocities": "velocity"}
"""Parts of a compressor's state that each replica has of its own, by parameter name, and how messages call them."""


def state_for(saved: State | Sequence[State], *, world: int, rank: int) -> State:
    """The state for ``rank`` of ``world`` replicas.

    Args:
        saved: this rank's own state, or those of all ranks that were saved, in any order.

    Raises:
        UserError: a state of another rank or number of ranks, or a list that does not hold every rank once.

    Warns:
        UserWarning: when error feedback was redistributed; the run goes on, but not bit for bit as it would have.
    """
    if isinstance(saved, Mapping) or not isinstance(saved, Sequence):
        _check(saved)
        if saved["world"] != world:
            what = f"the saved state is of rank {saved['rank']} of {saved['world']}, but there are {world} ranks now"
            fix = f"give every rank the list of all {saved['world']} states; their error feedback is then redistributed"
            raise UserError(what, fix=fix)
        if saved["rank"] != rank:
            what = f"the saved state is of rank {saved['rank']}, but this is rank {rank}"
            raise UserError(what, fix="save and load one state per rank")
        return saved
    states = _all_ranks(saved)
    if len(states) == world:
        return states[rank]
    warnings.warn(
        f"edgc: a state of {len(states)} ranks goes on with {world}; error feedback is redistributed, its sum is kept",
        stacklevel=3,
    )
    return {**merge(states), "world": world, "rank": rank}


def merge(states: Sequence[State]) -> State:
    """Merge states for a new number of replicas: the first one's, with the mean of all error feedback and velocities.

    Raises:
        UserError: the states are not of the same parameters.
    """
    first = states[0]
    pipelines = [state.get("pipeline") for state in states]
    if all(isinstance(traffic, Mapping) for traffic in pipelines):
        errors = _mean([traffic["errors"] for traffic in pipelines if traffic is not None])
        first = {**first, "pipeline": {**first["pipeline"], "errors": errors}}
    compressors = [state["engine"]["compressor"] for state in states]
    local = [key for key in LOCAL if any(key in compressor for compressor in compressors)]
    if not local:
        return first
    compressor = {**compressors[0], **{key: _mean([c.get(key, {}) for c in compressors], LOCAL[key]) for key in local}}
    engine = {**first["engine"], "compressor": compressor}
    if "window" in engine:
        # One replica's sketches of what it kept say nothing of the mean; they begin anew.
        engine["window"] = {**engine["window"], "mean": None}
    return {**first, "engine": engine}


def _mean(replicas: Sequence[Mapping[str, Tensor]], kind: str = LOCAL["errors"]) -> dict[str, Tensor]:
    """The mean of every tensor over the replicas, in its own type; for a replica without one it is zero."""
    means: dict[str, Tensor] = {}
    for name in {name: None for replica in replicas for name in replica}:  # in order, each name once
        tensors = [replica[name] for replica in replicas if name in replica]
        if any(tensor.shape != tensors[0].shape for tensor in tensors):
            what = f"the saved {kind} of {name} has shapes {sorted({tuple(tensor.shape) for tensor in tensors})}"
            raise UserError(what, fix="load states that were saved together")
        total = torch.zeros(tensors[0].shape, dtype=torch.float64, device="cpu")
        for tensor in tensors:
            total += tensor.cpu()
        means[name] = (total / len(replicas)).to(tensors[0].dtype).to(tensors[0].device)
    return means


def _all_ranks(saved: Sequence[State]) -> list[State]:
    """The states in rank order, each rank of one world exactly once."""
    for state in saved:
        _check(state)
    states = sorted(saved, key=lambda state: state["rank"])
    world = states[0]["world"] if states else 0
    if not states or [(s["world"], s["rank"]) for s in states] != [(world, rank) for rank in range(world)]:
        ranks = ", ".join(f"{state['rank']} of {state['world']}" for state in states) or "none"
        what = f"the saved states are not those of all ranks of one run: {ranks}"
        raise UserError(what, fix="give the states of all its ranks, each once")
    return states


def _check(state: State) -> None:
    fix = "load what state_dict() returned"
    if not isinstance(state, Mapping):
        raise UserError(f"this is not a saved state of edgc but {type(state).__name__}", fix=fix)
    for key in ("world", "rank", "engine"):
        if key not in state:
            raise UserError(f"this is not a saved state of edgc: it has no {key}", fix=fix)


def refuse_other_parameters(state: State, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse error feedback and velocities of parameters that this rank does not reduce.

    Args:
        state: of one rank, checked by :func:`state_for`.
        shapes: of this rank's gradients by name, as they are reduced.

    Raises:
        UserError: naming the first such parameter.
    """
    need(state["engine"], ("compressor",), "engine")
    need(state["engine"]["compressor"], (), "engine.compressor")
    for key, kind in LOCAL.items():
        for name, tensor in state["engine"]["compressor"].get(key, {}).items():
            if tuple(tensor.shape) != shapes.get(name):
                here = f"has {shapes[name]} here" if name in shapes else "is no parameter of this rank's"
                what = f"the saved state has {kind} of {name}, {tuple(tensor.shape)}, which {here}"
                raise UserError(what, fix="load the state of this very rank of this very model")


def compare_settings(saved: Mapping[str, Any], config: EDGCConfig, *, allowed: bool) -> bool:
    """Compare the settings of a saved state with ``config``; returns whether they differ.

    A setting that the state does not know had its default value.

    Raises:
        UserError: it is of another method, or of other settings and that is not ``allowed``; with their names.
    """
    method = saved.get("method", "none")
    if method != config.method:
        what = f"the saved state is of method {method}, not {config.method}"
        raise UserError(what, fix=f"set method: {method}, or start without the state")
    old = EDGCConfig.from_record(saved, where="the saved state").to_dict()
    changes = differences(old, config.to_dict())
    if changes and not allowed:
        fix = "use the saved settings, or load with changed_settings=True to go on with those of now"
        raise UserError(f"the saved state is of other settings: {changes}", fix=fix)
    return bool(changes)
