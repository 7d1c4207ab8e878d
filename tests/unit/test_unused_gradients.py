"""Gradients that backward has not come by: what is owed stays owed, and nothing moves where nobody uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from edgc.compressors import Compressor, Gradient
from edgc.runtime.device import masked_path
from tests import examples
from tests.contract import same
from tests.lockstep import reduce_together

METHODS = [name for name in examples.FOUND if name != "edgc"]  # that is powersgd
SHAPES = {"a": (48, 40), "b": (40,), "c": (33, 64), "d": (48, 40)}


def fresh(method: str, **changes: Any) -> Compressor:
    return examples.config_of(method, min_compression_elements=16, **changes).build()


def gradients(seed: int, scale: float = 1.0) -> list[Gradient]:
    generator = torch.Generator().manual_seed(seed)
    return [Gradient(name, scale * torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


KEEPING = [name for name in METHODS if name not in {*examples.DENSE, *examples.UNBIASED}]


def _own(compressor: Compressor) -> Any:
    """What this replica alone has in its state."""
    return {key: part for key, part in compressor.state_dict().items() if key in ("errors", "velocities")}


def _errors(compressor: Compressor) -> dict[str, Tensor]:
    errors = _own(compressor)["errors"]
    return {name: errors.get(name, torch.zeros(shape)).double() for name, shape in SHAPES.items()}


@pytest.mark.parametrize("on", [False, True], ids=["host", "masked"])
@pytest.mark.parametrize("method", KEEPING)
def test_an_unused_gradient_keeps_what_is_owed(method: str, on: bool) -> None:
    """Whoever does not use a parameter: sent + kept stays what came in, and if nobody does, nothing moves."""
    rounded = 3e-2 if "bf16" in method else 2e-5
    workers = [fresh(method) for _ in range(3)]
    for compressor in workers:
        compressor.deferred = True

    def step(seed: int, rank: int | None, unused: Sequence[int], left: float = 0.0) -> list[list[Gradient]]:
        """``left`` is what gradients of before are multiplied by where this step has none."""
        mine = [gradients(10 * seed + worker) for worker in range(3)]
        came = [[examples.came_in(c, g) for g in own] for c, own in zip(workers, mine, strict=True)]
        for worker in unused:
            mine[worker] = [replace(g, tensor=g.tensor * left, unused=True) for g in mine[worker]]
            came[worker] = [gradient.tensor.double() for gradient in mine[worker]]
        owed = [_errors(compressor) for compressor in workers]
        with masked_path(on):
            reduce_together(workers, mine, rank)
        for compressor in workers:
            compressor.settle(True)
        for i, name in enumerate(SHAPES):
            each = zip(workers, owed, came, strict=True)
            sent: Any = sum(o[name] + c[i] - _errors(compressor)[name] for compressor, o, c in each) / 3
            for own in mine:
                assert float((own[i].tensor - sent).abs().max()) < rounded, (seed, name)
        return mine

    for seed in range(3):
        step(seed, 4, ())
    before = [_own(compressor) for compressor in workers]
    for seed, rank in ((3, 4), (4, None)):
        mine = step(seed, rank, (0, 1, 2))
        assert not any(gradient.tensor.any() for own in mine for gradient in own)
        assert all(same(_own(compressor), own) for compressor, own in zip(workers, before, strict=True))
    # What nobody has sent is taken back, since it is still where it was.
    left = [[g.tensor / 2 for g in gradients(50 + worker)] for worker in range(3)]
    step(5, 4, (0, 1, 2), left=0.5)
    for compressor, own, known in zip(workers, left, before, strict=True):
        for name, tensor in zip(SHAPES, own, strict=True):
            compressor.take_back(name, tensor)
            compressor.take_back(name, tensor)  # once
        for name, error in known["errors"].items():
            assert torch.allclose(_errors(compressor)[name], error.double(), atol=rounded), name
    before = [_own(compressor) for compressor in workers]
    step(6, 4, (1,))
    if method in ("powersgd", "powersgd one-sided", "topk", "topk_dgc", "randomk", "randomk_dgc"):
        assert same(_own(workers[1]), before[1]), "other methods' owners of shards keep what rounding the mean cost"
    step(7, 4, (1, 2), left=0.5)
    step(8, 12, ())
    step(9, None, (0,))
