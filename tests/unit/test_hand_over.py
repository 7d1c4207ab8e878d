"""Warm-up in a few bits an entry: engines of two gloo ranks, whose low-rank method takes over what was kept."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from edgc.checkpoints.saved_state import merge
from edgc.compressors import Gradient
from edgc.config import EDGCConfig
from edgc.engine import Engine
from edgc.measurement.mean_error import BUCKETS
from edgc.runtime.groups import gather_objects
from tests.workers import Cases, mean

case = Cases(2, __name__)
SHAPES = {"a": (96, 64), "b": (64,), "c": (33, 64)}
WARM_UP, STEPS = 8, 14  # two windows of four iterations make up warm-up
CONFIG = EDGCConfig(
    method="edgc",
    policy="fixed",
    rank=4,
    window=4,
    warmup_fraction=0.0,
    stability_tolerance=1e9,
    warmup_bits=4,
    min_compression_elements=64,
)


def engine(config: EDGCConfig = CONFIG, **options: Any) -> Engine:
    matrices = [shape for shape in SHAPES.values() if len(shape) == 2]
    return Engine(config, stage=0, stages=[matrices], iterations=STEPS, **options)


def gradients(step: int, scale: float = 1.0) -> list[Gradient]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return [Gradient(name, scale * torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def kept(engine: Engine) -> dict[str, Tensor]:
    errors: dict[str, Tensor] = engine.state_dict()["compressor"]["errors"]
    return errors


def advance(engine: Engine, step: int, scale: float = 1.0, skipped: bool = False, **options: Any) -> list[Tensor]:
    """A whole iteration; the averaged gradients."""
    own = gradients(step, scale)
    engine.reduce(own, None, **options)
    engine.end_iteration(skipped=skipped)
    return [gradient.tensor for gradient in own]


def advanced(steps: int, **options: Any) -> Engine:
    first = engine(**options)
    for step in range(steps):
        advance(first, step)
    return first


@case
def conservation() -> None:
    """What was sent and what is kept is what came in; warm-up sends an eighth, and then the low rank takes over."""
    uncompressed = advance(engine(), 0, compress=False)
    paper = engine(replace(CONFIG, warmup_bits=None))
    advance(paper, 0)
    assert paper.last is not None
    dense = paper.last.statistics.bytes
    exact = [mean(gradient.tensor) for gradient in gradients(0)]
    own = engine()
    for step in range(STEPS):
        before, rank = kept(own), own.plan.ranks[0]
        owed = {g.name: mean(g.tensor + before.get(g.name, torch.zeros(()))) for g in gradients(step)}
        means = [mean(gradient.tensor) for gradient in gradients(step)]
        results, after, last = advance(own, step), kept(own), own.last
        assert last is not None and rank == (None if step < WARM_UP else 4) and sorted(after) == ["a", "c"]
        for name, result in zip(SHAPES, results, strict=True):
            arrived = mean(result + after.get(name, torch.zeros(())))
            assert float((arrived - owed[name]).abs().max()) < 2e-6
            assert torch.equal(mean(result).float(), result), "replicas agree"
        off = [float((a - b).abs().max()) for a, b in zip(results, means, strict=True)]
        assert max(off) > 1e-3, "nothing is exact: neither int4 nor rank 4"
        sketch = 8 * (BUCKETS + 2) if (step + 1) % CONFIG.window == 0 else 0  # of the mean's error; two workers
        share, error = (last.statistics.bytes - sketch) / dense, last.statistics.worker_error
        assert error is not None
        if step < WARM_UP:
            assert 0.12 < share < 0.16 and 0.02 < error < 0.3
        else:
            assert 0.1 < share < 0.2
        if step == WARM_UP:
            # Random matrices: rank 4 leaves most of them. What it begins with is what int4 had left, so not more.
            assert 0.8 < error < 1
        memory = len(getattr(own.warm_up, "_flats", ()))
        assert memory == (step < WARM_UP - 1)
    assert all(torch.equal(one, other.float()) for one, other in zip(uncompressed, exact, strict=True))


@case
def resumed() -> None:
    """An engine that loads another's state goes on with the same bits."""
    for at in (3, WARM_UP, WARM_UP + 2):
        first, second = advanced(at), engine()
        advance(second, 77)  # what is loaded has to replace something
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for step in range(at, STEPS):
            assert all(map(torch.equal, advance(first, step), advance(second, step)))


@case
def dropped() -> None:
    """A step that is given up leaves what is kept as it was."""
    for at in (3, WARM_UP):
        own = advanced(at)
        before = kept(own)
        advance(own, 99, skipped=True)
        after = kept(own)
        assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@case
def merged() -> None:
    """All replicas owe in the mean what they owed when two replicas' states become one."""
    for at in (3, WARM_UP + 1):
        own, after = advanced(at), engine()
        state = {"world": 2, "rank": dist.get_rank(), "engine": own.state_dict()}
        after.load_state_dict(merge(gather_objects(state))["engine"])
        owed = {name: mean(error) for name, error in kept(own).items()}
        assert owed and all(float((kept(after)[name] - error).abs().max()) < 1e-6 for name, error in owed.items())


test_hand_over = case.test()
