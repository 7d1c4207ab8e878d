"""Process groups of our own: whoever has one may end it at once, while a slower rank is still joining."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from edgc.runtime.groups import groups_of, own_group
from tests.workers import Cases

case = Cases(4, __name__)
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


@case
def names() -> None:
    """No other group of a rank stands in the way: torch would name those of half the world after the groups that each
    of its ranks has."""
    rank = dist.get_rank()
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    dist.new_group([0, 2])  # ranks 0 and 2 have one more than their partners
    unrelated = dist.new_group([0, 1, 2, 3])
    first = own_group(half)
    dist.destroy_process_group(unrelated)
    second = own_group(half)  # as many groups as there were
    for _ in range(TIMES):
        other = own_group(half)
        total = torch.ones(1)
        dist.all_reduce(total, group=other)
        assert float(total) == 2.0
        dist.destroy_process_group(other)  # the next one has its place
    for group in (first, second):
        dist.barrier(group)
        assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(half)


@case
def ended_at_once() -> None:
    """A group may be ended as soon as it is made."""
    world, rank = whole(), dist.get_rank()
    pairs = groups_of({ranks: None for ranks in ((0, 1), (2, 3)) if rank in ranks})
    for _ in range(TIMES):
        dist.destroy_process_group(own_group(world))
        for pair in pairs.values():
            dist.destroy_process_group(own_group(pair))
        for group in groups_of({(0, 1, 2, 3): None, (rank,): None}).values():
            dist.destroy_process_group(group)
        del group


test_groups = case.test()
