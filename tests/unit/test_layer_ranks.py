"""Ranks by policy ``spectral``: of single matrices the best use of a stage's bytes, the same on all workers, through a
resume; and one for a stage. Without error feedback, so that what is left over is what the spectra say; with it, see
``test_mean_error.py``."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from edgc.compressors import Gradient
from edgc.control.layer_ranks import allocate
from edgc.control.policies.spectral import SpectralConfig
from edgc.engine import Engine
from edgc.sections import EntropyConfig
from tests.workers import run_workers


@st.composite
def problems(draw: st.DrawFn, equal: bool) -> tuple[dict[str, tuple[float, ...]], dict[str, int], list[int], int]:
    """Convex falling curves of up to four matrices over up to five ranks."""
    ranks = list(range(4, 4 * draw(st.integers(1, 5)) + 1, 4))
    curves, sides = {}, {}
    for k in range(draw(st.integers(1, 4))):
        drops = sorted(draw(st.lists(st.floats(0, 1), min_size=len(ranks), max_size=len(ranks))), reverse=True)
        curves[f"w{k}"] = tuple(sum(drops[j:]) for j in range(len(ranks)))
        sides[f"w{k}"] = 5 if equal else draw(st.integers(1, 6))
    return curves, sides, ranks, draw(st.sampled_from(ranks))


def total(curves: dict[str, tuple[float, ...]], ranks: list[int], chosen: dict[str, int]) -> float:
    return sum(curve[ranks.index(chosen[name])] for name, curve in curves.items())


@settings(max_examples=200, deadline=None)
@given(problem=problems(True) | problems(False))
def test_no_choice_of_as_many_bytes_has_a_smaller_error(problem: Any) -> None:
    """But for one step where the sides differ: which bytes are left over at the end is a knapsack."""
    curves, sides, ranks, common = problem
    chosen = allocate(curves, sides, ranks, common)
    budget = common * sum(sides.values())
    spent = sum(chosen[name] * sides[name] for name in curves)
    assert spent <= budget
    assert chosen == allocate(dict(reversed(curves.items())), sides, ranks, common), "order does not matter"
    refused = [0.0] if len(set(sides.values())) == 1 else [c[0] - c[1] for c in curves.values() if len(c) > 1]
    for other in itertools.product(ranks, repeat=len(curves)):
        rival = dict(zip(curves, other, strict=True))
        if sum(rival[name] * sides[name] for name in curves) <= budget:
            assert total(curves, ranks, chosen) <= total(curves, ranks, rival) + max(refused, default=0.0) + 1e-9


def test_all_to_the_matrix_that_needs_it() -> None:
    curves = {"flat": (0.0, 0.0, 0.0), "steep": (0.9, 0.4, 0.1)}
    assert allocate(curves, {"flat": 10, "steep": 10}, [4, 8, 12], 8) == {"flat": 4, "steep": 12}
    assert allocate(curves, {"flat": 10, "steep": 21}, [4, 8, 12], 8) == {"flat": 4, "steep": 8}, "too dear"
    assert allocate(curves, {"flat": 1, "steep": 1}, [4], 4) == {"flat": 4, "steep": 4}


# --------------------------------------------------------------------- in an engine, on two workers

CONFIG = SpectralConfig(
    r_max=16,
    r_min=4,
    window=4,
    step_limit=100,
    target_error=0.9,
    per_layer=True,
    smoothing=1.0,
    warmup_fraction=0.0,
    warmup_limit_fraction=0.0,
    min_compression_elements=64,
    error_feedback=False,
    entropy=EntropyConfig(iteration_rate=1.0),
)
SHAPES = {"flat": (64, 96), "steep": (96, 64)}
SCALES = {"flat": 60.0, "steep": 2.0}  # singular values exp(-k / scale)
ITERATIONS = 40


def engine_of() -> Engine:
    return Engine(CONFIG, stage=0, shapes=[list(SHAPES.values())], iterations=ITERATIONS)


def gradient(name: str, iteration: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + iteration)
    u, v = (
        torch.linalg.qr(torch.randn(side, 64, generator=torch.Generator().manual_seed(k))).Q
        for k, side in enumerate(SHAPES[name])
    )
    noise = torch.randn(SHAPES[name], generator=generator)
    return (u * torch.exp(-torch.arange(64) / SCALES[name])) @ v.T + 1e-3 * noise


def drive(engine: Engine, first: int, last: int) -> list[dict[str, Any]]:
    told = []
    for iteration in range(first, last + 1):
        gradients = [Gradient(name, gradient(name, iteration)) for name in SHAPES]
        for item in gradients:  # a bucket each
            engine.reduce([item], None)
        engine.end_iteration()
        assert engine.last is not None and engine.monitor.layer_ranks is not None
        told.append(
            {
                "means": [item.tensor for item in gradients],
                "common": engine.rank,
                "ranks": dict(engine.monitor.layer_ranks.ranks),
                "bytes": engine.last.statistics.bytes,
            }
        )
    return told


def settled() -> list[tuple[int | None, float | None]]:
    """The one rank of a stage, and the worker's error, where both workers reduce matrices with singular values
    exp(-k / 8)."""
    config = replace(CONFIG, per_layer=False, target_error=0.3)
    engine, told = Engine(config, stage=0, shapes=[[*SHAPES.values()]], iterations=ITERATIONS), []
    matrices = {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        generator = torch.Generator().manual_seed(seed)
        u, v = (torch.linalg.qr(torch.randn(side, 64, generator=generator)).Q for side in shape)
        matrices[name] = (u * torch.exp(-torch.arange(64) / 8.0)) @ v.T
    for _ in range(ITERATIONS):
        engine.reduce([Gradient(name, matrix.clone()) for name, matrix in matrices.items()], None)
        engine.end_iteration()
        assert engine.last is not None
        told.append((engine.last.rank, engine.last.statistics.worker_error))
    return told


def cases() -> dict[str, Any]:
    whole = drive(engine_of(), 1, ITERATIONS)
    before = engine_of()
    resumed = drive(before, 1, 18)
    after = engine_of()
    after.load_state_dict(before.state_dict())
    return {"whole": whole, "resumed": resumed + drive(after, 19, ITERATIONS), "settled": settled()}


@pytest.fixture(scope="module")
def workers() -> list[dict[str, Any]]:
    return run_workers(2, cases)


def test_workers_agree_on_every_rank_and_every_bit_also_after_a_resume(workers: list[dict[str, Any]]) -> None:
    for rows in zip(*(worker[key] for worker in workers for key in ("whole", "resumed")), strict=True):
        for other in rows[1:]:
            assert rows[0]["ranks"] == other["ranks"]
            assert all(torch.equal(a, b) for a, b in zip(rows[0]["means"], other["means"], strict=True))


def test_ranks_move_to_the_matrix_that_needs_them_within_the_bytes(workers: list[dict[str, Any]]) -> None:
    last = workers[0]["whole"][-1]
    assert last["ranks"]["flat"] > last["common"] > last["ranks"]["steep"]
    factors = sum(last["ranks"][name] * sum(SHAPES[name]) for name in SHAPES)
    assert factors <= last["common"] * sum(map(sum, SHAPES.values()))
    last, before = workers[0]["whole"][-2], workers[0]["whole"][-3]  # no window ends here
    factors = sum(before["ranks"][name] * sum(SHAPES[name]) for name in SHAPES)
    assert last["bytes"] == 4 * factors, "two workers send each factor once, in fp32"


def test_the_rank_settles_where_the_true_error_meets_the_target(workers: list[dict[str, Any]]) -> None:
    squares = torch.exp(-torch.arange(64) / 4.0)
    true = {rank: float((squares[rank:].sum() / squares.sum()).sqrt()) for rank in (8, 12)}
    assert true[8] > 0.3 >= true[12]
    for worker in workers:
        ranks, errors = zip(*worker["settled"], strict=True)
        assert ranks[:4] == (None,) * 4 and ranks[-16:] == (12,) * 16
        assert errors[-1] == pytest.approx(true[12], rel=0.02)
