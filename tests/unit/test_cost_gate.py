"""The cost gate: arithmetic and schedule, and engines on two gloo ranks whose compressors claim given times."""

from __future__ import annotations

import json
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
from edgc.compressors.dense import NoCompression, flat_view
from edgc.compressors.powersgd import LowRankConfig
from edgc.compressors.powersgd.algorithm import PowerSGD
from edgc.config import EDGCConfig
from edgc.engine import Engine
from edgc.runtime.channel import Stopwatch
from edgc.sections import EntropyConfig
from edgc.timing import benchmark
from edgc.timing.benchmark import Benchmark, CostGate, GateVerdict, label, summary, verdicts
from tests.low_rank import power_sgd
from tests.workers import run_workers


def test_verdicts_follow_the_mean_over_the_ranks_of_a_stage() -> None:
    rows = [
        (0, [("a", 1.0, 0.75), ("b", 0.25, 0.5)]),
        (1, [("a", 0.25, 0.5)]),
        (0, [("a", 0.25, 0.75), ("b", 0.75, 0.5)]),
    ]
    made = verdicts(rows)
    assert made == (
        GateVerdict(0, "a", 0.625, 0.75, True),
        GateVerdict(0, "b", 0.5, 0.5, False),  # equal times do not pay
        GateVerdict(1, "a", 0.25, 0.5, True),
    )
    assert summary(made) == "cost gate: compression is faster for 2 of 3 groups"


def test_times_that_are_not_finite_do_not_count() -> None:
    rows = [
        (0, [("a", math.nan, 0.5), ("b", math.nan, 1.0)]),
        (0, [("a", 0.25, 1.0), ("b", 1.0, math.inf)]),
    ]
    assert verdicts(rows) == (GateVerdict(0, "a", 0.25, 1.0, True),)
    assert verdicts([]) == ()


def test_groups_that_are_cut_anew_follow_most_of_their_entries() -> None:
    gate = CostGate()
    assert gate.compresses({"a": 5, "b": 7}), "nothing is known: as planned"
    gate.load_state_dict({"a": False, "b": False, "c": True})
    for resumed in (gate, CostGate()):
        resumed.load_state_dict(json.loads(json.dumps(gate.state_dict())))
        assert not resumed.compresses({"a": 5, "b": 7})
        assert resumed.compresses({"c": 3})
        assert resumed.compresses({"b": 7, "c": 8})
        assert not resumed.compresses({"b": 7, "c": 6})
        assert resumed.compresses({"b": 7, "new": 8})


def test_the_faster_one_counts_and_one_that_was_given_up_does_not() -> None:
    def stopped(compress: float, communicate: float = 0.0, decompress: float = 0.0, skipped: int = 0) -> Statistics:
        return Statistics(0, *map(Stopwatch, (compress, communicate, decompress)), skipped=skipped)

    assert benchmark.seconds(stopped(1.0, 2.0, 4.0)) == 7.0
    assert math.isnan(benchmark.seconds(stopped(1.0, skipped=1)))
    gate = Benchmark(power_sgd, 0, True, Channel)
    gate._compared = [
        (["a"], [stopped(3.0), stopped(2.0), stopped(0.1, skipped=1)], [stopped(5.0), stopped(6.0)]),
        (["b", "c"], [stopped(1.0, skipped=1)], []),
    ]
    assert repr(gate.group_times) == repr([("a", 2.0, 5.0), ("b + 1 more", math.nan, math.nan)])


def test_copies_lie_in_memory_as_the_originals_do() -> None:
    buffer = torch.arange(20.0)
    views = [buffer[:6].view(2, 3), buffer[6:20].view(7, 2)]
    copied = benchmark.copies([Gradient("a", views[0]), Gradient("b", views[1])])
    assert [c.name for c in copied] == ["a", "b"]
    assert flat_view([c.tensor for c in copied]) is not None
    assert all(torch.equal(c.tensor, view) for c, view in zip(copied, views, strict=True))
    copied[0].tensor.zero_()
    assert buffer[1] == 1.0, "a copy shares memory with its original"
    scattered = [Gradient("a", buffer[:6].view(2, 3).T), Gradient("h", buffer.bfloat16()), Gradient("b", views[1])]
    for copy, original in zip(benchmark.copies(scattered), scattered, strict=True):
        assert torch.equal(copy.tensor, original.tensor) and copy.tensor.dtype == original.tensor.dtype
        assert copy.tensor.untyped_storage().data_ptr() != original.tensor.untyped_storage().data_ptr()


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
    return mock.patch.object(LowRankConfig, "build", build)


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
    return Engine(config, stage=0, shapes=[list(SHAPES.values())], iterations=20)


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


def two_stages() -> list[int | None]:
    """Every rank is a stage of its own, with a group of the same name; returns the ranks this stage asked for."""
    stage = dist.get_rank()
    Claiming.iteration = 1
    with building(lambda config: Claiming()):
        engine = Engine(GATED, stage=stage, shapes=[list(SHAPES.values())] * 2, iterations=20)
        for iteration in (1, 2):
            drive(engine, draw(iteration)[:1])
        assert isinstance(engine.compressor, Claiming)
        return [rank for _, _, rank in engine.compressor.asked]


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


def drained() -> dict[str, Any]:
    """A gate that finds compression slower: what iteration 1 kept is sent at iteration 2."""
    with measured(2.0, 1.0):
        engine = engine_of(GATED)
        sums: list[torch.Tensor] = []
        kept = []
        for iteration in (1, 2):
            buckets = draw(iteration)
            before = [bucket[0].tensor.clone() for bucket in buckets]
            drive(engine, buckets)
            sums += [b - bucket[0].tensor for b, bucket in zip(before, buckets, strict=True)]
            assert isinstance(engine.compressor, PowerSGD)
            kept.append(len(engine.compressor.errors))
    assert engine.last is not None
    # Over both iterations everything has been sent: what this rank put in minus what came out has mean 0.
    return {"kept": kept, "missing": [sums[0] + sums[2], sums[1] + sums[3]], "rank": engine.last.rank}


def recorded() -> dict[str, Any]:
    """Sizes of the all-reduces of a gated iteration, in order, and whether one was left unfinished at a yield."""
    sizes: list[int] = []
    unfinished: set[int] = set()
    original = dist.all_reduce

    class Watched:
        def __init__(self, work: Any) -> None:
            self.work, self.key = work, len(sizes)
            unfinished.add(self.key)

        def wait(self) -> None:
            self.work.wait()
            unfinished.discard(self.key)

    def recording(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return Watched(original(tensor, *args, **kwargs))

    dist.all_reduce = recording
    try:
        comparing = Benchmark(lambda: power_sgd(min_elements=64), 0, True, Channel).compare(draw(1)[0], None, 4, ())
        left = [len(unfinished) for _ in comparing]
        sizes.clear()
        engine = engine_of(GATED)
        drive(engine, draw(1), jitter=random.Random(7 + dist.get_rank()))
        assert engine.last is not None
        return {"sizes": list(sizes), "bytes": engine.last.statistics.bytes, "left": left}
    finally:
        dist.all_reduce = original


def searched() -> list[Any]:
    """The search for r_max with several buckets in flight and sleeping ranks."""
    entropy = EntropyConfig(iteration_rate=0.125)
    config = EDGCConfig(method="edgc", window=8, search_start=1, entropy=entropy, min_compression_elements=64)
    engine, decisions = engine_of(config), []
    jitter = random.Random(dist.get_rank())
    for iteration in range(1, 20):
        drive(engine, draw(iteration), jitter=jitter)
        if engine.decision is not None:
            decisions.append(asdict(engine.decision))
    return decisions


def cases() -> dict[str, Any]:
    return {f.__name__: f() for f in (claimed_times, two_stages, untouched, drained, recorded, searched)}


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


def test_a_stage_follows_its_own_verdict(results: list[dict[str, Any]]) -> None:
    assert [result["two_stages"] for result in results] == [[4, None], [4, 4]]


def test_measuring_leaves_the_training_as_it_was(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["untouched"] == {"equal": True, "measured": 2, "errors": 2}


def test_a_group_that_goes_dense_sends_what_it_had_kept(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["drained"]["kept"] == [2, 0]
        assert result["drained"]["rank"] is None
    for missing in zip(*(result["drained"]["missing"] for result in results), strict=True):
        assert missing[0].abs().max() > 0.1
        assert sum(missing).abs().max() < 1e-5


def test_benchmarks_keep_the_order_of_collectives(results: list[dict[str, Any]]) -> None:
    first, second = (result["recorded"] for result in results)
    assert first["sizes"] == second["sizes"]
    assert first["sizes"][0] == 4, "the ranks meet before the first benchmark"
    # Between two ranks a ring all-reduce sends a tensor once.
    for result in (first, second):
        assert result["bytes"] == sum(result["sizes"]) > 0
        assert result["left"] and not any(result["left"])


def test_the_search_ends_alike_with_several_buckets_in_flight(results: list[dict[str, Any]]) -> None:
    first, second = (result["searched"] for result in results)
    assert first and repr(first) == repr(second)
    assert any("r_max = " in d["reason"] or "compression is off" in d["reason"] for d in first)


def test_one_rank_alone_has_nothing_to_gate() -> None:
    engine = engine_of(GATED)
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    for _ in engine.exchange([Gradient("w", matrix)], None):
        pass
    engine.end_iteration()
    assert engine.decision is None
    assert not engine.plan.gate
    assert Channel(None).world == 1
