"""Means over ranks, type by type: what fp16 can hold comes out of fp16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgc.compressors import Gradient
from edgc.compressors.dense import NoCompression
from edgc.runtime.channel import after_sum, before_sum
from tests.lockstep import reduce_together

LARGEST = torch.finfo(torch.float16).max


def mean(values: list[float], dtype: torch.dtype) -> float:
    """The mean of one number a rank, reduced by as many ranks."""
    gradients = [[Gradient("w", torch.tensor([value], dtype=dtype))] for value in values]
    reduce_together([NoCompression() for _ in values], gradients, None)
    assert len({float(own[0].tensor) for own in gradients}) == 1
    return float(gradients[0][0].tensor)


@pytest.mark.parametrize("world", [2, 3, 4, 5, 6, 7, 8, 11, 16, 33, 100])
def test_fp16_does_not_overflow_at_any_world_size(world: int) -> None:
    """The sum of two ranks' 40 000 would. From six ranks on, adding in fp16 rounds, as it does for DDP."""
    found = mean([40000.0] * world, torch.float16)
    assert found == 40000.0 if world < 6 else found == pytest.approx(40000.0, rel=2e-4 * world)
    assert mean([LARGEST] * world, torch.float16) == pytest.approx(LARGEST, rel=2e-4 * world)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-LARGEST, LARGEST, width=16), min_size=2, max_size=9),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_a_mean_of_finite_numbers_is_finite_and_near(values: list[float], dtype: torch.dtype) -> None:
    exact = [float(torch.tensor(value, dtype=dtype)) for value in values]
    found = mean(exact, dtype)
    largest = max(map(abs, exact))
    # Every addition and the division may round once; what is small next to the largest is lost with fp16's denormals.
    allowed = (len(values) + 2) * torch.finfo(dtype).eps * largest + len(values) * 6e-8
    assert abs(found - sum(exact) / len(exact)) <= allowed


@pytest.mark.parametrize("world", [2, 3, 7])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(world: int, value: float) -> None:
    tensor = torch.tensor([value, 1.0], dtype=torch.float16)
    before_sum(tensor, world)
    tensor[1] *= world
    after_sum(tensor, world)
    assert not bool(tensor[0].isfinite()) and float(tensor[1]) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dividing_first_changes_no_bit_of_wider_types(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for world in (2, 3, 4, 5, 6, 7, 8, 12):
        tensors = [torch.randn(512, generator=generator).to(dtype) for _ in range(world)]
        expected = sum(tensors[1:], start=tensors[0].clone()).div_(world)
        for tensor in tensors:
            before_sum(tensor, world)
        found = sum(tensors[1:], start=tensors[0].clone())
        after_sum(found, world)
        assert torch.equal(found, expected), world
