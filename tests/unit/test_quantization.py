"""Block quantisation: levels, steps, packing, extremes. Means, and what is kept of them: ``test_contract.py``."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import edgc.compressors.quantization as blocks_module
from edgc.compressors.powersgd.algorithm import Wire
from edgc.compressors.quantization import FACTORS, Blocks
from tests.lockstep import Twin

BITS = (8, 7, 6, 5, 4, 2, 1)
HIGHEST = {8: 127, 7: 63, 6: 31, 5: 15, 4: 7, 2: 1, 1: 1}


def packed(x: torch.Tensor, quantiser: Blocks, **options: Any) -> torch.Tensor:
    message = torch.randint(0, 256, (quantiser.bytes(len(x)),), dtype=torch.uint8)  # nothing may shine through
    quantiser.pack(x, message, **options)
    return message


def through(x: torch.Tensor, quantiser: Blocks, **options: Any) -> torch.Tensor:
    out = torch.full_like(x, math.nan)
    quantiser.unpack(packed(x, quantiser, **options), out)
    return out


def normal(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def least_error(block: torch.Tensor, bits: int) -> float:
    """The least squared error over the allowed steps of one block, in float64."""
    x, top = block.double(), HIGHEST[bits]
    amax = float(x.abs().max())
    if bits == 1:
        steps = [float(x.abs().mean())]
    else:
        steps = [amax / top * f for f in (FACTORS if bits < 5 else (1.0,))]
    best = math.inf
    for step in steps:
        if bits == 1:
            levels = torch.where(x >= 0, 1.0, -1.0)
        else:
            levels = (x / step).round().clamp(-top, top) if step > 0 else torch.zeros_like(x)
        best = min(best, float((x - step * levels).square().sum()))
    return best


# --------------------------------------------------------------------- one vector


@settings(max_examples=150, deadline=None)
@given(
    bits=st.sampled_from(BITS),
    count=st.integers(0, 1500),
    seed=st.integers(0, 2**31),
    power=st.sampled_from([1, 3, 9]),
    exponent=st.integers(-30, 30),
)
def test_every_vector(bits: int, count: int, seed: int, power: int, exponent: int) -> None:
    """Least error of each block, exact residual, exact under a change of scale by a power of two."""
    x = normal(count, seed) ** power
    quantiser = Blocks(bits)
    residual = torch.empty_like(x)
    message = packed(x, quantiser, residual=residual)
    out = torch.empty_like(x)
    quantiser.unpack(message, out)
    assert torch.equal(residual, x - out)
    for block, got in zip(x.split(64), out.split(64), strict=True):
        # A block that is not full is filled with zeros, which under 1 bit lower the mean of its magnitudes.
        full = torch.cat([block, torch.zeros(64 - len(block))])
        best = least_error(full, bits)
        error = float((block.double() - got.double()).square().sum())
        # The step that is sent is rounded to 8 significant bits: 2**-9 of every level, besides fp32 ties.
        norm = float(block.double().square().sum())
        slack = 2 * math.sqrt(best * norm) * 2**-8 + norm * 2**-16
        assert error <= best + slack
    for block, got in zip(through(x * 2.0**exponent, quantiser).split(64), out.split(64), strict=True):
        if len(got) and 1e-20 < got.abs().max() < 1e20:
            assert torch.equal(block, got * 2.0**exponent)
    in_place = x.clone()
    quantiser.pack(in_place, message, residual=in_place)
    assert torch.equal(in_place, residual)


@pytest.mark.parametrize("bits", [7, 6, 5, 4])
def test_the_bytes_of_a_message(bits: int) -> None:
    """Against whole numbers of Python: what two machines must agree on."""
    quantiser, x = Blocks(bits), normal(1000)
    groups, blocks = -(-1000 // quantiser.group), quantiser.per_word
    message = packed(x, quantiser)
    steps = message[: 2 * groups * blocks].view(torch.bfloat16).float()
    padded = torch.nn.functional.pad(x, (0, groups * quantiser.group - 1000)).view(-1, 64)
    levels = (padded / steps[:, None]).nan_to_num(0).round().clamp(-HIGHEST[bits], HIGHEST[bits]).int()
    levels = levels.view(groups, blocks, 64).tolist()
    width, expected = blocks * bits // 8, bytearray()
    for group in levels:
        words = [sum(group[k][i] << bits * k for k in range(blocks)) for i in range(64)]
        sent = [word.to_bytes(width, "little", signed=True) for word in words]
        expected += bytes(word[place] for place in range(width) for word in sent)
    assert bytes(message[2 * groups * blocks :].tolist()) == bytes(expected)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38, 1e-30, 1e30, 1e38, 3.4e38])
def test_any_finite_scale(bits: int, scale: float) -> None:
    x = normal(1000).clamp(-1, 1) * scale
    out = through(x, Blocks(bits))
    assert torch.isfinite(out).all()
    assert (x.double() - out.double()).abs().max() <= x.double().abs().max()
    if 1e-30 <= scale <= 1e38:
        relative = (x.double() - out.double()).norm() / x.double().norm()
        assert relative < {8: 0.008, 7: 0.016, 6: 0.032, 5: 0.065, 4: 0.15, 2: 0.7, 1: 0.8}[bits]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_bad_entry_spoils_its_group_alone(bits: int, bad: float) -> None:
    x, group = normal(2048), slice(512, 512 + Blocks(bits).group)
    good = through(x, Blocks(bits))
    x[530] = bad
    message = packed(x, Blocks(bits))
    out = torch.empty_like(x)
    Blocks(bits).unpack(message, out)
    assert out[group].isnan().all()
    out[group] = good[group]
    assert torch.equal(out, good)
    assert not bool(Blocks(bits).finite(message))
    assert bool(Blocks(bits).finite(packed(normal(640), Blocks(bits))))


@pytest.mark.parametrize("bits", BITS)
def test_neither_the_chunk_in_work_nor_a_longer_message_shows(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(10_000) ** 5
    whole, residual, out = packed(x, Blocks(bits)), torch.empty_like(x), torch.full((12_000,), math.nan)
    monkeypatch.setattr(blocks_module, "_CHUNK_PER_THREAD", 1024)
    small = Blocks(bits)
    assert torch.equal(packed(x, small, residual=residual), whole)
    message = torch.full((small.bytes(12_000),), 255, dtype=torch.uint8)
    small.pack(x, message)
    small.unpack(message, out)
    assert torch.equal(residual, x - out[:10_000]) and not out[10_048:].any()


@pytest.mark.parametrize("bits", [8, 5, 4, 1])
@pytest.mark.parametrize("shared", [True, False], ids=["one quantiser", "two quantisers"])
def test_two_threads_at_the_same_place(bits: int, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stops in the middle of every chunk until the other one is there, too."""
    monkeypatch.setattr(blocks_module, "_CHUNK_PER_THREAD", 1024)
    vectors = [normal(4000, seed) * 10**seed for seed in range(2)]
    expected = [through(x, Blocks(bits)) for x in vectors]
    quantisers = [Blocks(bits)] * 2 if shared else [Blocks(bits), Blocks(bits)]
    barrier = threading.Barrier(2, timeout=60)

    def waiting(step: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            step(*arguments)
            barrier.wait()

        return call

    for name in ("_choose_steps", "_choose_levels", "_fold", "_unfold"):
        monkeypatch.setattr(Blocks, name, waiting(getattr(Blocks, name)))
    found: list[torch.Tensor | None] = [None, None]

    def work(me: int) -> None:
        for _ in range(2):
            found[me] = through(vectors[me], quantisers[me])

    threads = [threading.Thread(target=work, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out, right in zip(found, expected, strict=True):
        assert out is not None and torch.equal(out, right)


@pytest.mark.parametrize("bits", BITS)
def test_means_that_take_turns(bits: int) -> None:
    """Two vectors under way at once, advanced in turn: neither leaves anything in the scratch over a wait."""
    alone, together = [], []
    for into, turns in ((alone, False), (together, True)):
        vectors = [normal(size, size) for size in (700, 5000)]
        runs = [Wire(len(x), x.device, Blocks(bits)).mean(x, Twin()) for x in vectors]
        while runs:
            for run in list(runs) if turns else runs[:1]:
                if next(run, "end") == "end":
                    runs.remove(run)
        into += vectors
    assert all(map(torch.equal, alone, together))


def test_weights_and_sums() -> None:
    for bits in BITS:
        quantiser, x, y = Blocks(bits), normal(900, 1), normal(900, 2)
        out = torch.empty(900)
        quantiser.unpack(packed(x, quantiser), out, weight=0.5)
        quantiser.unpack(packed(y, quantiser), out, weight=0.5, add=True)
        assert torch.equal(out, 0.5 * through(x, quantiser) + 0.5 * through(y, quantiser))
