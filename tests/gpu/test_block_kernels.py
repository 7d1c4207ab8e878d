"""Kernels that quantise, against torch's operations: on a GPU, or in Triton's interpreter (docs/gpu.md)."""

from __future__ import annotations

import math

import pytest
import torch

from edgc.compressors.quantization import LEVELS, Blocks
from tests.gpu.conftest import of_kernels

pytestmark = of_kernels()

SIZES = (1, 63, 64, 65, 511, 512, 513, 2048, 5000)  # about a block, a group and an instance of the kernel
# Sums over a block are rounded in another order: they may choose another step.
SUMMED = (4, 2, 1)


def by_torch(bits: int) -> Blocks:
    blocks = Blocks(bits)
    blocks.has_kernels = False
    return blocks


def by_kernels(bits: int, device: torch.device) -> Blocks:
    blocks = Blocks(bits)
    assert blocks.kernels(device) is not None
    return blocks


def vectors(n: int, device: torch.device) -> list[torch.Tensor]:
    """Of every scale, with ties, zeros and signs, and blocks of very different scales beside each other."""
    generator = torch.Generator().manual_seed(n)
    normal = torch.randn(n, generator=generator)
    blocks = torch.arange(n) // 64
    wide = normal * torch.exp2((blocks * 37 % 270 - 145).double()).float()
    ties = torch.randint(-254, 255, (n,), generator=generator) / 2
    sparse = normal * (torch.rand(n, generator=generator) < 0.02)
    scaled = [normal.clamp(-1, 1) * scale for scale in (0.0, 1e-45, 1e-38, 1e-36, 1e30, 3.4e38)]
    return [each.float().to(device) for each in (normal, normal**9, wide, ties, sparse, -ties.abs(), *scaled)]


def packed(blocks: Blocks, x: torch.Tensor, longer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Message and residual; nothing of what was there before may shine through."""
    message = torch.full((blocks.bytes(len(x) + longer),), 171, dtype=torch.uint8, device=x.device)
    residual = torch.full_like(x, math.nan)
    blocks.pack(x, message, residual=residual)
    return message, residual


def steps_of(blocks: Blocks, message: torch.Tensor) -> torch.Tensor:
    groups = len(message) // (2 * blocks.per_word + 64 * blocks.width)
    return message[: 2 * blocks.per_word * groups].view(torch.bfloat16).float()


@pytest.mark.parametrize("bits", LEVELS)
@pytest.mark.parametrize("n", SIZES)
def test_messages_and_what_is_kept_are_torchs(bits: int, n: int, device: torch.device) -> None:
    torchs, kernels, differing, count = by_torch(bits), by_kernels(bits, device), 0, 0
    for x in vectors(n, device):
        (theirs, expected), (mine, residual) = packed(torchs, x), packed(kernels, x)
        a, b = steps_of(torchs, theirs), steps_of(torchs, mine)
        other = (a != b).nonzero().flatten().tolist()
        differing, count = differing + len(other), count + len(a)
        if not other:
            assert torch.equal(mine, theirs)
            assert torch.equal(residual, expected)
            continue
        assert bits in SUMMED
        for block in other:
            part = slice(64 * block, 64 * block + 64)
            if bits == 1:
                assert a[block].item() == pytest.approx(b[block].item(), rel=2**-7)
            else:
                errors = [float(kept[part].double().square().sum()) for kept in (expected, residual)]
                assert errors[0] == pytest.approx(errors[1], rel=1e-2)
    assert differing <= 0.02 * count


@pytest.mark.parametrize("bits", LEVELS)
def test_sent_and_kept_are_the_input_and_both_unpack_the_same(bits: int, device: torch.device) -> None:
    torchs, kernels = by_torch(bits), by_kernels(bits, device)
    for x in vectors(5000, device):
        message, residual = packed(kernels, x)
        mine, theirs = torch.full_like(x, math.nan), torch.full_like(x, math.nan)
        kernels.unpack(message, mine)
        torchs.unpack(message, theirs)
        assert torch.equal(mine, theirs)
        assert torch.equal(residual, x - mine)
        for weight, exact in ((0.25, True), (1 / 3, False)):
            mine, theirs = x.clone(), x.clone()
            kernels.unpack(message, mine, weight=weight, add=True)
            torchs.unpack(message, theirs, weight=weight, add=True)
            if exact:
                assert torch.equal(mine, theirs)
            else:
                assert torch.allclose(mine, theirs, rtol=2**-21, atol=0)
        in_place = x.clone()
        kernels.pack(in_place, message, residual=in_place)
        assert torch.equal(in_place, residual)


@pytest.mark.parametrize("bits", LEVELS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_entry_spoils_its_group_alone(bits: int, bad: float, device: torch.device) -> None:
    kernels = by_kernels(bits, device)
    x = vectors(2048, device)[0]
    good, out = torch.empty_like(x), torch.empty_like(x)
    kernels.unpack(packed(kernels, x)[0], good)
    x[530] = bad
    message, residual = packed(kernels, x)
    kernels.unpack(message, out)
    group = slice(512, 512 + kernels.group)
    assert out[group].isnan().all() and residual[group].isnan().all()
    out[group] = good[group]
    assert torch.equal(out, good)
    assert not bool(kernels.finite(message))


@pytest.mark.parametrize("bits", LEVELS)
@pytest.mark.parametrize("world", [2, 4, 5])
def test_messages_of_all_ranks_at_once(bits: int, world: int, device: torch.device) -> None:
    """The last ranks have less, or nothing; messages are longer than what is in them."""
    blocks = by_kernels(bits, device)
    kernels = blocks.kernels(device)
    assert kernels is not None
    for n, length in ((world * blocks.group, blocks.group), (3000, 1024), (700, 1024)):
        x = torch.randn(min(n, world * length), generator=torch.Generator().manual_seed(n)).to(device)
        messages = torch.full((world, blocks.bytes(length)), 171, dtype=torch.uint8, device=device)
        kept, out = torch.full_like(x, math.nan), torch.full_like(x, math.nan)
        kernels.pack(blocks, x, messages, kept)
        kernels.unpack(blocks, messages, out)
        assert torch.equal(kept, x - out)
        parts, total = [], torch.zeros(length, device=device)
        for i, message in enumerate(messages):
            part, alone = torch.full((length,), math.nan, device=device), x[i * length : (i + 1) * length]
            blocks.unpack(message, part)
            assert torch.equal(part[: len(alone)], out[i * length : (i + 1) * length])
            assert not part[-(-len(alone) // 64) * 64 :].any()  # what fills up a block has signs, too
            if len(alone):
                assert torch.equal(packed(blocks, alone, length - len(alone))[0], message)
            parts.append(part)
            total.add_(part, alpha=1 / world)
        mean = torch.full((length,), math.nan, device=device)
        kernels.unpack(blocks, messages, mean, weight=1 / world, summed=True)
        bound = sum(part.abs() for part in parts) * 2**-21
        assert bool(((mean - total).abs() <= bound).all())
        kernels.unpack(blocks, messages, mean, weight=-1 / world, add=True, summed=True)
        assert bool((mean.abs() <= bound).all())
