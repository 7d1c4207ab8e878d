"""Process groups of our own: whoever has one may end it at once, while a slower rank is still joining."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
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
            dist.destroy_process_group(own_group(pair))
        for group in groups_of({(0, 1, 2, 3): None, (rank,): None}).values():
            dist.destroy_process_group(group)
        del group
    return "done"


def names() -> list[str]:
    """Groups of half the world, which torch would name after the groups that each of its ranks has."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[rank // 2]
    dist.new_group([0, 2])  # ranks 0 and 2 have one more than their partners
    unrelated = dist.new_group([0, 1, 2, 3])
    kept = own_group(mine)
    dist.destroy_process_group(unrelated)
    made = [kept, own_group(mine)]  # as many groups as there were
    for _ in range(TIMES):
        again = own_group(mine)
        total = torch.ones(1)
        dist.all_reduce(total, group=again)
        assert float(total) == 2.0
        dist.destroy_process_group(again)  # the next one has its place
    for group in made:
        dist.barrier(group)
    return sorted(dist.get_process_group_ranks(group) == dist.get_process_group_ranks(mine) for group in made)


def backends() -> list[str]:
    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("another", make, devices=["cpu"])
    found = []
    for ranks in ([0, 1, 2, 3], [0, 1], [2, 3]):
        like = dist.new_group(ranks, backend="another")
        if dist.get_rank() in ranks:
            found.append(dist.get_backend(own_group(like)))
    return found


def unsafe() -> str:
    whole()
    dist.destroy_process_group(dist.new_group([0, 1, 2, 3]))
    dist.barrier()
    return "done"


def test_a_group_may_be_ended_as_soon_as_it_is_made() -> None:
    assert run_workers(4, cases) == ["done"] * 4


def test_no_other_group_of_a_rank_stands_in_the_way() -> None:
    assert run_workers(4, names) == [[True, True]] * 4


def test_a_group_has_the_backend_of_the_one_it_is_like() -> None:
    assert run_workers(4, backends) == [["another", "another"]] * 4


def test_without_waiting_for_the_others_a_slow_rank_fails() -> None:
    """What the wait is for: if this passes no longer, torch waits itself."""
    with pytest.raises(AssertionError, match="connectFullMesh failed"):
        for _ in range(10):  # it fails in the runs in which the slow rank is the one that is connected to
            run_workers(4, unsafe)
