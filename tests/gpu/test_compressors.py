"""Every compressor on the device against the CPU: the same contract, and nearly the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from edgc.compressors import Compressor
from edgc.runtime.device import masked_path
from tests import examples
from tests.gpu.steps import (
    CASES,
    COUNTING,
    CPU,
    ENTRYWISE,
    FACTORED,
    RANKS,
    STATELESS,
    Course,
    as_saved,
    compressors,
    gradients,
    kept_mean,
    norm,
    on_cpu,
    run,
    step_of,
)

pytestmark = pytest.mark.gpu

EXACT = 2e-6  # fp32 sums in another order
IN_BF16 = 1e-2  # what is added up or kept in bfloat16: 2**-9 an operation
# How far a result may be from the CPU's, of its norm. Quantised factors are rounded along another basis of the same
# subspace, which moves what they reach by about their step.
CLOSE = {"fp32": 1e-3, "bf16": 0.05, "int8": 0.1, "int7": 0.15, "int6": 0.2, "int5": 0.3, "int4": 0.4}


def lossless(name: str) -> float:
    """How much of the gradients' norm may be lost by a method that says it loses nothing."""
    options = CASES[name]
    return IN_BF16 if "bf16" in (options.get("factor_dtype"), options.get("error_dtype")) else EXACT


def close(name: str, device: torch.device) -> float:
    options = CASES[name]
    factors, errors = (options.get(key, "fp32") for key in ("factor_dtype", "error_dtype"))
    if options["method"] in ("powersgd", "edgc"):
        return max(CLOSE[factors], CLOSE[errors])
    # Entrywise methods compute each entry alike on every device; where two levels or entries are equally near, one of
    # them may be chosen there and the other here. Of two bits, another step of a whole
    # block may be, seen on a GPU: 0.07.
    return CLOSE["bf16"] if name == "bf16" else 0.1 if options.get("bits") == 2 and device.type != "cpu" else 0.02


def draws_its_own(workers: Sequence[Compressor], device: torch.device) -> bool:
    """Whether these compressors round at random with a generator of the device: not with the numbers of a CPU's."""
    return device.type != "cpu" and any(getattr(worker, "draws_at_random", False) for worker in workers)


def distance(one: Course, other: Course) -> float:
    """The largest relative distance of two courses' results."""
    return max(
        norm([a - b for a, b in zip(x, y, strict=True)]) / norm(y) for x, y in zip(one.sent, other.sent, strict=True)
    )


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_the_contract_holds_and_the_results_are_the_cpus(name: str, world: int, device: torch.device) -> None:
    workers = compressors(name, world)
    course, reference = run(workers, device), on_cpu(name, world)
    alike = not draws_its_own(workers, device)
    assert course.replicas_equal
    assert all(bool(part.isfinite().all()) for sent in course.sent for part in sent)
    if name not in STATELESS:
        assert max(course.lost) < lossless(name), course.lost
    if alike:
        assert distance(course, reference) < close(name, device)
    # Near in norm is not yet as good: the error of the mean must not be larger either.
    for step, (mine, theirs) in enumerate(zip(course.error, reference.error, strict=True)):
        assert mine < (1.1 if alike else 1.3) * theirs + 1e-5, (step, course.error, reference.error)
    assert [of.bytes for of in course.statistics] == [of.bytes for of in reference.statistics]
    for mine, theirs in zip(course.statistics, reference.statistics, strict=True):
        assert mine.compressed == theirs.compressed
        if mine.worker_error is not None:
            assert mine.worker_error == pytest.approx(theirs.worker_error, rel=0.1 if alike else 0.3, abs=1e-3)
        assert int(mine.skipped) == 0


@pytest.mark.parametrize("name", ["powersgd fp32", "powersgd int8", "topk", "int8", "sign", "bf16"])
def test_gradients_of_two_bytes_lose_nothing_either(name: str, device: torch.device) -> None:
    course = run(compressors(name, 2), device, dtype=torch.bfloat16)
    reference = on_cpu(name, 2, dtype=torch.bfloat16)
    assert course.replicas_equal
    # What goes dense is added up in bfloat16.
    assert max(course.lost) < IN_BF16
    assert distance(course, reference) < max(close(name, device), 0.03)


@pytest.mark.parametrize("name", [*FACTORED, *ENTRYWISE, "powersgd, errors in bf16"])
@pytest.mark.parametrize("deferred", [False, True])
def test_what_is_not_finite_on_one_worker_leaves_the_state_alone(
    name: str, deferred: bool, device: torch.device
) -> None:
    workers = compressors(name, 2, deferred)
    run(workers, device, RANKS[:3])
    for index, bad in ((0, math.inf), (3, math.nan), (6, -math.inf)):
        before = [as_saved(worker.state_dict(), CPU) for worker in workers]
        given = [gradients(20, w, device) for w in range(2)]
        given[1][index].tensor.view(-1)[1] = bad
        course = Course()
        step_of(workers, given, 8, course)
        for own in given:
            assert not any(gradient.tensor.isfinite().any() for gradient in own), "some of it went through"
        assert int(course.statistics[0].skipped) == 1
        after = [as_saved(worker.state_dict(), CPU) for worker in workers]
        if name in COUNTING:
            # Where nobody looks, a reduction that was given up has had its draw: taken back here, to compare the rest.
            for worker, old, new in zip(workers, before, after, strict=True):
                assert new["counts"] == {key: count + 1 for key, count in old["counts"].items()}
                new["counts"] = old["counts"]
                worker.load_state_dict(new)
        assert_same(before, after)
    # As if it had never been.
    course = run(workers, device, RANKS[3:], first=3)
    reference = compressors(name, 2, deferred)
    undisturbed = run(reference, device)
    assert_same([course.sent], [undisturbed.sent[3:]])


@pytest.mark.parametrize("name", STATELESS)
def test_without_a_state_what_is_not_finite_is_seen_on_every_worker(name: str, device: torch.device) -> None:
    workers = compressors(name, 2)
    given = [gradients(0, w, device) for w in range(2)]
    given[1][0].tensor[0, 0] = math.nan
    step_of(workers, given, 4, Course())
    assert all(not bool(own[0].tensor.isfinite().all()) for own in given)


@pytest.mark.parametrize("name", CASES)
def test_a_first_gradient_of_zeros(name: str, device: torch.device) -> None:
    workers, course = compressors(name, 2), Course()
    step_of(workers, [gradients(0, w, device, scale=0.0) for w in range(2)], 4, course)
    assert norm(course.sent[0]) == 0
    assert norm(kept_mean(workers)) == 0
    later = run(workers, device, RANKS[:4], first=1)
    assert all(bool(part.isfinite().all()) for sent in later.sent for part in sent)
    assert later.replicas_equal
    # All of it gets across in time: none is stuck at zero. What is exact only on average may be further off.
    assert max(later.error) < 1.0 or name in examples.UNBIASED
    if name not in STATELESS:
        assert max(later.lost) < lossless(name)


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e17])
@pytest.mark.parametrize("name", ["powersgd fp32", "powersgd int8", "powersgd fp32 one-sided", "topk", "int8"])
def test_tiny_and_huge_gradients(name: str, scale: float, device: torch.device) -> None:
    workers, course = compressors(name, 2), Course()
    for step in range(3):
        step_of(workers, [gradients(step, w, device, scale=scale) for w in range(2)], 4, course)
    assert all(bool(part.isfinite().all()) for sent in course.sent for part in sent)
    assert max(course.lost) < lossless(name)
    assert max(course.error) < 0.999


@pytest.mark.parametrize("back", [False, True], ids=["from the device to a CPU", "from a CPU to the device"])
@pytest.mark.parametrize("to", [CPU, None], ids=["loaded onto the CPU", "loaded where it was"])
@pytest.mark.parametrize(
    "name",
    ["powersgd fp32", "powersgd int8", "powersgd bf16 one-sided", "powersgd, errors in bf16", *ENTRYWISE],
)
def test_a_state_goes_on_on_another_device(
    name: str, to: torch.device | None, back: bool, device: torch.device
) -> None:
    half, places = len(RANKS) // 2, [(device, True), (CPU, False)]
    if back:
        places.reverse()
    workers = compressors(name, 2)
    with masked_path(places[0][1]):
        run(workers, places[0][0], RANKS[:half])
    states = [as_saved(worker.state_dict(), to) for worker in workers]
    resumed = compressors(name, 2)
    for worker, state in zip(resumed, states, strict=True):
        worker.load_state_dict(state)
    with masked_path(places[1][1]):
        course = run(resumed, places[1][0], RANKS[half:], first=half)
    reference = on_cpu(name, 2)
    reference.sent = reference.sent[half:]
    assert course.replicas_equal
    if not draws_its_own(workers, device):
        assert distance(course, reference) < close(name, device)
    if name not in STATELESS:
        assert max(course.lost) < lossless(name)


def assert_same(one: Any, other: Any) -> None:
    """Equal bit for bit, tensors in nested containers."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other
