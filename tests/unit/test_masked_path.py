"""Gradients on a GPU, where the host looks at no value: that path on CPU tensors, against the one that looks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import edgc.compressors.entrywise.randomk as randomk
from edgc.compressors import Compressor, Gradient, Statistics
from edgc.config import EDGCConfig
from edgc.megatron.activation import ActivationCompressor
from edgc.runtime.device import Later, masked_path
from edgc.sections import PipelineConfig
from tests import examples
from tests.host_reads import HostRead, NoHostReads
from tests.lockstep import Room, reduce_together

WORKERS = 3
ENTRYWISE = {name: examples.settings_of(name) for name in examples.ENTRYWISE} | {
    "topk without error feedback": {"method": "topk", "density": 0.1, "error_feedback": False}
}
LOW_RANK: dict[str, dict[str, Any]] = {
    f"powersgd {factors}{' one-sided' if one_sided else ''}": {
        "method": "powersgd",
        "rank": 4,
        "factor_dtype": factors,
        "one_sided": one_sided,
    }
    for factors in ("fp32", "bf16", "int8", "int4")
    for one_sided in (False, True)
}
DENSE = {name: examples.settings_of(name) for name in examples.DENSE}
COUNTING = examples.COUNTING
COUNTS = "counts"
SHAPES = [(40, 24), (24,), (33, 70), (), (3, 4), (0, 5), (40, 24)]
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

entrywise = pytest.mark.parametrize("name", ENTRYWISE)
deferring = pytest.mark.parametrize("deferred", [False, True])


def workers(options: dict[str, Any], deferred: bool = False) -> list[Compressor]:
    made = [EDGCConfig(**options, min_compression_elements=16, seed=3).build() for _ in range(WORKERS)]
    for compressor in made:
        compressor.deferred = deferred
    return made


def gradients(step: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[list[Gradient]]:
    found = []
    for worker in range(WORKERS):
        generator = torch.Generator().manual_seed(100 * step + worker)
        drawn = [scale * torch.randn(shape, generator=generator) for shape in SHAPES]
        # Few different magnitudes, so that there are ties to be broken.
        drawn[2] = (2 * drawn[2]).round()
        found.append([Gradient(f"p{i}", tensor.to(dtype)) for i, tensor in enumerate(drawn)])
    return found


def spoilt(step: int, where: int, bad: float, dtype: torch.dtype = torch.float32) -> list[list[Gradient]]:
    found = gradients(step, dtype)
    found[1][where].tensor.view(-1)[0] = bad
    return found


def advance(
    compressors: list[Compressor],
    mine: list[list[Gradient]],
    rank: int | None = 4,
    *,
    masked: bool,
    keep: bool = True,
) -> list[Statistics]:
    with masked_path(masked):
        statistics = reduce_together(compressors, mine, rank)
        for compressor in compressors:
            compressor.settle(keep)
    return statistics


def error(compressor: Compressor, gradient: Gradient) -> Tensor:
    """What is kept of a gradient; where nobody looks, zeros stand for nothing."""
    kept: dict[str, Tensor] = compressor.state_dict().get("errors", {})
    return kept.get(gradient.name, torch.zeros(gradient.tensor.shape))


def errors(compressors: list[Compressor]) -> list[list[Tensor]]:
    return [[error(compressor, g).clone() for g in gradients(0)[0]] for compressor in compressors]


def all_equal(some: Any, others: Any) -> bool:
    if isinstance(some, Tensor):
        return torch.equal(some, others)
    return len(some) == len(others) and all(map(all_equal, some, others))


def tensors(of: list[list[Gradient]]) -> list[list[Tensor]]:
    return [[gradient.tensor for gradient in mine] for mine in of]


# ------------------------------------------------------------------ against the path that looks


@entrywise
@pytest.mark.parametrize(
    ("dtype", "deferred"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True), (torch.float64, False)],
)
def test_the_same_bits_as_where_the_host_looks(name: str, dtype: torch.dtype, deferred: bool) -> None:
    looking, masked = workers(ENTRYWISE[name], deferred), workers(ENTRYWISE[name], deferred)
    for step, (rank, scale) in enumerate([(4, 0.0), (4, 1.0), (4, 1e-3), (None, 1.0), (4, 1.0), (4, 0.0), (4, 1.0)]):
        mine, reference = gradients(step, dtype, scale), gradients(step, dtype, scale)
        said = advance(masked, mine, rank, masked=True)
        expected = advance(looking, reference, rank, masked=False)
        assert all_equal(tensors(mine), tensors(reference)), step
        assert all_equal(errors(masked), errors(looking)), step
        for one, other in zip(said, expected, strict=True):
            assert int(one.skipped) == other.skipped == 0
            assert one.bytes == other.bytes
            for key in ("gradient_sq", "input_sq", "error_sq"):
                assert float(getattr(one, key)) == pytest.approx(float(getattr(other, key)), rel=1e-5)
    states = [compressor.state_dict() for compressor in (*masked, *looking)]
    assert all(state[COUNTS] == states[0][COUNTS] for state in states)
    assert bool(states[0][COUNTS]) == (name in COUNTING)


# ------------------------------------------------------------------ what is not finite


@deferring
@entrywise
@pytest.mark.parametrize(("where", "bad"), [(0, math.nan), (1, math.inf), (2, -math.inf)])
def test_a_bad_number_of_one_worker(name: str, where: int, bad: float, deferred: bool) -> None:
    """Compressed or dense, in a step that compresses and in one that drains: NaN everywhere, and no trace of it."""
    looking, masked = workers(ENTRYWISE[name], deferred), workers(ENTRYWISE[name], deferred)
    for compressors, on in ((looking, False), (masked, True)):
        advance(compressors, gradients(0), masked=on)
    before = errors(masked)
    for rank in (4, None):
        mine = spoilt(1, where, bad)
        statistics = advance(masked, mine, rank, masked=True)
        # A caller that settles a step later is told of every one that is not finite.
        drains = rank is not None or deferred or any(e.any() for e in before[0])
        for worker in mine:
            if drains:
                assert all(bool(g.tensor.isnan().all()) for g in worker)
            else:
                assert not bool(worker[where].tensor.isfinite().all())
        assert all(int(s.skipped) == drains for s in statistics)
        assert all(float(s.input_sq) == float(s.error_sq) == 0 for s in statistics)
        assert all_equal(errors(masked), before)
    # From here on as if it had not been, but for what is drawn: each of the steps that were given up had its draw.
    for compressor in (*looking, *masked):
        state = compressor.state_dict()
        assert all(count == 1 + (compressor in masked) for count in state[COUNTS].values())
        compressor.load_state_dict({**state, COUNTS: dict.fromkeys(state[COUNTS], 5)})
    for step in (2, 3):
        mine, reference = gradients(step), gradients(step)
        advance(masked, mine, masked=True)
        advance(looking, reference, masked=False)
        assert all_equal(tensors(mine), tensors(reference))
        assert all_equal(errors(masked), errors(looking))


@deferring
@entrywise
def test_the_very_first_gradient_is_not_finite(name: str, deferred: bool) -> None:
    looking, masked = workers(ENTRYWISE[name], deferred), workers(ENTRYWISE[name], deferred)
    advance(masked, spoilt(0, 0, math.inf), masked=True)
    advance(looking, spoilt(0, 0, math.inf), masked=False)
    assert not any(e.any() for kept in errors(masked) for e in kept)
    if name in COUNTING:
        for compressor in looking:
            compressor.load_state_dict(masked[0].state_dict())
    mine, reference = gradients(1), gradients(1)
    advance(masked, mine, masked=True)
    advance(looking, reference, masked=False)
    assert all_equal(tensors(mine), tensors(reference))


@pytest.mark.parametrize("name", sorted(ENTRYWISE.keys() - {*examples.UNBIASED, "topk without error feedback"}))
@pytest.mark.parametrize("dtype", TYPES)
def test_nothing_is_lost_over_a_step_that_is_given_up(name: str, dtype: torch.dtype) -> None:
    """Sent + kept = input, as float64 sums over the steps that count."""
    compressors = workers(ENTRYWISE[name])
    owed = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for step in range(6):
        given_up = step in (0, 3)
        mine = spoilt(step, 2, math.nan, dtype) if given_up else gradients(step, dtype)
        everyone = zip(compressors, mine, strict=True)
        brought = [[examples.came_in(compressor, g) for g in own] for compressor, own in everyone]
        came_in = [sum(column) / WORKERS for column in zip(*brought, strict=True)]
        advance(compressors, mine, masked=True)
        if not given_up:
            owed = [o + c - g.tensor.double() for o, c, g in zip(owed, came_in, mine[0], strict=True)]
    kept = [sum(column) / WORKERS for column in zip(*errors(compressors), strict=True)]
    for i in (0, 2, 6):  # the matrices; what goes dense is averaged in its own type
        assert (owed[i] - kept[i].double()).norm() <= 1e-5 * max(1.0, float(owed[i].norm()))


@entrywise
def test_steps_that_are_dropped_never_were(name: str) -> None:
    """Deferred: with ``settle(False)`` draws are taken back, too."""
    dropping, plain = workers(ENTRYWISE[name], True), workers(ENTRYWISE[name])
    for step in range(6):
        keep = step not in (0, 2, 3)
        mine = gradients(step) if step != 3 else spoilt(step, 0, math.nan)
        advance(dropping, mine, masked=True, keep=keep)
        if keep:
            reference = gradients(step)
            advance(plain, reference, masked=True)
            assert all_equal(tensors(mine), tensors(reference))
    assert all_equal(errors(dropping), errors(plain))
    assert dropping[0].state_dict()[COUNTS] == plain[0].state_dict()[COUNTS]


@entrywise
def test_a_run_resumed_after_a_bad_step_goes_on_with_the_same_bits(name: str) -> None:
    compressors = workers(ENTRYWISE[name])
    for step in range(3):
        advance(compressors, spoilt(step, 0, math.nan) if step == 1 else gradients(step), masked=True)
    resumed = workers(ENTRYWISE[name])
    for old, new in zip(compressors, resumed, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    for step in (3, 4):
        mine, again = gradients(step), gradients(step)
        advance(compressors, mine, masked=True)
        advance(resumed, again, masked=True)
        assert all_equal(tensors(mine), tensors(again))
    assert all_equal(errors(compressors), errors(resumed))


# ------------------------------------------------------------------ nobody waits


READS: dict[str, Callable[[Tensor], Any]] = {
    "bool": lambda x: bool(x[0] > 0),
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "item": lambda x: x[0].item(),
    "not": lambda x: not x[0],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "assignment under a mask": lambda x: x.__setitem__(x > 0, x[:1].expand(4)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "a scalar operand": lambda x: torch.full((2,), x[0]),  # type: ignore[arg-type]
    "repeat_interleave": lambda x: x.repeat_interleave(torch.ones(4, dtype=torch.int64)),
    "if": lambda x: 1 if x[0] else 2,
}


@pytest.mark.parametrize("read", READS)
def test_every_read_is_found(read: str) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    READS[read](x)
    with NoHostReads() as guard:
        with pytest.raises(HostRead):
            READS[read](x)
        with guard.paused():
            READS[read](x)
    READS[read](x)


@deferring
@pytest.mark.parametrize("name", [*DENSE, *ENTRYWISE, *LOW_RANK])
def test_no_step_reads_a_value(name: str, deferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compressors = workers((DENSE | ENTRYWISE | LOW_RANK)[name], deferred)
    draw = randomk.draw
    guard = NoHostReads()

    def on_the_host(*arguments: Any) -> Tensor:
        with guard.paused():
            return draw(*arguments)

    # Which side a one-sided iteration begins with was found out by the step before: it is read before anything is sent.
    read, met = Later.read, Room.meet
    sending = False

    def of_the_step_before(later: Later) -> Any:
        if sending:
            return read(later)
        with guard.paused():
            return read(later)

    def meet(room: Room) -> None:
        nonlocal sending
        sending = True
        met(room)

    monkeypatch.setattr(randomk, "draw", on_the_host)
    monkeypatch.setattr(Later, "read", of_the_step_before)
    monkeypatch.setattr(Room, "meet", meet)
    ranks = [4, 4, 4, None, 4] if name in ENTRYWISE else [4, 4, 4]
    for step, rank in enumerate(ranks):
        mine = spoilt(step, 0, math.nan) if step == 2 else gradients(step)
        sending = False
        with guard:
            advance(compressors, mine, rank, masked=True)


def test_where_the_host_looks_it_is_found_to() -> None:
    for name, options in (ENTRYWISE | LOW_RANK).items():
        compressors = workers(options)
        with pytest.raises(HostRead), NoHostReads():
            advance(compressors, gradients(0), masked=False)
            pytest.fail(f"{name} reads nothing on a CPU")


@pytest.mark.parametrize("factor_dtype", ["fp32", "bf16"])
def test_activation_gradients_are_not_read(factor_dtype: str) -> None:
    compressor = ActivationCompressor(PipelineConfig(rank=4, factor_dtype=factor_dtype))
    for step in range(3):
        gradient = torch.randn(8, 2, 40, generator=torch.Generator().manual_seed(step))
        if step == 1:
            gradient[0, 0, 0] = math.nan
        layout = compressor.layout(gradient.shape, gradient.dtype)
        assert layout is not None
        statistics = Statistics()
        with masked_path(), NoHostReads():
            message = compressor.compress("a", gradient, layout, statistics)
            compressor.decompress(message, layout, torch.empty_like(gradient), statistics)
        assert int(statistics.skipped) == (step == 1)
