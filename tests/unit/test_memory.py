"""Memory of EDGC's state, measured, against the formula of docs/megatron.md."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from edgc.compressors import Channel, Gradient
from edgc.compressors.quantization import Blocks
from edgc.config import EDGCConfig
from tests.lockstep import reduce_together

SHAPES = [(768, 256), (256, 256), (1024, 256), (256, 1024)]
RANK = 8


@pytest.fixture(autouse=True)
def own_objects() -> Iterator[None]:
    """What was there before the test is not looked through: half a million objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def storages() -> dict[int, int]:
    """Bytes of the memory of every tensor that the test has made, by its address."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # isinstance would ask lazy modules, which warn
            try:
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):
                pass  # what other tests in this process have left, without memory of its own
    return found


def measured(dtype: torch.dtype, **options: str | bool) -> int:
    """Bytes that a compressor keeps between steps, its scratch memory aside."""
    numbers = torch.Generator().manual_seed(1)
    flat = torch.randn(sum(m * n for m, n in SHAPES), generator=numbers).to(dtype)
    parts = flat.split([m * n for m, n in SHAPES])
    gradients = [Gradient(f"w{i}", part.view(shape)) for i, (part, shape) in enumerate(zip(parts, SHAPES, strict=True))]
    before = storages()
    compressor = EDGCConfig(method="powersgd", rank=RANK, **options).build()
    for _ in range(3):
        compressor.reduce(gradients, Channel(None), RANK)
    kept = sum(size for place, size in storages().items() if place not in before)
    return kept - int(compressor._on_cpu._scratch.untyped_storage().nbytes())


def formula(*, error_bytes: int, gradient_copy: bool = False, factor_dtype: str = "fp32") -> int:
    """Matrices m x n at rank r: E twice; Q once more than the messages need."""
    entries = sum(m * n for m, n in SHAPES)
    left, right = (RANK * sum(shape[side] for shape in SHAPES) for side in (0, 1))
    errors = 2 * error_bytes * entries
    factors = 4 * (2 * left + 3 * right)
    wire = {"fp32": 0, "bf16": 6}[factor_dtype] * max(left, right)
    return errors + factors + wire + 4 * entries * gradient_copy


@pytest.mark.parametrize(("error_dtype", "error_bytes"), [("fp32", 4), ("bf16", 2)])
def test_error_feedback_and_factors(error_dtype: str, error_bytes: int) -> None:
    found = measured(torch.float32, error_dtype=error_dtype)
    stated = formula(error_bytes=error_bytes)
    assert stated <= found <= 1.01 * stated + 4096
    # What the page says of a parameter, without factors, which shrink as matrices grow.
    share = formula(error_bytes=error_bytes) / sum(m * n for m, n in SHAPES)
    assert share >= 2 * error_bytes


@pytest.mark.parametrize(
    ("dtype", "options", "expected"),
    [
        (torch.float32, {"error_feedback": False}, {"error_bytes": 0}),
        (torch.float32, {"factor_dtype": "bf16"}, {"error_bytes": 4, "factor_dtype": "bf16"}),
        (torch.float32, {"factor_dtype": "bf16", "error_dtype": "bf16"}, {"error_bytes": 2, "factor_dtype": "bf16"}),
        (torch.bfloat16, {}, {"error_bytes": 4, "gradient_copy": True}),  # gradients that are not fp32 are copied
    ],
)
def test_other_settings(dtype: torch.dtype, options: dict[str, Any], expected: dict[str, Any]) -> None:
    stated = formula(**expected)
    assert stated <= measured(dtype, **options) <= 1.01 * stated + 4096


def quantised(buckets: int, **options: str | int) -> int:
    """Bytes of two workers that reduce so many small buckets, each a call of its own, with a quantiser."""
    before = storages()
    compressors = [EDGCConfig(min_compression_elements=16, **options).build() for _ in range(2)]
    for bucket in range(buckets):
        mine = [[Gradient(f"w{bucket}", torch.ones(64, 48))] for _ in compressors]
        reduce_together(compressors, mine, RANK)
    del mine
    return sum(size for place, size in storages().items() if place not in before)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "powersgd", "rank": RANK, "factor_dtype": "int4"},
        {"method": "powersgd", "rank": RANK, "factor_dtype": "int8", "one_sided": True},
        {"method": "quantize", "bits": 4},
    ],
)
def test_buckets_share_what_quantising_takes(options: dict[str, str | int]) -> None:
    quantiser, before = Blocks(4), storages()
    quantiser.pack(torch.ones(64), torch.empty(quantiser.bytes(64), dtype=torch.uint8))
    scratch = sum(size for place, size in storages().items() if place not in before)
    assert scratch > 1 << 20
    del quantiser
    one, many = quantised(1, **options), quantised(9, **options)
    # Per bucket and worker what it keeps: error feedback, factors and messages, a few times its matrix.
    assert one < many < one + 8 * 2 * 6 * (4 * 64 * 48)
    assert many < 1.5 * 2 * scratch  # each of the workers has a thread, and what a thread shares, of its own


def test_what_quantising_takes_goes_with_its_last_user() -> None:
    gc.collect()
    before = sum(storages().values())
    assert quantised(2, method="quantize", bits=4) > 1 << 20
    assert sum(storages().values()) == before
