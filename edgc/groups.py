"""Process groups for one thread alone (collectives of two threads on one group could mix); what all ranks say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks of ``group`` (None: the world), in rank order, on every rank; just this one's without
    process groups."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def own_group(like: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks as ``like``.

    To be called on every rank of it, for several groups in the same order on every rank.
    """
    ranks = dist.get_process_group_ranks(like)
    whole = len(ranks) == dist.get_world_size()
    backend = None if whole else dist.get_backend(like)
    group: dist.ProcessGroup = dist.new_group(ranks, backend=backend, use_local_synchronization=not whole)
    return group


def own_groups(mine: Sequence[dist.ProcessGroup]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Groups of the same ranks as each of ``mine``, which may differ from rank to rank; by their ranks.

    To be called on every rank of the world.
    """
    return groups_of([tuple(dist.get_process_group_ranks(group)) for group in mine])


def groups_of(wanted: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """New groups of ``wanted`` ranks, which may differ from rank to rank; by their ranks.

    To be called on every rank of the world: every rank takes part in making every group, in one order.
    """
    gathered = gather_objects(list(wanted))
    made = {ranks: dist.new_group(list(ranks)) for ranks in sorted({r for row in gathered for r in row})}
    return {ranks: made[ranks] for ranks in wanted}
