"""Process groups of our own: whoever has one may end it at once, while a slower rank is still joining."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from edgc.runtime.groups import groups_of, own_group
from tests.workers import run_workers

TIMES = 5


class Late(dist.Store):
    """``store``, as a rank far from it has it: it learns the others' addresses late."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store = store

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        time.sleep(0.05)
        return self.store.get(key)

    def add(self, key: str, value: int) -> int:
        return self.store.add(key, value)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self.store.wait(keys, *timeout)


def whole() -> dist.ProcessGroup:
    """The world; new groups of its odd ranks ask a late store, and there is no public way to change that."""
    group = dist.group.WORLD
    assert group is not None
    stores = dist.distributed_c10d._world.pg_map
    backend, store = stores[group]
    if dist.get_rank() % 2:
        stores[group] = (backend, Late(store))
    return group


def cases() -> str:
    world, rank = whole(), dist.get_rank()
    pairs = groups_of({ranks: None for ranks in ((0, 1), (2, 3)) if rank in ranks})
    for _ in range(TIMES):
        dist.destroy_process_group(own_group(world))
        for pair in pairs.values():
            # Not ended: a name that torch makes from the ranks would come again, with its old addresses.
            own_group(pair)
        for group in groups_of({(0, 1, 2, 3): None, (rank,): None}).values():
            dist.destroy_process_group(group)
        del group
    return "done"


def unsafe() -> str:
    whole()
    dist.destroy_process_group(dist.new_group([0, 1, 2, 3]))
    dist.barrier()
    return "done"


def test_a_group_may_be_ended_as_soon_as_it_is_made() -> None:
    assert run_workers(4, cases) == ["done"] * 4


def test_without_waiting_for_the_others_a_slow_rank_fails() -> None:
    """What the wait is for: if this passes no longer, torch waits itself."""
    with pytest.raises(AssertionError, match="connectFullMesh failed"):
        for _ in range(10):  # it fails in the runs in which the slow rank is the one that is connected to
            run_workers(4, unsafe)
