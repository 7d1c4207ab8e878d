"""DeMo beside its algorithm, written down once more in float64, and what public code gets wrong."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from edgc.strategies.demo import Blocks
from tests.strategy_cases import follows, gradients, sgd, start

LR, DECAY, CHUNK, TOPK = 0.01, 0.9, 10, 7  # 24 and 16 in blocks of 8, and 24 entries in blocks of 8


def waves(size: int) -> torch.Tensor:
    """The orthonormal DCT-II from its definition, entry by entry."""
    rows = [
        [math.sqrt((1 if k == 0 else 2) / size) * math.cos(math.pi * (2 * i + 1) * k / (2 * size)) for i in range(size)]
        for k in range(size)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def largest_divisor(side: int) -> int:
    return max(size for size in range(1, CHUNK + 1) if side % size == 0)


def reference(world: int, steps: int) -> dict[str, torch.Tensor]:
    theta = start()
    local = [{name: torch.zeros_like(p) for name, p in theta.items()} for _ in range(world)]
    for step in range(steps):
        found = [gradients(theta, step, rank) for rank in range(world)]
        for name, weight in theta.items():
            shape = weight.shape if weight.dim() == 2 else (1, len(weight))
            high, wide = (largest_divisor(side) for side in shape)
            left, right = waves(high), waves(wide)
            update = torch.zeros(shape, dtype=torch.float64)
            for rank in range(world):
                local[rank][name] = DECAY * local[rank][name] + LR * found[rank][name]
            for top in range(0, shape[0], high):
                for first in range(0, shape[1], wide):
                    here = (slice(top, top + high), slice(first, first + wide))
                    total, senders = torch.zeros(high * wide), torch.zeros(high * wide)
                    for each in local:
                        block = each[name].view(shape)[here]
                        frequencies = (left @ block @ right.T).flatten()
                        kept = torch.zeros_like(frequencies)
                        for place in frequencies.abs().argsort(descending=True)[:TOPK].tolist():
                            kept[place] = frequencies[place]
                            senders[place] += 1
                        total = total + kept
                        block.sub_(left.T @ kept.view(high, wide) @ right)
                    mean = total / senders.clamp(min=1)
                    update[here] = left.T @ mean.view(high, wide) @ right
            weight.sub_(LR * update.sign().view(weight.shape))
    return theta


@pytest.mark.parametrize("world", [2, 4])
def test_demo_is_its_algorithm(world: int) -> None:
    settings = {"name": "demo", "decay": DECAY, "chunk": CHUNK, "topk": TOPK}
    follows(settings, reference(world, 20), world=world, make=partial(sgd, lr=LR))


@pytest.mark.parametrize("shape", [(127, 3), (130,), (5, 64, 2), (1,), (128, 64)])
def test_a_prime_side_is_not_cut_in_single_entries(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, dtype=torch.float64)
    blocks = Blocks(tensor, 64, 32)
    coefficients = blocks.transform(tensor)
    assert min(blocks.sizes[-1:]) >= min(32, blocks.sides[1])
    torch.testing.assert_close(blocks.inverse(coefficients), tensor)
    torch.testing.assert_close(coefficients.norm(), tensor.norm())
