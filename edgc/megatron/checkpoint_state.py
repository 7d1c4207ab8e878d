"""Choice of the saved state that a rank of a Megatron-Core job goes on from, also with other replicas."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from edgc.checkpoints import manifest, rank_files
from edgc.checkpoints.manifest import DamagedCheckpoint, Manifest
from edgc.checkpoints.saved_state import OWN, State, merge
from edgc.errors import UserError
from edgc.megatron.attachment import Attachment

FOLDER = "edgc"  # inside a checkpoint


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups; ``data`` is the number of replicas whose gradients are averaged.

    With context parallelism its ranks count as replicas, for their gradients are averaged in the same reduction.
    """

    world: int
    tensor: int
    pipeline: int
    virtual_pipeline: int
    data: int
    expert: int
    expert_tensor: int

    @classmethod
    def current(cls) -> Layout:
        """Of this job."""
        return cls(
            world=rank_files.world()[1],
            tensor=parallel_state.get_tensor_model_parallel_world_size(),
            pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
            virtual_pipeline=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
            data=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
            expert=parallel_state.get_expert_model_parallel_world_size(),
            expert_tensor=parallel_state.get_expert_tensor_parallel_world_size(),
        )


@dataclass(frozen=True)
class Place:
    """Place of a rank in its :class:`Layout`."""

    tensor: int
    pipeline: int
    data: int
    expert: int
    expert_tensor: int

    @classmethod
    def current(cls) -> Place:
        """Of this rank."""
        return cls(
            tensor=parallel_state.get_tensor_model_parallel_rank(),
            pipeline=parallel_state.get_pipeline_model_parallel_rank(),
            data=parallel_state.get_data_parallel_rank(with_context_parallel=True),
            expert=parallel_state.get_expert_model_parallel_rank(),
            expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
        )

    def same_shard(self, other: Place) -> bool:
        """Compare: both hold the same part of the parameters that are not experts."""
        return (self.tensor, self.pipeline) == (other.tensor, other.pipeline)

    def same_experts(self, other: Place) -> bool:
        """Compare: both also hold the same part of the experts."""
        mine = (self.expert, self.expert_tensor)
        return self.same_shard(other) and mine == (other.expert, other.expert_tensor)


def read(folder: Path) -> Manifest:
    """The manifest of EDGC's part of the checkpoint ``folder``.

    Raises:
        DamagedCheckpoint: it is missing or altered.
    """
    with within(folder, FOLDER):
        return manifest.read(folder / FOLDER)


@contextlib.contextmanager
def within(folder: Path, part: str) -> Iterator[None]:
    """Let damage found in ``folder/part`` be told as damage of ``folder``."""
    try:
        yield
    except DamagedCheckpoint as damage:
        file = (Path(part) / damage.file).as_posix()
        raise DamagedCheckpoint(folder, file, damage.problem) from None


def state_of(folder: Path, content: Manifest, layout: Layout, place: Place) -> dict[str, Any]:
    """The attachment's state for a rank at ``place`` of ``layout``; not collective.

    Raises:
        DamagedCheckpoint: a file that this rank needs is missing or altered.
        UserError: the layouts differ in more than the number of replicas.
    """
    saved = layout_of(content)
    _refuse_other(saved, layout, folder)
    places = {Place(**about["place"]): rank_files.file_of(i) for i, about in enumerate(content.about["ranks"])}
    with within(folder, FOLDER):
        if saved == layout:
            return dict(rank_files.load(folder / FOLDER, content, places[place])["attachment"])
        replicas = sorted((p for p in places if p.same_shard(place)), key=lambda p: p.data)
        states = {p: rank_files.load(folder / FOLDER, content, places[p], lazily=True) for p in replicas}
    # Files may be deleted while the run goes on.
    return {**copy.deepcopy(redistributed(states, place)), "world": layout.data, "rank": place.data}


def redistributed(states: Mapping[Place, Mapping[str, Any]], place: Place) -> State:
    """The state for ``place`` from those of all replicas of its shard, with error feedback that owes the same.

    Experts are replicated less often than the rest: theirs comes from the ranks that held the same experts.
    """
    everyone = merge([state["attachment"] for state in states.values()])
    alike = [state for where, state in states.items() if where.same_experts(place)]
    if len(alike) == len(states):
        return everyone
    merged = merge([state["attachment"] for state in alike])
    experts = set(alike[0]["experts"])
    engine, dense = merged["engine"], everyone["engine"]["compressor"]
    compressor = dict(engine["compressor"])
    for key in OWN.keys() & dense.keys():
        compressor[key] = {name: tensor for name, tensor in dense[key].items() if name not in experts} | {
            name: tensor for name, tensor in compressor[key].items() if name in experts
        }
    return {**merged, "engine": {**engine, "compressor": compressor}}


def iteration_of(content: Manifest) -> int:
    """Number of iterations that a saved state has behind it."""
    return int(content.about["ranks"][0]["iteration"])


def layout_of(content: Manifest) -> Layout:
    return Layout(**content.about["ranks"][0]["layout"])


def _refuse_other(saved: Layout, now: Layout, folder: Path) -> None:
    """Refuse layouts under which a rank holds other parameters, or parts of them."""
    other = {
        f"{name.replace('_', ' ')} parallel size": (size, getattr(now, name))
        for name, size in asdict(saved).items()
        if name not in ("world", "data") and size != getattr(now, name)
    }
    if other:
        what = ", ".join(f"{name} {size}, not {here}" for name, (size, here) in other.items())
        fix = f"start with {', '.join(f'{name} {size}' for name, (size, _) in other.items())}"
        raise UserError(f"EDGC's state was saved with {what}", where=folder, fix=fix)


def experts_of(attachment: Attachment) -> list[str]:
    """Names of the parameters that are replicated over the ranks of an expert only."""
    return sorted(
        group.edgc_names[parameter]
        for group in attachment.groups
        for bucket in group.buckets
        for parameter in bucket.params
        if not getattr(parameter, "allreduce", True)
    )
