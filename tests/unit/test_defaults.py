"""Results do not depend on torch's defaults for the type and the device of a tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from edgc.compressors import Gradient
from edgc.runtime.device import masked_path
from tests import contract
from tests.lockstep import reduce_together
from tests.workers import same

DEFAULTS: dict[str, tuple[torch.dtype, str]] = {
    "float64": (torch.float64, "cpu"),
    "bfloat16": (torch.bfloat16, "cpu"),
    "meta": (torch.float32, "meta"),
}


@contextlib.contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


SHAPES = [(40, 24), (24,), (), (0,), (33, 70), (3, 4), (40, 24)]


def drawn(step: int, worker: int, dtype: torch.dtype) -> list[Gradient]:
    generator = torch.Generator("cpu").manual_seed(100 * step + worker)
    return [
        Gradient(f"p{i}", torch.randn(s, generator=generator, dtype=torch.float32, device="cpu").to(dtype=dtype))
        for i, s in enumerate(SHAPES)
    ]


def reductions(name: str, dtype: torch.dtype) -> Any:
    """Six reductions of two workers, with ranks that change, one of them exact; what is sent, kept and said."""
    workers = [contract.config_of(name).build() for _ in range(2)]
    seen: list[Any] = []
    for step, rank in enumerate((4, 4, 8, None, 6, 2)):
        gradients = [drawn(step, worker, dtype) for worker in range(2)]
        statistics = reduce_together(workers, gradients, rank)
        seen.append([[gradient.tensor for gradient in mine] for mine in gradients])
        seen += [[float(getattr(s, f"{k}_sq")) for k in ("gradient", "input", "error")] for s in statistics]
        if step == 4:  # on from what was saved
            states = [worker.state_dict() for worker in workers]
            for worker, state in zip(workers, states, strict=True):
                worker.load_state_dict(state)
    return [seen, [worker.state_dict() for worker in workers]]


# A covering set: every variant under one default, each default on both paths, and with every type of gradients.
COVERING = [
    pytest.param(name, tuple(DEFAULTS.values())[i % 3], i // 3 % 2 == 1, dtype, id=f"{name}-{[*DEFAULTS][i % 3]}")
    for i, name in enumerate(contract.variants())
    for dtype in [(torch.float32, torch.float16, torch.float64)[i // 6 % 3]]
]


@pytest.mark.parametrize(("name", "default", "masked", "dtype"), COVERING)
def test_every_method(name: str, default: tuple[torch.dtype, str], masked: bool, dtype: torch.dtype) -> None:
    with masked_path(masked):
        expected = reductions(name, dtype)
        with defaults(*default):
            found = reductions(name, dtype)
    assert same(found, expected)
