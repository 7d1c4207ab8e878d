"""Entropies of a GPU's gradients, where the host looks at no value: that path on CPU tensors, against the one that
looks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from edgc.compressors import Gradient
from edgc.config import EDGCConfig
from edgc.entropy import on_device
from edgc.entropy.estimators import estimate
from edgc.entropy.meter import EntropyMeter, Measured
from edgc.entropy.on_device import ESTIMATES, estimate_rows
from edgc.runtime.device import masked_path
from edgc.sections import EntropyConfig
from tests.host_reads import NoHostReads

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = {"words": (96, 64), "a": (64, 128), "b": (64, 128), "c": (32, 48), "bias": (64,), "d": (3, 5)}

estimators = pytest.mark.parametrize("estimator", ESTIMATES)


def by_the_host(rows: Tensor, estimator: str) -> Tensor:
    return torch.tensor([estimate(row, estimator) for row in rows], dtype=torch.float64)


def assert_alike(rows: Tensor, estimator: str) -> None:
    before = rows.clone()
    found = estimate_rows(rows, estimator)
    assert torch.equal(rows.nan_to_num(7.0), before.nan_to_num(7.0)), "the gradients were changed"
    torch.testing.assert_close(found, by_the_host(rows, estimator), rtol=0, atol=1e-9, equal_nan=True)


def drawn(kind: str, count: int) -> Tensor:
    """Three rows of very different scales."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(3, count, generator=generator, dtype=torch.float64)
    if kind == "sparse":
        x *= torch.rand(x.shape, generator=generator) < torch.tensor([[0.3], [1.0], [0.02]])
    if kind == "heavy":
        x = x**5
    if kind == "an outlier":
        x[:, -1] *= 1e4
    return x * torch.tensor([[1e-4], [1.0], [3.0]])


COUNTS, KINDS = (2, 3, 50, 4099, 60_000), ("normal", "sparse", "heavy", "an outlier")


@estimators
@pytest.mark.parametrize(
    # Every kind with every number of entries, every type with each of either.
    ("kind", "count", "dtype"),
    [(kind, count, TYPES[(i + j) % 4]) for i, kind in enumerate(KINDS) for j, count in enumerate(COUNTS)],
)
def test_the_estimates_are_the_hosts(kind: str, count: int, dtype: torch.dtype, estimator: str) -> None:
    assert_alike(drawn(kind, count).to(dtype), estimator)


@estimators
def test_numbers_near_the_limits_of_a_type(estimator: str) -> None:
    values = [[1e299, 1.0, -2.0, 3.0], [1e-300, 2e-300, -1e-300, 0.0], [5.0, 5.0, 5.0, 5.0]]
    assert_alike(torch.tensor(values), estimator)  # too large for this type, and too small
    rows = torch.tensor(values, dtype=torch.float64)
    assert_alike(rows, estimator)
    assert_alike(rows.mul(1e8), estimator)


@estimators
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_that_is_read_in_parts(estimator: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = drawn("sparse", 5000).to(dtype)
    whole = estimate_rows(rows, estimator)
    monkeypatch.setattr(on_device, "MOST", 1024)
    torch.testing.assert_close(estimate_rows(rows, estimator), whole, rtol=0, atol=1e-12)


def gradients() -> list[Gradient]:
    generator = torch.Generator().manual_seed(0)
    return [Gradient(name, 0.1 * torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def measured(masked: bool, *, scale: float = 1.0, guard: bool = False, **entropy: Any) -> Measured:
    settings = EntropyConfig(**{"iteration_rate": 1.0, **entropy})
    config = EDGCConfig(method="edgc", r_max=8, entropy=settings, record_full_entropy=True)
    meter = EntropyMeter(config, ["words"])
    meter.scale = scale
    given = gradients()
    with masked_path(masked), NoHostReads() if guard else nullcontext():
        meter.add(1, given[:3])
        meter.add(1, given[3:])
    return meter.close()


@pytest.mark.parametrize(
    ("estimator", "sampling"), [("histogram", "diagonal"), ("gaussian", "strided"), ("histogram", "random")]
)
def test_nobody_waits_while_the_gradients_come_in(estimator: str, sampling: str) -> None:
    measured(True, guard=True, estimator=estimator, sampling=sampling)
    with pytest.raises(AssertionError):
        measured(False, guard=True, estimator=estimator, sampling=sampling)
