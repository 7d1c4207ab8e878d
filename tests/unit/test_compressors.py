"""The contract of base.py, kept by every method: many reductions on real gloo groups of 1, 2 and 4 workers.

One launch per number of workers does everything; the tests look at its records. One more, of two workers, does it the
way it is done on a GPU, where nobody looks at values (:mod:`edgc.runtime.device`).
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from edgc.compressors import Channel, Compressor, Gradient, Statistics
from edgc.compressors.dense import NoCompression
from edgc.compressors.entrywise.quantize import QuantizeConfig
from edgc.compressors.entrywise.randomk import RandomKConfig, draw
from edgc.compressors.entrywise.sparse import chosen
from edgc.compressors.entrywise.topk import TopKConfig, largest
from edgc.compressors.sizes import compressible
from edgc.errors import UserError
from edgc.runtime.device import host_decides, masked_path
from tests import examples
from tests.lockstep import Room
from tests.workers import run_workers

SMALLEST = 64


def maker(name: str, **changes: Any) -> Callable[[], Compressor]:
    """Makes compressors of an example."""
    return examples.config_of(name, min_compression_elements=SMALLEST, seed=3, **changes).build


# What method edgc compresses with is PowerSGD.
METHODS = {name: maker(name) for name in examples.FOUND if name != "edgc"}
WORLDS = (1, 2, 4)
MASKED = "2 masked"
# How far sent + kept may be from what came in, relative to the root mean square of the workers' norms.
EXACT = 1e-6
IN_BF16 = 1e-2  # what is added up in bfloat16: 2**-9 an operation

# --------------------------------------------------------------------- what is reduced


@dataclass(frozen=True)
class Spec:
    """One tensor of a reduction."""

    shape: tuple[int, ...]
    scale: float
    dtype: torch.dtype
    layout: str

    def tensor(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.layout == "contiguous" or not self.shape:
            return (torch.randn(self.shape, generator=generator) * self.scale).to(self.dtype)
        if self.layout == "transposed":
            values = (torch.randn(self.shape[::-1], generator=generator) * self.scale).to(self.dtype)
            return values.permute(*range(len(self.shape) - 1, -1, -1))
        values = torch.randn((*self.shape[:-1], 2 * self.shape[-1] + 1), generator=generator) * self.scale
        return values.to(self.dtype)[..., 1::2]


@dataclass(frozen=True)
class Case:
    specs: tuple[Spec, ...]
    rank: int

    def gradients(self, worker: int, step: int) -> list[Gradient]:
        return [Gradient(f"p{i}", spec.tensor(1000 * step + 100 * worker + i)) for i, spec in enumerate(self.specs)]


def specs() -> st.SearchStrategy[Spec]:
    side = st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 100, 257]))
    shapes = st.one_of(
        st.tuples(side, st.one_of(side, st.integers(1, 1031))),
        st.sampled_from([(1, 1), (257, 1031), (0,), (0, 5), (5, 0), (), (1, 3000), (3000, 1)]),
        st.tuples(st.integers(1, 3000)),
        st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    )
    return st.builds(
        Spec,
        shape=shapes,
        scale=st.sampled_from([0.0, 1e-30, 1.0, 1.0, 1e30]),
        dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
        layout=st.sampled_from(["contiguous", "transposed", "strided"]),
    ).filter(lambda spec: spec.shape != () or spec.layout != "strided")


def drawn(count: int) -> list[Case]:
    """Reductions as hypothesis draws them, the same ones every time."""
    cases: list[Case] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.builds(Case, st.lists(specs(), min_size=1, max_size=4).map(tuple), st.integers(1, 40)))
    def collect(case: Case) -> None:
        cases.append(case)

    collect()
    whole = Spec((257, 1031), 1.0, torch.float32, "contiguous")
    narrow = Spec((100, 90), 1.0, torch.bfloat16, "transposed")
    return [*cases, Case((whole, narrow, Spec((33,), 1.0, torch.float32, "contiguous")), 8)]


# --------------------------------------------------------------------- what each worker does in the launch


@contextmanager
def recorded() -> Iterator[list[Fraction]]:
    """Bytes that this rank sends in every collective, by the best algorithm, from the tensors as they are passed."""
    sent: list[Fraction] = []
    world = dist.get_world_size()
    share = Fraction(world - 1, world)

    def size(tensor: torch.Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    costs = {
        "all_reduce": lambda tensor, *_: 2 * share * size(tensor),
        "all_to_all_single": lambda output, source, *_: share * size(source),
        "all_gather_into_tensor": lambda output, source, *_: (world - 1) * Fraction(size(source)),
        "all_gather_single": lambda output, source, *_: (world - 1) * Fraction(size(source)),
    }
    originals = {name: getattr(dist, name) for name in costs if hasattr(dist, name)}

    def recording(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            sent.append(costs[name](*arguments))
            return originals[name](*arguments, **options)

        return call

    for name in originals:
        setattr(dist, name, recording(name))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


@dataclass
class Record:
    """One reduction, as one worker saw it."""

    label: str
    digest: str = ""
    finite: bool = True
    bytes: int = 0
    seen: tuple[Fraction, ...] = ()
    gaps: dict[tuple[torch.dtype, bool], float] = field(default_factory=dict)  # by type, and whether compressed
    worst: float = 0.0
    left: float = 0.0
    skipped: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float64, copy=True).reshape(-1)


def mean(tensor: torch.Tensor) -> torch.Tensor:
    """Mean over the workers in float64."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def norm(tensor: torch.Tensor) -> float:
    scale = float(tensor.abs().max()) if tensor.numel() else 0.0
    return scale * float((tensor / scale).norm()) if scale > 0 else 0.0


def digest(gradients: list[Gradient]) -> str:
    sha = hashlib.sha256()
    for gradient in gradients:
        sha.update(double(gradient.tensor).numpy().tobytes())
    return sha.hexdigest()


def kept(compressor: Compressor, gradients: list[Gradient]) -> list[torch.Tensor]:
    errors = getattr(compressor, "errors", {})
    return [double(errors.get(g.name, torch.zeros_like(g.tensor))) for g in gradients]


def conserves(case: Case, make: Callable[[], Compressor], label: str) -> Iterator[Record]:
    """Three reductions: two at the rank, the last one exact."""
    me, compressor, channel = dist.get_rank(), make(), Channel(None)
    for step, rank in enumerate((case.rank, case.rank, None)):
        gradients = case.gradients(me, step)
        before = [
            examples.came_in(compressor, g).reshape(-1) + e
            for g, e in zip(gradients, kept(compressor, gradients), strict=True)
        ]
        record = Record(f"{label}, {case}, step {step}")
        with recorded() as sent:
            statistics = compressor.reduce(gradients, channel, rank)
        record.seen, record.bytes, record.skipped = tuple(sent), statistics.bytes, int(statistics.skipped)
        record.digest = digest(gradients)
        record.finite = all(bool(torch.isfinite(g.tensor).all()) for g in gradients)
        after = kept(compressor, gradients)
        record.left = max((norm(error) for error in after), default=0.0)
        # Everything that is measured is exchanged for all tensors together.
        lengths = [len(item) for item in before]
        tops = torch.tensor([float(item.abs().max()) if len(item) else 0.0 for item in before])
        if label in examples.UNBIASED:
            dist.all_reduce(tops, dist.ReduceOp.MAX)
        squares = [(norm(item) / 1e32) ** 2 for item in before]
        message = mean(torch.cat([*before, *after, torch.tensor(squares, dtype=torch.float64)]))
        expected, left, squared = message.split([sum(lengths), sum(lengths), len(lengths)])
        for gradient, came_in, kept_back, square, top in zip(
            gradients, expected.split(lengths), left.split(lengths), squared, tops, strict=True
        ):
            missing, size = double(gradient.tensor) + kept_back - came_in, 1e32 * math.sqrt(float(square))
            gap = norm(missing) / size if size > 0 else norm(missing)
            key = (gradient.tensor.dtype, rank is not None and compressible(gradient.tensor.shape, SMALLEST))
            record.gaps[key] = max(record.gaps.get(key, 0.0), gap)
            if top > 0:
                record.worst = max(record.worst, float(missing.abs().max() / top))
        yield record


def whole_numbers(me: int, step: int) -> list[Gradient]:
    """Gradients whose sums over workers are exact in any order."""
    generator = torch.Generator().manual_seed(50 * step + me)
    shapes = [(40, 50), (64, 64), (33,), (300, 7)]
    return [
        Gradient(f"p{i}", torch.randint(-100, 101, shape, generator=generator).float())
        for i, shape in enumerate(shapes)
    ]


def lossless(make: Callable[[], Compressor], rank: int | None, label: str) -> Iterator[Record]:
    me, compressor, channel = dist.get_rank(), make(), Channel(None)
    for step in range(2):
        gradients = whole_numbers(me, step)
        expected = [mean(examples.came_in(compressor, g).reshape(-1)) for g in gradients]
        compressor.reduce(gradients, channel, rank)
        same = all(torch.equal(double(g.tensor), e) for g, e in zip(gradients, expected, strict=True))
        yield Record(label, extra={"same": same, "left": max(norm(e) for e in kept(compressor, gradients))})


USUAL = Case(
    (
        Spec((40, 60), 1.0, torch.float32, "contiguous"),
        Spec((65,), 1.0, torch.float32, "contiguous"),
        Spec((64, 30), 1.0, torch.bfloat16, "transposed"),
    ),
    4,
)


def same_state(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and double(a).numpy().tobytes() == double(b).numpy().tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    return bool(a == b)


def lasting(state: dict[str, Any]) -> dict[str, Any]:
    """What a reduction that is given up must leave alone; where nobody looks whether it is, it counts as a draw."""
    return state if host_decides(torch.device("cpu")) else {k: v for k, v in state.items() if k != "counts"}


def survives(make: Callable[[], Compressor], label: str) -> Iterator[Record]:
    """One worker's bad number in one of the gradients, again and again, between good steps; a twin never meets it."""
    me, last, channel = dist.get_rank(), dist.get_world_size() - 1, Channel(None)
    compressor, twin = make(), make()
    outputs = []
    for one in (compressor, twin):
        one.reduce(USUAL.gradients(me, 0), channel, USUAL.rank)
    before = compressor.state_dict()
    for where, bad in enumerate((math.nan, math.inf, -math.inf)):
        for rank in (USUAL.rank, None):
            gradients = USUAL.gradients(me, 1)
            if me == last:
                gradients[where].tensor[(0,) * gradients[where].tensor.dim()] = bad
            statistics = compressor.reduce(gradients, channel, rank)
            hit = not bool(torch.isfinite(gradients[where].tensor).all())
            same = same_state(lasting(before), lasting(compressor.state_dict()))
            kept_state = same and statistics.worker_error is None
            text = f"{label}, {bad} in {where}, rank {rank}"
            yield Record(text, skipped=int(statistics.skipped), extra={"hit": hit, "state": kept_state})
    if draws := {key: value for key, value in compressor.state_dict().items() if key == "counts"}:
        twin.load_state_dict({**twin.state_dict(), **draws})
    for one in (compressor, twin):
        gradients = USUAL.gradients(me, 2)
        one.reduce(gradients, channel, USUAL.rank)
        outputs.append(digest(gradients))
    yield Record(label, skipped=1, extra={"hit": True, "state": outputs[0] == outputs[1]})


def resumes(make: Callable[[], Compressor], label: str) -> Iterator[Record]:
    """Saved now and then, while the original goes on; then the copy does the rest."""
    me, channel = dist.get_rank(), Channel(None)
    ranks = [4, 4, 8, None, 4, 2]
    original, states, outputs = make(), [], []
    for step, rank in enumerate(ranks):
        states.append(original.state_dict())
        gradients = USUAL.gradients(me, step)
        original.reduce(gradients, channel, rank)
        outputs.append(digest(gradients))
    for cut in (3,):
        state = states[cut]
        compressor, pristine, loaded = make(), copy.deepcopy(state), copy.deepcopy(state)
        compressor.load_state_dict(loaded)
        for tensor in (*loaded.get("errors", {}).values(), *loaded.get("velocities", {}).values()):
            tensor.fill_(math.nan)
        continued = []
        for step in range(cut, len(ranks)):
            gradients = USUAL.gradients(me, step)
            compressor.reduce(gradients, channel, ranks[step])
            continued.append(digest(gradients))
        same = continued == outputs[cut:]
        yield Record(f"{label}, cut {cut}", extra={"same": same, "alone": same_state(state, pristine)})


def companies(make: Callable[[], Compressor], label: str) -> Iterator[Record]:
    """Gradients that come in other groups than before, as when a framework rebuilds its buckets."""
    me, compressor, channel = dist.get_rank(), make(), Channel(None)
    total = torch.zeros(0, dtype=torch.float64)
    came_in = total
    for step, groups in enumerate([[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[1, 2], [3, 0]], [[0, 1, 2, 3]]]):
        gradients = whole_numbers(me, step)
        came_in = (came_in if step else 0) + torch.cat([examples.came_in(compressor, g).reshape(-1) for g in gradients])
        # All groups in flight at once, advanced in turn.
        exchanges = [
            (compressor.exchange([gradients[i] for i in group], own, 8, Statistics()), own)
            for group in groups
            for own in [Channel(None)]
        ]
        while exchanges:
            for exchange in list(exchanges):
                if next(exchange[0], "end") == "end":
                    exchanges.remove(exchange)
        total = (total if step else 0) + torch.cat([double(g.tensor) for g in gradients])
    left = torch.cat(kept(compressor, gradients))
    gap = norm(total + mean(left) - mean(came_in)) / norm(mean(came_in))
    yield Record(label, digest=digest(gradients), extra={"gap": gap, "channel": channel.bytes})


def unbiased(bits: int, repeats: int) -> Record:
    """The same gradient many times over; how far the mean of the results is off, in standard errors."""
    me, channel = dist.get_rank(), Channel(None)
    gradient = Spec((16, 64), 1.0, torch.float32, "contiguous").tensor(me)
    expected, found = mean(double(gradient)), {}
    for rounding in ("stochastic", "nearest"):
        compressor = QuantizeConfig(
            bits=bits, rounding=rounding, min_compression_elements=SMALLEST, error_feedback=False
        ).build()
        errors = []
        for _ in range(repeats // 20):
            copies = [Gradient(f"p{i}", gradient.clone()) for i in range(20)]
            compressor.reduce(copies, channel, 4)
            errors += [double(one.tensor) - expected for one in copies]
        every = torch.stack(errors)
        typical = every.square().mean().sqrt() / math.sqrt(len(every))
        found[rounding] = float(every.mean(dim=0).abs().max() / typical)
    return Record(f"int{bits}", extra=found)


def lengths() -> list[Record]:
    """Bytes of a matrix of 512 x 512 in each method."""
    shape, me = (512, 512), dist.get_rank()
    records = []
    for name, make in METHODS.items():
        gradient = Spec(shape, 1.0, torch.float32, "contiguous").tensor(me)
        statistics = make().reduce([Gradient("p", gradient)], Channel(None), 8)
        records.append(Record(name, bytes=statistics.bytes, extra={"error": statistics.worker_error}))
    return records


def masked(cases: list[Case]) -> dict[str, list[Record]]:
    """The same as for gradients on a GPU."""
    with masked_path():
        return everything(cases)


def everything(cases: list[Case]) -> dict[str, list[Record]]:
    records: dict[str, list[Record]] = {f"conserves {name}": [] for name in METHODS}
    for name, make in METHODS.items():
        for case in cases:
            records[f"conserves {name}"] += conserves(case, make, name)
        records[f"survives {name}"] = list(survives(make, name))
        records[f"resumes {name}"] = list(resumes(make, name))
        records[f"companies {name}"] = list(companies(make, name))
        records[f"dense {name}"] = list(lossless(make, None, name))
    records["lossless"] = [
        *lossless(NoCompression, 4, "none"),
        *lossless(TopKConfig(density=1.0, min_compression_elements=1).build, 4, "topk"),
        *lossless(RandomKConfig(density=1.0, min_compression_elements=1).build, 4, "randomk"),
    ]
    if dist.get_world_size() == 2:
        records["unbiased"] = [unbiased(bits, 400) for bits in (8, 4, 2)]
        records["lengths"] = lengths()
    return records


@cache
def launched(world: int | str) -> list[dict[str, list[Record]]] | Exception:
    try:
        if isinstance(world, str):
            return run_workers(2, masked, drawn(5))
        return run_workers(world, everything, drawn({1: 24, 2: 10, 4: 5}[world]))
    except Exception as error:  # remembered too, or every test would try again
        return error


def results(world: int | str) -> list[dict[str, list[Record]]]:
    found = launched(world)
    if isinstance(found, Exception):
        raise found
    return found


def together(world: int | str, key: str) -> list[tuple[Record, ...]]:
    """The records of all workers, reduction by reduction."""
    return list(zip(*(result[key] for result in results(world)), strict=True))


# --------------------------------------------------------------------- tests

every_world = pytest.mark.parametrize("world", [*WORLDS, MASKED])
every_method = pytest.mark.parametrize("name", METHODS)


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_it_waits_as_often_as_it_says(name: str, rank: int | None, one_sided: bool) -> None:
    if one_sided and name not in examples.LOW_RANK:
        pytest.skip("has no two sides")
    make = maker(name, one_sided=True) if one_sided else METHODS[name]
    room, compressors = Room(2), [make(), make()]
    generator = torch.Generator().manual_seed(0)
    running = [
        compressor.exchange([Gradient("a", torch.randn(40, 50, generator=generator))], channel, rank, Statistics())
        for compressor, channel in zip(compressors, room.channels, strict=True)
    ]
    waits = 0
    while [next(exchange, "end") for exchange in running] != ["end", "end"]:
        room.meet()
        waits += 1
    assert waits == compressors[0].waits(rank) > 0


@every_world
@every_method
def test_any_gradients(world: int | str, name: str) -> None:
    """Equal replicas, nothing lost, finite, bytes as seen, and an exact step drains what was kept."""
    in_bf16 = {(torch.bfloat16, False)}
    example = examples.FOUND[name][1]
    if name not in examples.ENTRYWISE:
        in_bf16.add((torch.bfloat16, True))
    if not example.exact:
        in_bf16 |= {(torch.float32, False), (torch.float32, True)}
    for records in together(world, f"conserves {name}"):
        exact_step = records[0].label.endswith("step 2")
        for record in records:
            assert record.digest == records[0].digest, f"replicas differ: {record.label}"
            assert record.finite and record.skipped == 0, record.label
            assert 0 <= sum(record.seen) - record.bytes <= len(record.seen), record.label
            if exact_step:
                assert record.left == 0, record.label
            if example.bound is not None and not exact_step:
                assert record.worst <= example.bound + IN_BF16, record.label
                continue
            for key, gap in record.gaps.items():
                assert gap <= (IN_BF16 if key in in_bf16 else EXACT), f"{gap} of {key}: {record.label}"


@every_world
@every_method
def test_a_bad_number_reaches_all_and_touches_nothing(world: int | str, name: str) -> None:
    for records in together(world, f"survives {name}"):
        for record in records:
            assert record.extra["hit"], f"it did not arrive: {record.label}"
            assert record.extra["state"], f"it left traces: {record.label}"
            if name not in examples.DENSE + examples.UNBIASED:
                assert record.skipped == 1, record.label


@every_world
@every_method
def test_resume_equals_never_stopped(world: int | str, name: str) -> None:
    for records in together(world, f"resumes {name}"):
        for record in records:
            assert record.extra["same"], record.label
            assert record.extra["alone"], f"the state is shared: {record.label}"


@every_world
@every_method
def test_gradients_in_other_groups(world: int | str, name: str) -> None:
    for records in together(world, f"companies {name}"):
        assert len({record.digest for record in records}) == 1
        if name not in examples.UNBIASED:
            tolerance = EXACT if examples.FOUND[name][1].exact else IN_BF16
            assert all(record.extra["gap"] < tolerance for record in records)


@every_world
@every_method
def test_no_rank_is_the_exact_mean(world: int | str, name: str) -> None:
    for records in together(world, f"dense {name}"):
        assert all(record.extra["same"] for record in records)


@every_world
def test_lossless_settings_give_the_exact_mean(world: int | str) -> None:
    for records in together(world, "lossless"):
        for record in records:
            assert record.extra["same"] and record.extra["left"] == 0, record.label


def test_stochastic_rounding_is_unbiased() -> None:
    """1024 means of 400 within 6 typical standard errors; rounding to the nearest is far outside."""
    for records in together(2, "unbiased"):
        assert records[0].extra["stochastic"] < 6, records[0].label
        assert records[0].extra["nearest"] > 12, records[0].label


def test_lengths_on_the_wire() -> None:
    """Of two workers, each sends an all-reduced tensor once, and half of it in each of two directions otherwise."""
    for records in together(2, "lengths"):
        for record in records:
            assert record.bytes == examples.FOUND[record.label][1].sent(512, 512), record.label
    errors = {record.label: record.extra["error"] for record in results(2)[0]["lengths"]}
    assert errors["none"] is None and errors["bf16"] is None
    # Gaussian entries: what 1, 2, 4 and 8 bits cannot but lose, and 95 % or 5 % of the largest entries left out.
    ranges = {
        "int8": (0.004, 0.012),
        "int6": (0.02, 0.05),
        "int4": (0.09, 0.2),
        "int2": (0.4, 0.9),
        "sign": (0.59, 1.2),
        "topk": (0.8, 0.9),
        "randomk": (0.96, 0.985),
    }
    for name, (low, high) in ranges.items():
        assert low < errors[name] < high, (name, errors[name])


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(1, 3000),
    share=st.floats(0.0005, 1.0),
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["normal", "ties", "zeros", "nan", "inf"]),
    on_gpu=st.booleans(),
)
def test_the_largest_entries(n: int, share: float, seed: int, kind: str, on_gpu: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(n, generator=generator)
    if kind == "ties":
        vector = torch.randint(-3, 4, (n,), generator=generator).float()
    elif kind == "zeros":
        vector[torch.rand(n, generator=generator) < 0.9] = 0
    elif kind != "normal":
        vector[n // 2] = float(kind)
    k = chosen(n, share)
    assert 1 <= k <= n
    size = vector.abs().nan_to_num(math.inf, math.inf).tolist()
    expected = sorted(sorted(range(n), key=lambda i: (not math.isnan(vector[i]), -size[i], i))[:k])
    with masked_path(on_gpu):
        assert largest(vector, k).tolist() == expected


@pytest.mark.parametrize(("entries", "k"), [(10, 3), (10, 8), (10, 10), (1, 1), (1000, 7)])
def test_random_entries_are_different_and_evenly_spread(entries: int, k: int) -> None:
    counts = torch.zeros(entries)
    rounds = 2000
    for seed in range(rounds):
        found = draw(entries, k, torch.Generator().manual_seed(seed))
        assert len(found) == k == len(set(found.tolist()))
        counts[found] += 1
    share = k / entries
    assert (counts / rounds - share).abs().max() <= 5 * math.sqrt(share * (1 - share) / rounds)


def test_random_entries_change_from_step_to_step() -> None:
    compressor = RandomKConfig(density=0.05, min_compression_elements=1, error_feedback=False).build()
    sent = []
    for _ in range(2):
        gradient = Gradient("p", torch.ones(20, 20))
        compressor.reduce([gradient], Channel(None), 4)
        assert int(gradient.tensor.sum()) == 20
        sent.append(gradient.tensor.clone())
    assert not torch.equal(*sent)


@pytest.mark.parametrize("name", examples.ENTRYWISE)
def test_without_error_feedback_nothing_is_kept(name: str) -> None:
    compressor = maker(name, error_feedback=False, **({"momentum": 0} if name in examples.MOMENTUM else {}))()
    compressor.reduce([Gradient("p", torch.randn(30, 30))], Channel(None), 4)
    assert compressor.state_dict()["errors"] == {}


@pytest.mark.parametrize("rank", [4, None])
def test_errors_of_another_model_are_refused(rank: int | None) -> None:
    first, second = (TopKConfig(min_compression_elements=1).build() for _ in range(2))
    first.reduce([Gradient("p", torch.randn(30, 40))], Channel(None), 4)
    second.load_state_dict(first.state_dict())
    with pytest.raises(UserError, match=r"p is \(30, 40\), its gradient \(40, 30\)"):
        second.reduce([Gradient("p", torch.randn(40, 30))], Channel(None), rank)


@pytest.mark.parametrize("name", examples.FOUND)
def test_settings_reach_the_compressor(name: str) -> None:
    compressor: Any = examples.config_of(name, min_compression_elements=77, seed=5).build()
    options = examples.settings_of(name)
    assert getattr(compressor, "min_elements", 77) == 77
    assert not getattr(compressor, "draws_at_random", False) or compressor.seed == 5
    if "density" in options:
        assert compressor.config.density == options["density"]
    for key in ("factor_dtype", "one_sided", "error_feedback"):
        assert getattr(compressor, key, options.get(key)) == options.get(key, getattr(compressor, key, None)), key
    if "bits" in options:
        stochastic = options["rounding"] == "stochastic"
        assert (compressor.quantiser.bits, compressor.quantiser.stochastic) == (options["bits"], stochastic)
        assert compressor.error_feedback != stochastic
    if "error_dtype" in options:
        compressor.reduce([Gradient("p", torch.randn(40, 50))], Channel(None), 4)
        assert compressor.errors["p"].dtype == torch.bfloat16
