"""The cost gate: arithmetic and schedule, and engines on two gloo ranks whose compressors claim given times."""

from __future__ import annotations

import math
import random
import time
from dataclasses import asdict
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from edgc.compressors import Channel, Gradient, Statistics
from edgc.compressors.dense import NoCompression
from edgc.compressors.powersgd import PowerSGDConfig
from edgc.config import EDGCConfig
from edgc.engine import Engine
from edgc.timing.benchmark import Benchmark, GateVerdict, label, verdicts
from tests.low_rank import power_sgd
from tests.workers import run_workers


def test_verdicts_follow_the_mean_over_the_ranks_of_a_stage() -> None:
    rows = [
        (0, [("a", 1.0, 0.75), ("b", 0.25, 0.5), ("c", math.nan, 1.0)]),
        (1, [("a", 0.25, 0.5)]),
        (0, [("a", 0.25, 0.75), ("b", 0.75, 0.5), ("c", 1.0, math.inf)]),
        (0, [("a", math.nan, 9.0)]),
    ]
    assert verdicts(rows) == (
        GateVerdict(0, "a", 0.625, 0.75, True),  # times that are not finite do not count
        GateVerdict(0, "b", 0.5, 0.5, False),  # equal times do not pay
        GateVerdict(1, "a", 0.25, 0.5, True),
    )


def test_groups_that_are_cut_anew_follow_most_of_their_entries() -> None:
    gate = Benchmark(power_sgd, 0, True, Channel)

    def compresses(**sizes: int) -> bool:
        return gate.compresses([Gradient(name, torch.zeros(size)) for name, size in sizes.items()])

    assert compresses(a=5, b=7), "nothing is known: as planned"
    gate._compared = [(["a", "b"], [], []), (["c"], [], [])]
    gate.follow([GateVerdict(0, "a + 1 more", 2.0, 1.0, False), GateVerdict(1, "c", 2.0, 1.0, False)])
    assert gate.gate == {"a": False, "b": False}, "the other verdict is another stage's"
    gate.gate["c"] = True
    assert compresses(c=3) and compresses(b=7, c=8) and compresses(b=7, new=8)
    assert not compresses(a=5, b=7) and not compresses(b=7, c=6)


# --------------------------------------------------------------------- what each rank does in a launch

SHAPES = {"slow": (24, 40), "fast": (40, 24)}
# Seconds that a compressed reduction claims, by group and process; dense ones claim 0.5. Alone, the second process
# would find the slow group faster compressed.
CLAIMED = {("slow", 0): 1.0, ("slow", 1): 0.25, ("fast", 0): 0.25, ("fast", 1): 0.375}
CHANGE = 5


class Claiming(NoCompression):
    """Averages exactly, claims given times, and remembers at which rank it was asked for each group."""

    iteration = 0

    def __init__(self) -> None:
        self.asked: list[tuple[int, str, int | None]] = []

    def exchange(self, gradients: Any, channel: Any, rank: int | None, statistics: Statistics) -> Any:
        own = Statistics()
        yield from super().exchange(gradients, channel, rank, own)
        name = gradients[0].name
        self.asked.append((Claiming.iteration, name, rank))
        claimed = 0.5
        if rank is not None:
            claimed = 0.125 if Claiming.iteration >= CHANGE else CLAIMED[name, dist.get_rank()]
        statistics.add(own)
        statistics.compress.total += claimed


def building(build: Any) -> Any:
    """Compressors of method ``powersgd`` are what ``build`` makes of its settings."""
    return mock.patch.object(PowerSGDConfig, "build", build)


def drive(engine: Engine, buckets: list[list[Gradient]], *, jitter: random.Random | None = None) -> None:
    """One iteration with all buckets in flight, advanced in turn; ``jitter`` sleeps as a busy rank would."""
    exchanges = [engine.exchange(bucket, None) for bucket in buckets]
    while exchanges:
        for exchange in list(exchanges):
            if jitter is not None:
                time.sleep(jitter.random() * 0.004)
            if next(exchange, "ended") == "ended":
                exchanges.remove(exchange)
    engine.end_iteration()


def draw(iteration: int) -> list[list[Gradient]]:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + iteration)
    return [
        [
            Gradient(name, torch.randn(shape, generator=generator)),
            Gradient(f"{name}.bias", torch.randn(shape[0], generator=generator)),
        ]
        for name, shape in SHAPES.items()
    ]


GATED = EDGCConfig(method="powersgd", rank=4, cost_gate=True, gate_interval=3, min_compression_elements=64)
UNGATED = EDGCConfig(method="powersgd", rank=4, min_compression_elements=64)


def engine_of(config: EDGCConfig) -> Engine:
    return Engine(config, stage=0, stages=[list(SHAPES.values())], iterations=20)


def claimed_times() -> dict[str, Any]:
    """Nine iterations; after the sixth one the engine is saved and another one goes on."""
    with building(lambda config: Claiming()):
        engine, asked, decisions = engine_of(GATED), [], []
        for iteration in range(1, 10):
            Claiming.iteration = iteration
            drive(engine, draw(iteration))
            if engine.decision is not None:
                decisions.append(asdict(engine.decision))
            if iteration == 6:
                assert isinstance(engine.compressor, Claiming)
                asked += engine.compressor.asked
                saved = engine.state_dict()
                engine = engine_of(GATED)
                engine.load_state_dict(saved)
        assert isinstance(engine.compressor, Claiming)
        return {"asked": asked + engine.compressor.asked, "decisions": decisions}


def measured(compressed: float, dense: float) -> Any:
    """Benchmarks say these times, whatever they took."""
    times = property(lambda self: [(label(names), compressed, dense) for names, *_ in self._compared])
    return mock.patch.object(Benchmark, "group_times", times)


def untouched() -> dict[str, Any]:
    """The same gradients through a gated engine, whose gate finds compression faster, and through one without."""
    jitter = random.Random(dist.get_rank())
    gated, ungated, equal = engine_of(GATED), engine_of(UNGATED), []
    gates = 0
    with measured(1.0, 2.0):
        for iteration in range(1, 6):
            first, second = draw(iteration), draw(iteration)
            gates += gated.plan.gate
            drive(gated, first, jitter=jitter)
            drive(ungated, second)
            pairs = zip(chain(*first), chain(*second), strict=True)
            equal += [torch.equal(a.tensor, b.tensor) for a, b in pairs]
            states = [engine.compressor.state_dict() for engine in (gated, ungated)]
            equal += [torch.equal(*(s[k][name] for s in states)) for k in ("errors", "factors") for name in SHAPES]
    return {"equal": all(equal), "measured": gates, "errors": len(gated.compressor.state_dict()["errors"])}


def cases() -> dict[str, Any]:
    return {f.__name__: f() for f in (claimed_times, untouched)}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_workers(2, cases)


# --------------------------------------------------------------------- tests of the launch


def test_slow_groups_go_dense_and_fast_ones_do_not(results: list[dict[str, Any]]) -> None:
    for result in results:
        asked = {(i, name): rank for i, name, rank in result["claimed_times"]["asked"]}
        # Measured at 1, 4 and 7; a verdict holds from the next iteration on. The change at 5 is seen at 7.
        assert [asked[i, "slow"] for i in range(1, 10)] == [4] + [None] * 6 + [4, 4]
        assert [asked[i, "fast"] for i in range(1, 10)] == [4] * 9


def test_all_ranks_take_the_same_verdicts_and_log_them(results: list[dict[str, Any]]) -> None:
    first, second = (result["claimed_times"]["decisions"] for result in results)
    assert repr(first) == repr(second)
    assert [decision["iteration"] for decision in first] == [1, 4, 7]
    slow, fast = first[0]["gate"]
    assert slow == {
        "stage": 0,
        "group": "slow + 1 more",
        "seconds_compressed": 0.625,
        "seconds_dense": 0.5,
        "compress": False,
    }
    assert fast["seconds_compressed"] == 0.3125
    assert fast["compress"]
    assert [verdict["compress"] for verdict in first[2]["gate"]] == [True, True]
    assert first[0]["reason"] == "cost gate: compression is faster for 1 of 2 groups"


def test_measuring_leaves_the_training_as_it_was(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["untouched"] == {"equal": True, "measured": 2, "errors": 2}
