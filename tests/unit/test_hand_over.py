"""Warm-up in a few bits an entry: engines of two gloo ranks, whose low-rank method takes over what was kept."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from edgc.checkpoints.saved_state import merge
from edgc.compressors import Gradient
from edgc.config import EDGCConfig
from edgc.engine import Engine
from edgc.errors import UserError
from edgc.measurement.mean_error import BUCKETS
from tests.workers import run_workers

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
    return Engine(config, stage=0, shapes=[matrices], iterations=STEPS, **options)


def gradients(step: int, scale: float = 1.0) -> list[Gradient]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return [Gradient(name, scale * torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def mean(tensor: Tensor) -> Tensor:
    total = tensor.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def kept(of: Engine) -> dict[str, Tensor]:
    errors: dict[str, Tensor] = of.state_dict()["compressor"]["errors"]
    return errors


def advance(of: Engine, step: int, **options: Any) -> list[Tensor]:
    """A whole iteration; the averaged gradients."""
    mine = gradients(step)
    of.reduce(mine, None, **options)
    of.end_iteration()
    return [gradient.tensor for gradient in mine]


def conservation() -> list[dict[str, Any]]:
    """Per step: what sent + kept is off by, whether replicas agree, and what the engine says."""
    found, rows = engine(), []
    for step in range(STEPS):
        before, plan = kept(found), found.plan
        owed = {g.name: mean(g.tensor + before.get(g.name, torch.zeros(()))) for g in gradients(step)}
        results = dict(zip(SHAPES, advance(found, step), strict=True))
        after = kept(found)
        last = found.last
        assert last is not None
        rows.append(
            {
                "off": max(
                    float((mean(result + after.get(name, torch.zeros(()))) - owed[name]).abs().max())
                    for name, result in results.items()
                ),
                "agree": all(torch.equal(mean(r).float(), r) for r in results.values()),
                "exact": max(float((mean(g.tensor) - results[g.name]).abs().max()) for g in gradients(step)),
                "rank": plan.ranks[0],
                "bytes": last.statistics.bytes,
                "error": last.statistics.worker_error,
                "memory": len(getattr(found.warm_up, "_flats", ())),
                "names": sorted(after),
            }
        )
    return rows


def resumed(at: int) -> bool:
    """Whether an engine that loads another's state after ``at`` steps goes on with the same bits."""
    first, second = engine(), engine()
    for step in range(at):
        advance(first, step)
    advance(second, 77)  # what is loaded has to replace something
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    return all(
        torch.equal(x, y)
        for step in range(at, STEPS)
        for x, y in zip(advance(first, step), advance(second, step), strict=True)
    )


def dropped(at: int) -> bool:
    """Whether a step that is given up leaves the engine as it was, but for the count of iterations."""
    one, other = engine(deferred=True), engine(deferred=True)
    for step in range(at):
        advance(one, step)
        advance(other, step)
    before = kept(one)
    one.reduce(gradients(99), None)
    one.end_iteration(skipped=True)
    same = all(torch.equal(kept(one)[name], before[name]) for name in before)
    return same and kept(one).keys() == before.keys()


def merged(at: int) -> float:
    """How far what all replicas owe in the mean moves when two replicas' states become one."""
    found = engine()
    for step in range(at):
        advance(found, step)
    states: list[Any] = [None, None]
    mine = {"world": 2, "rank": dist.get_rank(), "engine": found.state_dict()}
    dist.all_gather_object(states, mine)
    after = engine()
    after.load_state_dict(merge(states)["engine"])
    owed = {name: mean(error) for name, error in kept(found).items()}
    assert owed
    return max(float((kept(after)[name] - error).abs().max()) for name, error in owed.items())


def rescaled() -> float:
    """Gradients and scale multiplied by 8 in warm-up: how far the results are from 8 times the others."""
    plain, scaled = engine(), engine()
    for step in range(3):
        advance(plain, step)
        advance(scaled, step)
    scaled.rescale(8.0)
    mine = gradients(3, 8.0)
    scaled.reduce(mine, None)
    scaled.end_iteration()
    return max(float((m.tensor - 8 * r).abs().max()) for m, r in zip(mine, advance(plain, 3), strict=True))


def everything() -> dict[str, Any]:
    uncompressed = advance(engine(), 0, compress=False)
    exact = [mean(gradient.tensor).float() for gradient in gradients(0)]
    paper = engine(replace(CONFIG, warmup_bits=None))
    advance(paper, 0)
    assert paper.last is not None
    return {
        "conservation": conservation(),
        "resumed": {at: resumed(at) for at in (3, WARM_UP, WARM_UP + 2)},
        "dropped": {at: dropped(at) for at in (3, WARM_UP)},
        "merged": {at: merged(at) for at in (3, WARM_UP + 1)},
        "rescaled": rescaled(),
        "dense on purpose": all(torch.equal(x, y) for x, y in zip(uncompressed, exact, strict=True)),
        "dense bytes": paper.last.statistics.bytes,
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_workers(2, everything)


def test_what_was_sent_and_what_is_kept_is_what_came_in(found: list[dict[str, Any]]) -> None:
    for rows in (rank["conservation"] for rank in found):
        assert all(row["off"] < 2e-6 and row["agree"] for row in rows)
        assert all(row["exact"] > 1e-3 for row in rows), "nothing is exact: neither int4 nor rank 4"
        assert all(row["names"] == ["a", "c"] for row in rows)


def test_warm_up_sends_an_eighth_and_then_the_low_rank_takes_over(found: list[dict[str, Any]]) -> None:
    for rank in found:
        rows, dense = rank["conservation"], rank["dense bytes"]
        assert [row["rank"] for row in rows] == [None] * WARM_UP + [4] * (STEPS - WARM_UP)
        for row in rows[CONFIG.window - 1 :: CONFIG.window]:
            row["bytes"] -= 8 * (BUCKETS + 2)  # the sketch of the mean's error; two workers
        for row in rows[:WARM_UP]:
            assert 0.12 < row["bytes"] / dense < 0.16
            assert 0.02 < row["error"] < 0.3
        assert all(0.1 < row["bytes"] / dense < 0.2 for row in rows[WARM_UP:])
        # Random matrices: rank 4 leaves most of them. What it begins with is what int4 had left, so not more.
        assert 0.8 < rows[WARM_UP]["error"] < 1
        assert [row["memory"] for row in rows] == [1] * (WARM_UP - 1) + [0] * (STEPS - WARM_UP + 1)


def test_resume_skip_merge_and_scale(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["resumed"] == dict.fromkeys(rank["resumed"], True)
        assert rank["dropped"] == dict.fromkeys(rank["dropped"], True)
        assert all(off < 1e-6 for off in rank["merged"].values())
        assert rank["rescaled"] == 0.0, "by a power of two: no bit changes"
        assert rank["dense on purpose"]


@pytest.mark.parametrize(
    "options",
    [
        {"warmup_bits": 2},
        {"warmup_bits": 4, "method": "powersgd", "rank": 4},
        {"warmup_bits": 8, "method": "none"},
    ],
)
def test_other_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="warmup_bits"):
        EDGCConfig(**{"method": "edgc", **options})
