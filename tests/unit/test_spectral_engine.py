"""Policy ``spectral`` in an engine on two gloo ranks: from singular values to one rank for all replicas.

Without error feedback, so that what is left over is what the given spectra say; with it, see test_mean_error.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from edgc.compressors import Gradient
from edgc.compressors.powersgd.algorithm import PowerSGD
from edgc.compressors.powersgd.passes import Spectrum
from edgc.config import EDGCConfig
from edgc.control.policies.spectral import SpectralConfig, spectral
from edgc.engine import Engine
from edgc.measurement.spectral import MatrixSpectrum, error_curve
from edgc.sections import EntropyConfig
from tests.workers import run_workers

SHAPES = [(64, 96), (80, 48)]
CONFIG = EDGCConfig(
    method="edgc",
    policy="spectral",
    r_max=16,
    r_min=4,
    window=4,
    step_limit=100,
    target_error=0.5,
    smoothing=1.0,
    warmup_fraction=0.0,
    warmup_limit_fraction=0.0,
    min_compression_elements=64,
    error_feedback=False,
    entropy=EntropyConfig(iteration_rate=0.3),
)


def engine_of(config: EDGCConfig = CONFIG) -> Engine:
    return Engine(config, stage=0, shapes=[SHAPES], iterations=40)


def step(engine: Engine, matrices: Sequence[torch.Tensor]) -> None:
    engine.reduce([Gradient(f"w{i}", matrix.clone()) for i, matrix in enumerate(matrices)], None)
    engine.end_iteration()


def decaying(shape: tuple[int, int], scale: float, seed: int) -> torch.Tensor:
    """Singular values exp(-k / scale), k = 0, 1, ..."""
    generator = torch.Generator().manual_seed(seed)
    size = min(shape)
    u, v = (torch.linalg.qr(torch.randn(side, size, generator=generator)).Q for side in shape)
    return (u * torch.exp(-torch.arange(size) / scale)) @ v.T


# --------------------------------------------------------------------- with given singular values


def given_spectra(worker: int, iteration: int, rank: int) -> dict[str, MatrixSpectrum]:
    """Another decay on every worker and at every iteration; a name that was not compressed must not count."""
    found = {"stale": MatrixSpectrum((9, 9), [1.0], 1e9)}
    for index, shape in enumerate(SHAPES):
        scale = 6.0 + 8 * worker + index + 0.1 * iteration
        values = torch.exp(-2 * torch.arange(min(shape), dtype=torch.float64) / scale)
        found[f"w{index}"] = MatrixSpectrum(shape, values[:rank].tolist(), float(values.sum()))
    return found


class Given(PowerSGD):
    asked: tuple[int, int] = (0, 0)

    def spectra(self, names: Container[str] | None = None) -> dict[str, Spectrum]:
        found = given_spectra(dist.get_rank(), *Given.asked)
        return {
            name: Spectrum(item.shape, list(item.singular_sq), item.input_sq)
            for name, item in found.items()
            if names is None or name in names
        }


def with_given_spectra(resume_at: int | None) -> list[dict[str, Any]]:
    """Decisions of five windows; at ``resume_at`` another engine takes over."""

    def build(config: SpectralConfig) -> Given:
        return Given(config)

    with mock.patch.object(SpectralConfig, "build", build):
        engine, decisions = engine_of(), []
        for iteration in range(1, 21):
            Given.asked = iteration, engine.rank or 1
            generator = torch.Generator().manual_seed(10 * iteration + dist.get_rank())
            step(engine, [torch.randn(shape, generator=generator) for shape in SHAPES])
            if engine.decision is not None:
                decisions.append(asdict(engine.decision))
            if iteration == resume_at:
                saved = engine.state_dict()
                engine = engine_of()
                engine.load_state_dict(saved)
        return decisions


# --------------------------------------------------------------------- with PowerSGD's own


def with_real_spectra() -> dict[str, Any]:
    """Both workers reduce one matrix of known singular values, without error feedback, until the rank has settled."""
    config = replace(CONFIG, target_error=0.3)
    engine, found = engine_of(config), []
    matrices = [decaying(shape, 8.0, seed) for seed, shape in enumerate(SHAPES)]
    for _ in range(40):
        step(engine, matrices)
        assert engine.last is not None
        found.append((engine.last.rank, engine.last.statistics.worker_error))
    return {"found": found, "reasons": engine.controller.reason}


def cases() -> dict[str, Any]:
    return {
        "whole": with_given_spectra(None),
        "resumed": with_given_spectra(10),
        "real": with_real_spectra(),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_workers(2, cases)


def expected() -> list[tuple[int, str]]:
    """The ranks, and why, that follow from the mean over both workers of the curves of a window's mean spectra."""
    sampler, grid, rank, ranks = engine_of().entropy.sampler, (4, 8, 12, 16), 16, []
    for window in range(1, 5):  # the first one is warm-up
        first = 4 * window + 1
        sampled = [i for i in range(first, first + 4) if sampler.measures(i) or i % 4 == 0]
        means = []
        for worker in range(2):
            found = [given_spectra(worker, i, rank) for i in sampled]
            matrices = []
            for index, shape in enumerate(SHAPES):
                own = [one[f"w{index}"] for one in found]
                values = [sum(v) / len(own) for v in zip(*(one.singular_sq for one in own), strict=True)]
                matrices.append(MatrixSpectrum(shape, values, sum(one.input_sq for one in own) / len(own)))
            means.append(error_curve(matrices, grid, lambda shape, r: True))
        mean = [(a + b) / 2 for a, b in zip(*means, strict=True)]  # type: ignore[misc]
        target, why = spectral(mean, grid, CONFIG.target_error)
        ranks.append((target, f"{why}; rank {rank} -> {target}"))
        rank = target
    return ranks


def test_all_replicas_take_the_rank_of_the_mean_curve(results: list[dict[str, Any]]) -> None:
    first, second = (result["whole"] for result in results)
    assert repr(first) == repr(second)
    assert first[0]["ranks"] == (16,)
    assert [(decision["ranks"][0], decision["reason"]) for decision in first[1:]] == expected()
    assert expected()[0][0] < 16
    # The two workers alone would have asked for different ranks: agreement is worth something.
    alone = []
    for worker in range(2):
        matrices = [m for name, m in given_spectra(worker, 8, 16).items() if name != "stale"]
        curve = error_curve(matrices, (4, 8, 12, 16), lambda shape, r: True)
        assert curve is not None
        alone.append(spectral(curve, (4, 8, 12, 16), CONFIG.target_error)[0])
    assert alone[0] != alone[1]


def test_a_resume_inside_a_window_decides_alike(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert repr(result["whole"]) == repr(result["resumed"])


def test_the_rank_settles_where_the_true_error_meets_the_target(results: list[dict[str, Any]]) -> None:
    squares = [torch.exp(-torch.arange(min(shape)) / 4.0) for shape in SHAPES]

    def true_error(rank: int) -> float:
        return math.sqrt(sum(float(s[rank:].sum()) for s in squares) / sum(float(s.sum()) for s in squares))

    wanted = next(rank for rank in (4, 8, 12, 16) if true_error(rank) <= 0.3)
    assert wanted == 12
    for result in results:
        found = result["real"]["found"]
        assert [rank for rank, _ in found[:4]] == [None] * 4
        assert [rank for rank, _ in found[-16:]] == [wanted] * 16
        assert found[-1][1] == pytest.approx(true_error(wanted), rel=0.02)
