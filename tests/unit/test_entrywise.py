"""Entrywise methods beside the contract of all (``test_contract.py``): what they choose, and their mean.

Top-k and random-k with Deep Gradient Compression's momentum correction and warm-up of the density; natural compression.
A law that every method keeps belongs into :mod:`tests.contract`, a property of one method here.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edgc import EDGCConfig
from edgc.checkpoints.saved_state import compare_settings
from edgc.compressors import Channel, Gradient
from edgc.compressors.entrywise.quantize import QuantizeConfig
from edgc.compressors.entrywise.sparse import SparseConfig, chosen, draw, largest
from edgc.compressors.natural import Powers
from edgc.engine import Engine
from edgc.errors import UserError
from edgc.runtime.device import masked_path
from tests.lockstep import reduce_together
from tests.workers import same

WORKERS = 3
SHAPES = {"a": (40, 30), "bias": (30,), "b": (25, 16)}
MATRICES = ("a", "b")
DGC: dict[str, Any] = {"momentum": 0.9, "density": 0.02, "density_warmup_steps": 4, "min_compression_elements": 64}

both = pytest.mark.parametrize("method", ["topk", "randomk"])


def made(method: str, count: int = WORKERS, **changes: Any) -> list[Any]:
    return [EDGCConfig(**{"method": method, **DGC, **changes}).build() for _ in range(count)]


def gradients(step: int, worker: int) -> list[Gradient]:
    generator = torch.Generator().manual_seed(100 * step + worker)
    return [Gradient(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def everyone(step: int) -> list[list[Gradient]]:
    return [gradients(step, worker) for worker in range(WORKERS)]


@both
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"momentum": 1.0}, r"momentum = 1\.0 is not valid; use a number of at least 0 and below 1"),
        ({"momentum": -0.1}, r"momentum = -0\.1 is not valid"),
        (
            {"error_feedback": False},
            r"momentum = 0\.9 is not used with .*; leave it out, or set error_feedback",
        ),
        ({"density": 0.25}, r"density_warmup_steps = 4 is not valid; set density below 0\.25"),
        ({"density_warmup_steps": 2.5}, r"density_warmup_steps = 2\.5 is not valid; use a whole number"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(method: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(method, 1, **changes)


# ------------------------------------------------------------------ which entries are sent


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(1, 3000),
    share=st.floats(0.0005, 1.0),
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["normal", "ties", "zeros", "nan", "inf"]),
    on_gpu=st.booleans(),
)
def test_the_largest_entries(n: int, share: float, seed: int, kind: str, on_gpu: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(n, generator=generator)
    if kind == "ties":
        vector = torch.randint(-3, 4, (n,), generator=generator).float()
    elif kind == "zeros":
        vector[torch.rand(n, generator=generator) < 0.9] = 0
    elif kind != "normal":
        vector[n // 2] = float(kind)
    k = chosen(n, share)
    assert 1 <= k <= n
    size = vector.abs().nan_to_num(math.inf, math.inf).tolist()
    expected = sorted(sorted(range(n), key=lambda i: (not math.isnan(vector[i]), -size[i], i))[:k])
    with masked_path(on_gpu):
        assert largest(vector, k).tolist() == expected


@pytest.mark.parametrize(("entries", "k"), [(10, 3), (10, 8), (10, 10), (1, 1), (1000, 7)])
def test_random_entries_are_different_and_evenly_spread(entries: int, k: int) -> None:
    counts = torch.zeros(entries)
    rounds = 2000
    for seed in range(rounds):
        found = draw(entries, k, torch.Generator().manual_seed(seed))
        assert len(found) == k == len(set(found.tolist()))
        counts[found] += 1
    share = k / entries
    assert (counts / rounds - share).abs().max() <= 5 * math.sqrt(share * (1 - share) / rounds)


# ------------------------------------------------------------------ the warm-up of the density


def test_the_density_falls_as_in_the_paper() -> None:
    """Sparsity of 75, 93.75, 98.4375, 99.6 and 99.9 %: section 3.3, there epoch by epoch."""
    config = EDGCConfig(method="topk", density=1 / 1024, density_warmup_steps=4)
    assert isinstance(config, SparseConfig)
    found = [config.density_after(step) for step in range(7)]
    assert found == pytest.approx([1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 1024, 1 / 1024, 1 / 1024], rel=1e-12)
    assert found[4] == config.density
    constant = EDGCConfig(method="topk", density=0.3)
    assert isinstance(constant, SparseConfig)
    assert [constant.density_after(step) for step in (0, 1, 1000)] == [0.3] * 3


def test_the_cost_gate_times_the_density_after_the_warm_up() -> None:
    config = EDGCConfig(method="topk", cost_gate=True, **DGC)
    engine = Engine(config, stage=0, stages=[list(SHAPES.values())[::2]], iterations=10)
    for compressor, steps in ((engine.compressor, 4), (engine.monitor.benchmark.make(), 0)):
        config = compressor.config  # type: ignore[attr-defined]
        assert (config.density_warmup_steps, config.density, config.momentum) == (steps, 0.02, 0.9)


# ------------------------------------------------------------------ momentum correction


@both
def test_against_the_algorithm_written_plainly(method: str) -> None:
    """Sections 3.2 and 3.3 of the paper with u dampened, in fp64; what goes dense is not masked."""
    compressors = made(method)
    us, vs = (
        {(i, n): torch.zeros(s, dtype=torch.float64) for i in range(WORKERS) for n, s in SHAPES.items()} for _ in "uv"
    )
    for step in range(12):
        share = 0.25 * (0.02 / 0.25) ** (min(step, 4) / 4)
        expected = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        given = everyone(step)
        for worker, own in enumerate(given):
            for g in own:
                u, v = us[worker, g.name].view(-1), vs[worker, g.name].view(-1)
                v += u.mul_(0.9).add_(0.1 * g.tensor.view(-1).double())
                sent, k = slice(None), round(share * len(v))
                if g.name in MATRICES:
                    drawn = draw(len(v), k, compressors[0]._generator(g.name)) if method == "randomk" else None
                    sent = v.abs().topk(k).indices if drawn is None else drawn  # type: ignore[assignment]
                    u[sent] = 0
                expected[g.name].view(-1)[sent] += v[sent] / WORKERS
                v[sent] = 0
        reduce_together(compressors, given, 4)
        for worker, (compressor, own) in enumerate(zip(compressors, given, strict=True)):
            for g in own:
                assert torch.equal(g.tensor, given[0][list(SHAPES).index(g.name)].tensor), "replicas differ"
                assert close(g.tensor, expected[g.name]), (step, g.name)
                assert close(compressor.velocities.tensors[g.name], us[worker, g.name])
                if g.name in MATRICES:
                    assert close(compressor.errors[g.name], vs[worker, g.name])


def close(tensor: Tensor, other: Tensor) -> bool:
    return torch.allclose(tensor.double(), other, rtol=1e-4, atol=1e-6)


@both
@pytest.mark.parametrize("rank", [4, None], ids=["all sent", "uncompressed"])
def test_where_all_is_sent_it_is_sgd_with_momentum(method: str, rank: int | None) -> None:
    """torch's own, dampened; it takes its first gradient whole, here a zero."""
    [compressor] = made(method, 1, density=1.0, density_warmup_steps=0)
    names = list(SHAPES)
    ours, theirs = ([torch.nn.Parameter(torch.zeros(SHAPES[name])) for name in names] for _ in range(2))
    plain = torch.optim.SGD(ours, lr=0.1)
    with_momentum = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, dampening=0.9)
    for step in range(8):
        mine = [Gradient(g.name, g.tensor * (step > 0)) for g in gradients(step, 0)]
        for parameter, g in zip(theirs, mine, strict=True):
            parameter.grad = g.tensor.clone()
        compressor.reduce(mine, Channel(None), rank)
        for parameter, g in zip(ours, mine, strict=True):
            parameter.grad = g.tensor
        plain.step()
        with_momentum.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert one.abs().max() > 0.05


# ------------------------------------------------------------------ saved states


def test_a_state_without_velocities_begins_them_where_there_is_momentum() -> None:
    [old], [new] = made("topk", 1, momentum=0.0), made("topk", 1)
    for compressor in (old, new):
        compressor.reduce(gradients(0, 0), Channel(None), 4)
    before = old.state_dict()
    assert "velocities" not in before
    old.load_state_dict(new.state_dict())
    assert "velocities" not in old.state_dict()
    new.load_state_dict(before)
    assert not new.state_dict()["velocities"] and same(dict(new.kept), before["errors"])
    new.reduce(gradients(1, 0), Channel(None), 4)
    assert new.state_dict()["velocities"]
    old.load_state_dict(before)
    assert "velocities" not in old.state_dict()
    saved = {"method": "topk", "density": 0.02}
    with pytest.raises(UserError, match=r"momentum = 0\.0, now 0\.9"):
        compare_settings(saved, EDGCConfig(method="topk", density=0.02, momentum=0.9), allowed=False)
    assert not compare_settings(saved, EDGCConfig(method="topk", density=0.02), allowed=False)


@pytest.mark.parametrize("rank", [4, None])
def test_a_state_of_another_model_is_refused(rank: int | None) -> None:
    for shape, what in (((30, 40), "error feedback of p"), ((30,), "the velocity of p")):
        first, second = made("topk", 2)
        first.reduce([Gradient("p", torch.randn(shape))], Channel(None), 4)
        second.load_state_dict(first.state_dict())
        if len(shape) == 2:
            second.velocities.tensors.clear()
        with pytest.raises(UserError, match=what):
            second.reduce([Gradient("p", torch.randn(50, 40))], Channel(None), rank)


# ------------------------------------------------------------------ rounding at random


@pytest.mark.parametrize("bits", [8, 7, 6, 5, 4, 2])
def test_stochastic_rounding_is_unbiased(bits: int) -> None:
    """1024 means of 400 within 6 typical standard errors; rounding to the nearest is far outside."""
    matrices = [torch.randn(16, 64, generator=torch.Generator().manual_seed(worker)) for worker in range(2)]
    expected, off = (matrices[0].double() + matrices[1].double()) / 2, {}
    for rounding in ("stochastic", "nearest"):
        settings = {"bits": bits, "rounding": rounding, "min_compression_elements": 64, "error_feedback": False}
        workers = [QuantizeConfig(**settings).build() for _ in range(2)]
        errors = []
        for _ in range(20):
            copies = [[Gradient(f"p{i}", matrix.clone()) for i in range(20)] for matrix in matrices]
            reduce_together(workers, copies, 4)
            errors += [gradient.tensor.double() - expected for gradient in copies[0]]
        every = torch.stack(errors)
        typical = every.square().mean().sqrt() / math.sqrt(len(every))
        off[rounding] = float(every.mean(dim=0).abs().max() / typical)
    assert off["stochastic"] < 6 and off["nearest"] > 12, off


def through(x: Tensor, seed: int) -> Tensor:
    powers, out = Powers(), torch.empty_like(x)
    message = torch.empty(powers.bytes(x.numel()), dtype=torch.uint8)
    powers.pack(x, message, generator=torch.Generator().manual_seed(seed))
    powers.unpack(message, out)
    return out


def test_an_entry_becomes_one_of_the_two_powers_around_it() -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 5000)
    sent = through(x, 1)
    low = torch.exp2(torch.floor(torch.log2(x.abs().double()))).float()
    assert torch.equal(sent.sign(), x.sign())
    assert bool(((sent.abs() == low) | (sent.abs() == 2 * low)).all())
    assert 0.2 < float((sent.abs() == 2 * low).float().mean()) < 0.8
    assert torch.equal(through(torch.exp2(torch.arange(-126.0, 128.0)), 2), torch.exp2(torch.arange(-126.0, 128.0)))


def test_it_is_unbiased_with_a_variance_of_at_most_an_eighth() -> None:
    """Between a and 2a, E (C(x) - x)^2 = (x - a)(2a - x), which is largest against x^2 at x = 4a/3: an eighth."""
    rounds, worst = 4000, 4 / 3
    x = torch.tensor([1.0, 1.1, 1.25, worst, 1.5, 1.9, -worst, -1.75, 3e-39, 0.0])
    sent = torch.stack([through(x, seed) for seed in range(rounds)]).double()
    off, variance = sent.mean(dim=0) - x.double(), (sent - x.double()).square().mean(dim=0)
    a = torch.exp2(torch.floor(torch.log2(x.abs().double())))
    exact = (x.abs().double() - a) * (2 * a - x.abs().double())
    for i in range(len(x) - 2):
        assert abs(float(off[i])) <= 5 * math.sqrt(float(exact[i]) / rounds) + 1e-12, float(x[i])
        assert float(variance[i]) == pytest.approx(float(exact[i]), rel=0.1, abs=1e-12)
        assert float(exact[i]) <= float(x[i]) ** 2 / 8 + 1e-12
    assert float(exact[3]) == pytest.approx(worst**2 / 8), "the bound is met"
    # Below the smallest normal number: 0 or that number.
    smallest = torch.finfo(torch.float32).tiny
    assert set(sent[:, -2].tolist()) == {0.0, smallest} and not sent[:, -1].any()
    assert float(sent[:, -2].mean()) == pytest.approx(3e-39, rel=0.1)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so_and_nothing_else_becomes_it(bad: float) -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([largest, -largest, 1.0] * 40)
    for seed in range(20):
        assert through(x, seed).abs().amax() == 2.0**127
    x[7] = bad
    sent = through(x, 0)
    assert not sent[7].isfinite() and int(sent.isfinite().sum()) == len(x) - 1
    message = torch.empty(Powers().bytes(len(x)), dtype=torch.uint8)
    Powers().pack(x, message)
    assert not Powers().finite(message)
