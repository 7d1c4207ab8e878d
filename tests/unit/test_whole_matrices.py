"""Which rank of a shard group gets which matrix whole (:mod:`edgc.fsdp.whole`)."""

from __future__ import annotations

import math

from edgc.fsdp.units import Part
from edgc.fsdp.whole import BLOCKS_MAY_COST, owners_of


def part(name: str, rows: int, columns: int, shards: int) -> Part:
    block = (-(-rows // shards), columns)
    return Part(name, block, block, (rows, columns), 0)


def test_matrices_are_shared_out_by_their_entries() -> None:
    layers = [(384, 128), (128, 128), (512, 128), (128, 512)] * 3
    for shards in (2, 4, 8):
        parts = [part(f"{i}", *shape, shards) for i, shape in enumerate(layers)]
        owners, loads = owners_of(parts, shards), [0] * shards
        for each in parts:
            if each.name in owners:
                loads[owners[each.name]] += math.prod(each.whole)
        assert min(loads) > 0 and max(loads) <= min(loads) + 512 * 128
        # Of no matrix that stays, blocks cost more than they may.
        for each in parts:
            rows, columns = each.whole
            stays = rows + shards * columns <= BLOCKS_MAY_COST * (rows + columns)
            assert stays == (each.name not in owners)


def test_tall_ones_and_a_few_stay_in_blocks() -> None:
    square = [part(f"{i}", 64, 64, 4) for i in range(4)]
    assert sorted(owners_of([*square, part("words", 50257, 64, 4)], 4)) == ["0", "1", "2", "3"]
    assert owners_of(square[:3], 4) == {}  # a rank would have none
    assert owners_of(square, 1) == {}
