"""The error of the mean, estimated from sketches, against float64 truth: simulated workers here, an engine below."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from edgc.compressors import Compressor, Gradient
from edgc.compressors.entrywise.quantize import QuantizeConfig, SignConfig
from edgc.compressors.entrywise.sparse import RandomKConfig, TopKConfig
from edgc.compressors.powersgd.algorithm import PowerSGD
from edgc.config import EDGCConfig
from edgc.control.policies.spectral import spectral
from edgc.engine import Engine
from edgc.measurement.mean_error import BUCKETS, FEWER, MeanError, WindowError, sketches
from edgc.measurement.report import relative
from edgc.measurement.spectral import error_curve
from edgc.runtime.device import masked_path
from edgc.runtime.local import Room
from tests.lockstep import reduce_together
from tests.low_rank import power_sgd
from tests.workers import run_workers

SHAPES = [(96, 160), (160, 96), (64, 64), (300, 40), (7,)]
RANK = 8
SAMPLES = 10
METHODS: dict[str, Callable[[], Compressor]] = {
    "fp32": power_sgd,
    "int8": lambda: power_sgd(factor_dtype="int8"),
    "int4": lambda: power_sgd(factor_dtype="int4"),
    "one-sided int4": lambda: power_sgd(one_sided=True, factor_dtype="int4"),
    "bf16 errors": lambda: power_sgd(error_dtype="bf16"),
    "quantize 2": QuantizeConfig(bits=2).build,
    "topk": TopKConfig(density=0.05).build,
    "randomk": RandomKConfig(density=0.05).build,
    "sign": SignConfig().build,
}


@cache
def common(shape: tuple[int, ...], step: int) -> Tensor:
    """A signal of rank 4 with a tail, which turns slowly, of norm 1; what all workers have in common."""
    parts = []
    for seed in (7, 1000 + step):
        generator = torch.Generator().manual_seed(seed)
        u, v = (torch.randn(side, min(shape), generator=generator) for side in shape)
        decay = torch.exp(-torch.arange(min(shape)) / 4.0) + 0.01
        parts.append((u * decay) @ v.T)
    signal = parts[0] / parts[0].norm() + 0.3 * parts[1] / parts[1].norm()
    return signal / signal.norm()


#: Norm of a worker's own noise, in units of the signal's: early in training, late, and workers that see the same data.
REGIMES = {"early": 0.7, "late": 3.0, "same": 0.0}


def drawn(worker: int, step: int, noise: float, scale: float = 1.0) -> list[Gradient]:
    return [Gradient(f"p{i}", scale * tensor) for i, tensor in enumerate(_drawn(worker, step, noise))]


@cache
def _drawn(worker: int, step: int, noise: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + worker)
    found = []
    for i, shape in enumerate(SHAPES):
        own = torch.randn(shape, generator=generator)
        signal = common(shape, step) if len(shape) == 2 else torch.ones(shape)
        size = 10.0 ** (i - 2)  # matrices of very different norms, as layers have
        found.append(size * (signal + noise * own / own.norm()))
    return found


@dataclass
class Truth:
    """Sums over samples of the squares that the window is about, in float64."""

    error_sq: float = 0.0
    input_sq: float = 0.0
    worker_error_sq: float = 0.0
    worker_input_sq: float = 0.0


def together(estimators: Sequence[MeanError]) -> list[WindowError]:
    messages = [estimator.message() for estimator in estimators]
    if messages[0] is None:
        assert all(message is None for message in messages)
        return [estimator.close(None) for estimator in estimators]
    mean = torch.stack([message for message in messages if message is not None]).mean(0)
    assert len(messages) == len(estimators)
    return [estimator.close(mean) for estimator in estimators]


def window(
    make: Callable[[], Compressor],
    world: int,
    noise: float,
    *,
    spectra: bool = False,
    rank: int = RANK,
    seeds: Sequence[int] = (3,),
) -> tuple[Truth, list[WindowError]]:
    """Five reductions to settle, then a window of ten samples; what each worker measures, one seed after the other."""
    compressors = [make() for _ in range(world)]
    estimators = [[MeanError(seed) for _ in range(world)] for seed in seeds]
    channel = Room(world).opener(0)()
    truth = Truth()
    for step in range(5 + SAMPLES):
        gradients = [drawn(worker, step, noise) for worker in range(world)]
        inputs = {
            g.name: [
                own[i].tensor.double() + compressor.kept.get(g.name, torch.zeros(())).double()
                for own, compressor in zip(gradients, compressors, strict=True)
            ]
            for i, g in enumerate(gradients[0])
            if g.tensor.dim() == 2
        }
        done = reduce_together(compressors, gradients, rank)
        if step < 5:
            continue
        for gradient in gradients[0]:
            if gradient.name in inputs:
                mean = torch.stack(inputs[gradient.name]).mean(0)
                truth.error_sq += float((mean - gradient.tensor.double()).square().sum())
                truth.input_sq += float(mean.square().sum())
        truth.worker_error_sq += float(done[0].error_sq)
        truth.worker_input_sq += float(done[0].input_sq)
        for worker, (own, compressor) in enumerate(zip(gradients, compressors, strict=True)):
            asked = compressor.spectra() if spectra and isinstance(compressor, PowerSGD) else {}
            for of_seed in estimators:
                of_seed[worker].start_iteration()
                of_seed[worker].reduced(own, channel, compressor)
                of_seed[worker].measure(step, 1.0, done[0].skipped, asked)
    return truth, [measured for of_seed in estimators for measured in together(of_seed)]


CASES = [(2, "early"), (2, "late"), (2, "same"), (4, "late")]
# One method of each kind in all cases, the others in one each.
COVERING = [(method, *case) for method in ("fp32", "topk") for case in CASES]
COVERING += [(method, *CASES[i % len(CASES)]) for i, method in enumerate(METHODS) if method not in ("fp32", "topk")]


@pytest.mark.parametrize(("method", "world", "regime"), COVERING)
def test_estimate_is_within_a_tenth_of_the_truth(method: str, world: int, regime: str) -> None:
    seeds = range(5)
    truth, measured = window(METHODS[method], world, REGIMES[regime], seeds=seeds)
    true = relative(truth.error_sq, truth.input_sq)
    worker = relative(truth.worker_error_sq, truth.worker_input_sq)
    apart = regime == "late" and method in ("fp32", "int8", "int4", "bf16 errors")
    for seed in seeds:
        replicas = measured[seed * world : (seed + 1) * world]
        assert len({(item.error_sq, item.input_sq) for item in replicas}) == 1, "replicas say the same"
        found = relative(replicas[0].error_sq, replicas[0].input_sq)
        assert found == pytest.approx(true, rel=0.1)
        if apart:
            assert abs(found - true) < abs(found - worker), "what a worker keeps is another number"
    # The squares of one window are off by 6 to 9 % (one standard deviation); their mean is the truth.
    assert fmean(item.error_sq for item in measured) == pytest.approx(truth.error_sq, rel=0.1)
    assert fmean(item.input_sq for item in measured) == pytest.approx(truth.input_sq, rel=0.1)
    if apart:
        assert worker > 1.08 * true, "what a worker keeps is another, larger number"
    elif regime == "same":
        assert worker == pytest.approx(true, rel=0.02), "workers that see the same keep what the mean lacks"


@pytest.mark.parametrize("method", ["fp32", "one-sided int4"])
def test_estimate_where_nobody_may_look(method: str) -> None:
    """The way of a GPU, on a CPU."""
    with masked_path():
        truth, measured = window(METHODS[method], 2, REGIMES["late"])
    true = relative(truth.error_sq, truth.input_sq)
    assert relative(measured[0].error_sq, measured[0].input_sq) == pytest.approx(true, rel=0.1)


def test_a_reduction_that_was_given_up_does_not_count() -> None:
    found = []
    for masked in (False, True):
        with masked_path(masked):
            compressors, channel = [power_sgd() for _ in range(2)], Room(2).opener(0)()
            estimators = [MeanError(0) for _ in range(2)]
            for step in range(4):
                gradients = [drawn(worker, step, 1.0) for worker in range(2)]
                if step == 2:
                    gradients[1][0].tensor[3, 3] = math.nan
                done = reduce_together(compressors, gradients, RANK)
                assert int(done[0].skipped) == (step == 2)
                for estimator, own, compressor in zip(estimators, gradients, compressors, strict=True):
                    estimator.start_iteration()
                    estimator.reduced(own, channel, compressor)
                    if step >= 2:
                        estimator.measure(step, 1.0, done[0].skipped, {})
                    if step == 3:
                        alone = MeanError(0)
                        alone.reduced(own, channel, compressor)
                        alone.measure(step, 1.0, 0, {})
                        expected = alone.message()
                        assert expected is not None and torch.equal(expected, estimator._sums)  # type: ignore[arg-type]
            found.append(together(estimators)[0])
            assert 0 < relative(found[-1].error_sq, found[-1].input_sq) < 1
    assert found[0].error_sq == pytest.approx(found[1].error_sq, rel=1e-3)


def sketch(matrix: Tensor, key: str) -> Tensor:
    [found] = sketches([matrix], [key])
    return found


@pytest.mark.parametrize(
    "matrix",
    [
        torch.randn(64, 96, generator=torch.Generator().manual_seed(1)),
        torch.outer(*(torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (300, 2000))),
        torch.zeros(50, 600).index_fill_(1, torch.tensor([7]), 1.0),
    ],
    ids=["noise", "rank 1", "one column"],
)
def test_the_norm_is_kept_in_the_mean(matrix: Tensor) -> None:
    true = float(matrix.double().square().sum())
    found = torch.tensor([float(sketch(matrix, f"key {i}").square().sum()) / true for i in range(400)])
    stable = true / float(torch.linalg.matrix_norm(matrix.double(), 2)) ** 2
    spread = math.sqrt(2 / BUCKETS + 2 / (8 * stable))
    assert found.mean() == pytest.approx(1.0, abs=4 * spread / 20)
    assert found.std() < 1.3 * spread


def test_a_sketch_is_linear_and_follows_from_its_key() -> None:
    a, b = (torch.randn(70, 600, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    assert torch.allclose(sketch(a, "k") + sketch(b, "k"), sketch(a + b, "k"), atol=1e-3)
    assert torch.equal(sketch(a, "k"), sketch(a.clone(), "k"))
    assert torch.equal(sketch(a * 2.0**40, "k"), sketch(a, "k") * 2.0**40)
    matrices = [a, a.T.contiguous(), b, a.bfloat16(), torch.ones(1, 5)]
    for row, matrix, key in zip(sketches(matrices, "klmno"), matrices, "klmno", strict=True):
        assert torch.equal(row, sketch(matrix, key)), "together as alone"
    assert not torch.allclose(sketch(a, "k"), sketch(a, "l"))
    half = a.bfloat16()
    assert torch.allclose(sketch(half, "k"), sketch(half.float(), "k"), atol=1e-3)
    assert len(sketch(a, "k")) == BUCKETS and BUCKETS % FEWER == 0


def test_the_chosen_rank_meets_the_target_on_the_mean() -> None:
    """Of a low-rank signal under independent noise; what a worker keeps of its own would ask for more."""
    world, grid, target, noise = 4, tuple(range(4, 33, 4)), 0.6, 1.5
    _, measured = window(power_sgd, world, noise, spectra=True, rank=16)
    spectra = measured[0].spectra
    assert list(spectra) == ["p0", "p1", "p2", "p3"]
    assert all(item == measured[0] for item in measured), "replicas decide from the same numbers"
    curve = error_curve(list(spectra.values()), grid, lambda shape, rank: True)
    assert curve is not None
    found = relative(measured[0].error_sq, measured[0].input_sq)
    assert math.sqrt(curve[grid.index(16)]) == pytest.approx(found, rel=0.1)
    chosen, _ = spectral(curve, grid, target)
    assert grid[0] < chosen < grid[-1]
    truth, lower = (window(power_sgd, world, noise, rank=chosen - less)[0] for less in (0, 4))
    assert relative(truth.error_sq, truth.input_sq) <= 1.05 * target
    assert relative(lower.error_sq, lower.input_sq) > 0.95 * target, "and no rank is given away"
    assert relative(truth.worker_error_sq, truth.worker_input_sq) > 1.05 * target


# --------------------------------------------------------------------- engines, on four gloo workers

WINDOW, ITERATIONS = 5, 15
MATRICES = SHAPES[:4]
SPECTRAL = {"method": "edgc", "policy": "spectral", "r_max": 32, "r_min": 4, "target_error": 0.6}
SETTINGS: dict[str, dict[str, Any]] = {
    "powersgd": {"method": "powersgd", "rank": 8},
    "topk": {"method": "topk"},
    "cqm": {"method": "edgc", "r_max": 16, "r_min": 8},
    "int8 warm-up": {"method": "edgc", "r_max": 16, "r_min": 8, "warmup_bits": 8, "warmup_fraction": 0.5},
    "spectral": SPECTRAL,
    "none": {"method": "none"},
    "no feedback": {"method": "powersgd", "rank": 8, "error_feedback": False},
    "topk, no feedback": {"method": "topk", "error_feedback": False},
}
RESUMED = ("topk", "cqm", "spectral")
UNKNOWN = ("none", "no feedback", "topk, no feedback")


def settings_of(key: str) -> EDGCConfig:
    common = {
        "window": WINDOW,
        "min_compression_elements": 64,
        "warmup_fraction": 0.0,
        "warmup_limit_fraction": 0.0,
        "step_limit": 100,
        "entropy": {"iteration_rate": 0.5},
    }
    more = SETTINGS[key]
    if "warmup_fraction" in more:
        more = more | {"warmup_limit_fraction": more["warmup_fraction"]}
    return EDGCConfig.from_record(common | more)


def engine_of(key: str) -> Engine:
    return Engine(settings_of(key), stage=0, stages=[MATRICES], iterations=ITERATIONS)


def drive(
    key: str,
    *,
    scales: Sequence[float] = (1.0,),
    resume_at: int | None = None,
    skip: int | None = None,
    experts: dist.ProcessGroup | None = None,
    experts_first: bool = False,
) -> list[dict[str, Any]]:
    """What an engine says of each iteration; gradients are of this worker.

    Args:
        scales: loss scales, one after another in turn.
        skip: iteration whose step is given up.
        experts: reduce another matrix, whose error is large, over this group.
    """
    engine, told = engine_of(key), []
    for iteration in range(1, ITERATIONS + 1):
        scale = scales[iteration % len(scales)]
        engine.rescale(scale)
        gradients = drawn(dist.get_rank(), iteration, 1.5, scale)
        own = [Gradient("expert", 1e3 * gradients[0].tensor.clone())] if experts is not None else []
        if own and experts_first:
            engine.reduce(own, experts)
        engine.reduce(gradients[:2], None)  # two buckets
        engine.reduce(gradients[2:], None)
        if own and not experts_first:
            engine.reduce(own, experts)
        engine.end_iteration(skipped=iteration == skip)
        last = engine.last
        assert last is not None
        told.append(
            {
                "mean": (last.mean_error, last.mean_error_sq, last.mean_input_sq),
                "worker": last.statistics.worker_error,
                "bytes": last.statistics.bytes,
                "rank": last.rank,
                "decision": engine.decision,
            }
        )
        if iteration == resume_at:
            saved, engine = engine.state_dict(), engine_of(key)
            engine.load_state_dict(saved)
    return told


def cases() -> dict[str, Any]:
    found: dict[str, Any] = {}
    powers = (1.0, 2.0**16, 2.0**-20)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[dist.get_rank() % 2]
    for key in SETTINGS:
        found[key] = drive(key)
        if key in RESUMED:
            found[key, "scaled"] = drive(key, scales=powers)
            found[key, "resumed"] = drive(key, resume_at=13)
    for first in (False, True):
        found["powersgd", "experts", first] = drive("powersgd", experts=mine, experts_first=first, resume_at=13)
    for key in ("powersgd", "spectral"):
        found[key, "skip inside"] = drive(key, skip=13)
        found[key, "skip at the end"] = drive(key, skip=15)
    return found


@pytest.fixture(scope="module")
def workers() -> list[dict[Any, Any]]:
    return run_workers(4, cases)


def means(told: list[dict[str, Any]]) -> list[tuple[float, ...]]:
    return [item["mean"] for item in told]


def test_replicas_agree_on_every_bit_and_speak_at_window_ends(workers: list[dict[Any, Any]]) -> None:
    for key, told in workers[0].items():
        for other in workers[1:]:
            assert repr(means(told)) == repr(means(other[key])), key
            assert repr([i["decision"] for i in told]) == repr([i["decision"] for i in other[key]])
        name = key if isinstance(key, str) else key[0]
        for iteration, (error, _, _) in enumerate(means(told), 1):
            warm_up = name in ("cqm", "spectral") and iteration <= WINDOW  # fp32
            known = iteration % WINDOW == 0 and name not in UNKNOWN and not warm_up
            assert math.isfinite(error) == known, (key, iteration)
            assert not known or 0 < error < 1.5


def test_the_small_message_counts(workers: list[dict[Any, Any]]) -> None:
    size = 8 * (BUCKETS + 2)
    for key in ("powersgd", "topk", *UNKNOWN):
        sent = [item["bytes"] for item in workers[0][key]]
        assert len(set(sent)) == (1 if key in UNKNOWN else 2)
        assert sent[WINDOW - 1] - sent[0] == (0 if key in UNKNOWN else 2 * 3 * size // 4)
    sent = [item["bytes"] for item in workers[0]["spectral"]]
    more = 8 * FEWER * 3  # rank 32 saves nothing for 64 x 64
    assert sent[2 * WINDOW - 1] - sent[2 * WINDOW - 2] == 2 * 3 * (size + more) // 4


@pytest.mark.parametrize("how", ["scaled", "resumed"])
def test_neither_a_loss_scale_nor_a_resume_changes_a_bit(workers: list[dict[Any, Any]], how: str) -> None:
    for result in workers:
        for key in RESUMED:
            assert repr(means(result[key])) == repr(means(result[key, how])), key
            for field in ("rank", "decision"):
                mine, other = ([item[field] for item in result[k]] for k in (key, (key, how)))
                if how == "scaled" and field == "decision":  # reasons tell entropies to four digits
                    mine, other = ([d and (d.ranks, d.mean_error) for d in x] for x in (mine, other))
                assert repr(mine) == repr(other), (key, field)


def test_experts_are_left_out_in_any_order_also_after_a_resume(workers: list[dict[Any, Any]]) -> None:
    for result in workers:
        for first in (False, True):
            assert repr(means(result["powersgd"])) == repr(means(result["powersgd", "experts", first]))


def test_a_skipped_step_does_not_count(workers: list[dict[Any, Any]]) -> None:
    for result in workers:
        for key in ("powersgd", "spectral"):
            whole = means(result[key])
            for how in ("skip inside", "skip at the end"):
                found = means(result[key, how])
                assert repr(found[:12]) == repr(whole[:12])
                assert math.isfinite(found[14][0]) and found[14] != whole[14]
