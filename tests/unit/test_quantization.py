"""Block quantisation: levels, steps, packing, extremes. Means, and what is kept of them: ``test_contract.py``."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import edgc.compressors.quantization as blocks_module
from edgc.compressors.float8 import Float8
from edgc.compressors.powersgd.algorithm import Wire
from edgc.compressors.quantization import FACTORS, Blocks, QuantisedMean
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


# --------------------------------------------------------------------- kernels in place of torch's operations


class Stand(ModuleType):
    """Kernels that leave the work to torch, and tell what they were asked for; the real ones: tests/gpu."""

    def __init__(self, fails: str = "") -> None:
        super().__init__("edgc.runtime.block_kernels")
        self.fails, self.calls = fails, list[str]()

    def pack(self, blocks: Blocks, x: torch.Tensor, messages: torch.Tensor, residual: torch.Tensor | None) -> None:
        self.calls.append("pack")
        if self.fails == "raises":
            raise RuntimeError("no compiler\nat all")
        length = messages.shape[1] // blocks.bytes(1) * blocks.group
        for i, message in enumerate(messages):
            part = slice(i * length, (i + 1) * length)
            if x[part].numel():
                blocks.pack_by_torch(x[part], message, None if residual is None else residual[part])
            else:
                message.zero_()
        if self.fails == "lies":
            messages[0, 0] += 1

    def unpack(
        self,
        blocks: Blocks,
        messages: torch.Tensor,
        out: torch.Tensor,
        weight: float = 1.0,
        add: bool = False,
        summed: bool = False,
    ) -> None:
        self.calls.append("sum" if summed else "unpack")
        length = messages.shape[1] // blocks.bytes(1) * blocks.group
        for i, message in enumerate(messages):
            part = out if summed else out[i * length : (i + 1) * length]
            if part.numel():
                blocks.unpack_by_torch(message, part, weight, add or (summed and i > 0))


def test_a_mean_takes_four_launches_of_kernels_for_any_number_of_ranks(stand: Callable[[str], Stand]) -> None:
    for bits in BITS:
        found = []
        for on in (False, True):
            kernels = stand("")
            quantiser, x = Blocks(bits), normal(3000)
            quantiser.has_kernels = on
            kept = x.clone()
            mean, fellows = QuantisedMean(len(x), 5, quantiser, x.device), Twin()
            fellows.world = 5
            quantiser.kernels(x.device)
            kernels.calls.clear()
            for _ in mean.steps(x.clone(), fellows, kept):
                pass
            out = torch.empty_like(x)
            mean.unpack(out)
            found.append((kept, out))
            assert kernels.calls == (["pack", "sum", "pack", "unpack"] if on else [])
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("fails", "reason"), [("raises", "no compiler$"), ("lies", "other numbers than torch$")])
def test_kernels_that_do_not_do_are_named_once_and_left_out(
    fails: str, reason: str, stand: Callable[[str], Stand]
) -> None:
    x = normal(700)
    expected = through(x, Blocks(8))
    kernels = stand(fails)
    with pytest.warns(UserWarning, match=f"8 bits on cpu, torch's are: .*{reason}"):
        assert torch.equal(through(x, Blocks(8)), expected)
    kernels.calls.clear()
    assert torch.equal(through(x, Blocks(8)), expected) and not kernels.calls


@pytest.mark.parametrize("error", ["OSError", "ImportError"])
def test_a_triton_that_cannot_be_imported_is_named_once_and_left_out(
    error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "triton.py").write_text(f"raise {error}('no libcuda')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"] + ["edgc.runtime.block_kernels"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr("edgc.runtime.block_kernels", raising=False)
    monkeypatch.setattr("edgc.compressors.kernels._tried", {})
    x = normal(700)
    expected = through(x, Blocks(8))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.warns(UserWarning, match="8 bits on cpu, torch's are: no libcuda$") as warned:
        assert all(torch.equal(through(x, Blocks(8)), expected) for _ in range(2))
    assert len(warned) == 1


def test_what_rounds_at_random_and_e4m3_have_no_kernels(stand: Callable[[str], Stand]) -> None:
    kernels = stand("")
    for quantiser in (Blocks(4, stochastic=True), Float8()):
        through(normal(700), quantiser)
    assert not kernels.calls
