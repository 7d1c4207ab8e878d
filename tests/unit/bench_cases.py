"""What ranks run for the tests of the benchmarks; imports little, since every rank imports it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from edgc.compressors.powersgd import FACTOR_BITS
from experiments.bench.engines import Engine, Ours, TorchHook, entries, layer_shapes, make

SHAPES = layer_shapes(1, 32)
RANK = 4
CPU = torch.device("cpu")


def trained(variant: Engine, steps: int) -> tuple[torch.Tensor, list[float], int]:
    """The buffer after the last step, the relative errors of all steps, and the bytes of the last."""
    gradients = make(SHAPES, 2, seed=3, dtype=torch.float32, device=CPU)
    errors = []
    for step in range(steps):
        buffer = gradients[step % 2].clone()
        kept = variant.kept() if step else torch.zeros(entries(SHAPES))
        expected = buffer + (0 if kept is None else kept)
        parts = variant.step(buffer)
        errors.append(float((expected - buffer).norm() / expected.norm()))
        assert min(parts.compress.seconds, parts.communicate.seconds, parts.decompress.seconds) >= 0
        if variant.kept() is not None:
            # What was not sent is kept; int4 and bf16 factors round on the way.
            assert torch.allclose(buffer + variant.kept(), expected, atol=0.05 * float(expected.abs().max()))
    return buffer, errors, parts.bytes


def two_real_ranks() -> dict[str, tuple[torch.Tensor, list[float], int]]:
    """Every engine with gloo, the gradients of both ranks being equal."""
    group = dist.group.WORLD
    found = {dtype: trained(Ours(SHAPES, RANK, group, dtype), 4) for dtype in FACTOR_BITS}
    return {**found, "torch": trained(TorchHook(SHAPES, RANK, group, torch.empty(0)), 4)}
