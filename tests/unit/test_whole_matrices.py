"""Which rank of a shard group gets which matrix whole (:mod:`edgc.fsdp.whole`)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from edgc.compressors.base import seeded
from edgc.fsdp.units import Part
from edgc.fsdp.whole import BLOCKS_MAY_COST, owners_of
from edgc.rehearsal.gpt import GPT, batches, library_text


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


def test_blocks_owe_more_than_whole_matrices_at_equal_bytes() -> None:
    """PowerSGD with error feedback over recorded gradients of a small GPT: what the table of the page was made from."""
    recorded = gradients_of_a_gpt()
    whole = owed(recorded, 1, lambda rows, columns: 8)
    for shards, least in ((2, 1.1), (4, 1.2)):
        blocks = owed(recorded, shards, lambda m, n, s=shards: max(1, round(8 * (m + n) / (m + s * n))))
        assert blocks > least * whole, (shards, blocks, whole)


def gradients_of_a_gpt(steps: int = 30, recorded: int = 15) -> list[list[Tensor]]:
    """Mean gradients of matrices in the last steps of a training run."""
    torch.manual_seed(0)
    model = GPT(64, 2, 2, 32)
    optimizer, data = torch.optim.AdamW(model.parameters(), lr=2e-3), batches(library_text(1 << 20), 16, 32, 0)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        model(next(data)).backward()
        optimizer.step()
        if step >= steps - recorded:
            found.append([p.grad.clone() for p in model.layers.parameters() if p.dim() == 2 and p.grad is not None])
    return found


def owed(recorded: list[list[Tensor]], shards: int, rank: Callable[[int, int], int]) -> float:
    """What error feedback holds in the end, relative to the sum of the gradients."""
    total, kept = 0.0, 0.0
    for place in range(len(recorded[0])):
        rows, columns = recorded[0][place].shape
        for number, blocks in enumerate(zip(*(step[place].chunk(shards) for step in recorded), strict=True)):
            error = torch.zeros_like(blocks[0])
            q = torch.randn(columns, min(rank(rows, columns), *error.shape), generator=seeded(place, number))
            for block in blocks:
                m = block + error
                p = torch.linalg.qr(m @ q)[0]
                q = m.T @ p
                error = m - p @ q.T
            kept += float(error.square().sum())
            total += float(torch.stack(blocks).sum(0).square().sum())
    return math.sqrt(kept / total)


def test_tall_ones_and_a_few_stay_in_blocks() -> None:
    square = [part(f"{i}", 64, 64, 4) for i in range(4)]
    assert sorted(owners_of([*square, part("words", 50257, 64, 4)], 4)) == ["0", "1", "2", "3"]
    assert owners_of(square[:3], 4) == {}  # a rank would have none
    assert owners_of(square, 1) == {}
