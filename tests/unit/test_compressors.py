"""Entrywise methods beside the contract of all (``test_contract.py``): what they choose, and their mean.

A law that every method keeps belongs into :mod:`tests.contract`, a property of one method here.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgc.compressors import Channel, Gradient
from edgc.compressors.entrywise.quantize import QuantizeConfig
from edgc.compressors.entrywise.sparse import RandomKConfig, TopKConfig, chosen, draw, largest
from edgc.config import EDGCConfig
from edgc.errors import UserError
from edgc.runtime.device import masked_path
from tests import examples
from tests.lockstep import reduce_together


@pytest.mark.parametrize("kind", [TopKConfig, RandomKConfig])
def test_where_all_entries_are_sent_the_mean_is_exact(kind: type[EDGCConfig]) -> None:
    """Of whole numbers, whose sums are exact in any order."""
    workers = [kind(density=1.0, min_compression_elements=1).build() for _ in range(3)]
    drawn = [torch.randint(-100, 101, (3, 40, 50), generator=torch.Generator().manual_seed(s)) for s in range(2)]
    for matrices in (3.0 * of for of in drawn):
        gradients = [[Gradient("p", matrix.clone())] for matrix in matrices]
        reduce_together(workers, gradients, 4)
        assert all(torch.equal(own[0].tensor, matrices.mean(0)) for own in gradients)
        assert not any(bool(error.any()) for worker in workers for error in worker.kept.values())


@pytest.mark.parametrize("bits", [8, 4, 2])
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


def test_random_entries_change_from_step_to_step() -> None:
    compressor = RandomKConfig(density=0.05, min_compression_elements=1, error_feedback=False).build()
    sent = []
    for _ in range(2):
        gradient = Gradient("p", torch.ones(20, 20))
        compressor.reduce([gradient], Channel(None), 4)
        assert int(gradient.tensor.sum()) == 20
        sent.append(gradient.tensor.clone())
    assert not torch.equal(*sent)


@pytest.mark.parametrize("rank", [4, None])
def test_errors_of_another_model_are_refused(rank: int | None) -> None:
    first, second = (TopKConfig(min_compression_elements=1).build() for _ in range(2))
    first.reduce([Gradient("p", torch.randn(30, 40))], Channel(None), 4)
    second.load_state_dict(first.state_dict())
    with pytest.raises(UserError, match=r"p is \(30, 40\), its gradient \(40, 30\)"):
        second.reduce([Gradient("p", torch.randn(40, 30))], Channel(None), rank)


@pytest.mark.parametrize("name", examples.FOUND)
def test_settings_reach_the_compressor(name: str) -> None:
    compressor: Any = examples.config_of(name, min_compression_elements=77, seed=5).build()
    options = examples.settings_of(name)
    assert getattr(compressor, "min_elements", 77) == 77
    assert not getattr(compressor, "draws_at_random", False) or compressor.seed == 5
    if "density" in options:
        assert compressor.config.density == options["density"]
    for key in ("factor_dtype", "one_sided", "error_feedback"):
        assert getattr(compressor, key, options.get(key)) == options.get(key, getattr(compressor, key, None)), key
    if "bits" in options:
        stochastic = options["rounding"] == "stochastic"
        assert (compressor.quantiser.bits, compressor.quantiser.stochastic) == (options["bits"], stochastic)
        assert compressor.error_feedback != stochastic
    if "error_dtype" in options:
        compressor.reduce([Gradient("p", torch.randn(40, 50))], Channel(None), 4)
        assert compressor.errors["p"].dtype == torch.bfloat16
