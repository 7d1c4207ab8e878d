"""Whole matrices for low rank: each goes to one rank of its shard group, is averaged there, and goes back.

A shard is a block of rows. Compressed by itself at rank r, a block of m x n costs r (m / S + n) instead of its part of
r (m + n): up to (S + 1) / 2 times the bytes for a square matrix. At equal bytes blocks have a lower rank, and lose: of
recorded gradients of a small GPT at rank 8 error feedback ended with .20, .23 and .28 of what had come in under 2, 4
and 8 shards, and with .16 for whole matrices (``docs/library/fsdp.md``). A whole matrix costs two exchanges within the
shard group, together 2 / S of its reduce-scatter, where links are fast; and any method serves as it is.

Tall matrices stay in blocks, where that costs little: their blocks differ, and lose less at the same rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from edgc.compressors import Gradient
from edgc.fsdp.units import Part
from edgc.runtime.device import own_modes

BLOCKS_MAY_COST = 1.25
"""Times the bytes of the whole matrix."""


def owners_of(parts: Iterable[Part], shards: int) -> dict[str, int]:
    """Which rank of a shard group is to have which matrix whole, balanced by their entries; those of no name stay in
    blocks, as all do where some rank would have none.

    Args:
        parts: of matrices that are cut along their first axis and large enough to be compressed.
    """
    moved = []
    for part in parts:
        rows, columns = part.whole
        if rows + shards * columns > BLOCKS_MAY_COST * (rows + columns):
            moved.append(part)
    if shards == 1 or len(moved) < shards:
        return {}
    owners, loads = dict[str, int](), [0] * shards
    for part in sorted(moved, key=lambda part: -part.entries):
        owner = loads.index(min(loads))
        owners[part.name], loads[owner] = owner, loads[owner] + part.entries
    return owners


class WholeMatrices:
    """Exchange of blocks within a shard group.

    Args:
        owners: of :func:`owners_of`.
    """

    def __init__(self, owners: Mapping[str, int], group: dist.ProcessGroup) -> None:
        self.owners, self.group = owners, group
        self.shards, self.me = group.size(), group.rank()

    def shapes(self, parts: Iterable[Part]) -> dict[str, tuple[int, ...]]:
        """Of what this rank averages, by parameter name."""
        mine = ((part, self.owners.get(part.name)) for part in parts)
        return {
            part.name: part.shape if owner is None else part.whole for part, owner in mine if owner in (None, self.me)
        }

    @own_modes()
    def take(self, parts: Sequence[Part], flat: Tensor) -> tuple[list[Gradient], Callable[[], None]]:
        """What this rank averages of a unit, and what is to be called once that is done.

        Args:
            flat: result of the unit's reduce-scatter, where parts lie; their means are in it in the end.
        """
        gradients = [
            Gradient(part.name, flat.narrow(0, part.offset, math.prod(part.shape)).view(part.shape))
            for part in parts
            if part.name not in self.owners and 0 not in part.shape
        ]
        moved = sorted((part for part in parts if part.name in self.owners), key=lambda part: self.owners[part.name])
        if not moved:
            return gradients, lambda: None
        sizes, places = [0] * self.shards, []
        for part in moved:
            places.append((part, sizes[self.owners[part.name]]))
            sizes[self.owners[part.name]] += part.entries
        sent = torch.cat([flat[part.place] for part in moved])
        received = flat.new_empty(self.shards, sizes[self.me])
        dist.all_to_all_single(received.view(-1), sent, [sizes[self.me]] * self.shards, sizes, group=self.group)
        own = []
        for part, first in places:
            if self.owners[part.name] == self.me:
                blocks = received[:, first : first + part.entries]
                whole = blocks.reshape(self.shards * part.padded[0], part.padded[1])
                own.append((whole, blocks))
                gradients.append(Gradient(part.name, whole[: part.whole[0]]))

        def put_back() -> None:
            for whole, blocks in own:
                blocks.copy_(whole.view(blocks.shape))
            dist.all_to_all_single(sent, received.view(-1), sizes, [sizes[self.me]] * self.shards, group=self.group)
            for part, mean in zip(moved, sent.split([part.entries for part in moved]), strict=True):
                flat[part.place] = mean

        return gradients, put_back
