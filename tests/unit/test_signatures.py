"""Failure signatures on synthetic runs: each fires on its failure, none on healthy noise."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.training.signatures import IN_A_ROW, Finding, Observation, SignatureWatch

WINDOW = 10
WARM_UP = 4 * WINDOW
DENSE, COMPRESSED = 0.100, 0.060  # seconds of a reduction


def healthy(seed: int, iterations: int, noise: float, **changes: Callable[[int], Any]) -> Iterator[Observation]:
    """Two stages: a loss that falls to a plateau, warm-up without compression, then faster reductions as predicted.

    Args:
        noise: standard deviation of the times, as a share; and, in nats, of single losses.
        changes: replaces a field of the observation by what the function returns for the iteration.
    """
    numbers = random.Random(seed)
    for iteration in range(1, iterations + 1):
        compressed = iteration > WARM_UP
        seconds = COMPRESSED if compressed else DENSE
        times = [max(1e-6, seconds * (1 + numbers.gauss(0, noise))) for _ in range(2)]
        # Every 50th iteration the machine does something else.
        times = [10 * value if iteration % 50 == 7 else value for value in times]
        fields: dict[str, Any] = {
            "iteration": iteration,
            "loss": 3.0 + 5.0 * math.exp(-iteration / 30) + numbers.gauss(0, noise),
            "ranks": (8, 8) if compressed else (None, None),
            "bytes": 20 if compressed else 100,
            "bytes_dense": 100,
            "compress": [0.2 * value for value in times],
            "communicate": [0.7 * value for value in times],
            "decompress": [0.1 * value for value in times],
            "exposed": [value + 0.001 for value in times],
            "predicted": (COMPRESSED, COMPRESSED) if compressed else (DENSE, DENSE),
        }
        fields |= {name: change(iteration) for name, change in changes.items()}
        yield Observation(**fields)


def findings(observations: Iterator[Observation], **options: Any) -> list[Finding]:
    watch = SignatureWatch(WINDOW, **options)
    return [finding for seen in observations for finding in watch.add(seen)]


def names(signatures: list[Finding]) -> set[str]:
    return {finding.signature for finding in signatures}


@pytest.mark.parametrize(("noise", "overlapped"), [(0.01, False), (0.1, True), (0.2, False)])
def test_no_false_alarm_in_a_thousand_windows(noise: float, overlapped: bool) -> None:
    assert findings(healthy(1, 1000 * WINDOW, noise), overlapped=overlapped) == []


SEED = st.integers(0, 10**6)


@settings(max_examples=8, deadline=None)
@given(seed=SEED, noise=st.floats(0.01, 0.1))
def test_a_loss_that_leaves_its_best_diverges(seed: int, noise: float) -> None:
    begin, numbers = 20 * WINDOW, random.Random(seed)

    def loss(iteration: int) -> float:
        return 3.0 + numbers.gauss(0, noise) + 10 * noise * max(0, iteration - begin) / WINDOW

    found = findings(healthy(seed, 30 * WINDOW, 0.05, loss=loss))
    assert names(found) == {"diverging"}
    first = found[0]
    assert begin < first.iteration <= begin + 4 * WINDOW
    assert first.numbers["loss"] > first.numbers["best_loss"] and "rank 8/8" in first.text and "r_min" in first.fix
    # From then on once a window, and only the first of them is new.
    assert [f.iteration for f in found] == list(range(first.iteration, 30 * WINDOW + 1, WINDOW))
    assert [f.is_new for f in found] == [True] + [False] * (len(found) - 1)


def test_a_run_that_diverges_without_compression_is_not_blamed_on_it() -> None:
    rising: dict[str, Callable[[int], Any]] = {"loss": lambda iteration: 3.0 + 0.1 * iteration}
    dense = {"ranks": lambda iteration: (None, None)}
    assert names(findings(healthy(3, 300, 0.05, **rising))) == {"diverging"}
    assert findings(healthy(3, 300, 0.05, **rising, **dense)) == []


@settings(max_examples=8, deadline=None)
@given(seed=SEED, noise=st.floats(0, 0.1), ratio=st.floats(1.25, 10.0))
def test_fewer_bytes_without_a_gain(seed: int, noise: float, ratio: float) -> None:
    numbers = random.Random(seed)

    def compress(iteration: int) -> list[float]:
        return [(iteration > WARM_UP) * ratio * DENSE * (1 + numbers.gauss(0, noise))] * 2

    found = findings(healthy(seed, 12 * WINDOW, noise, compress=compress, predicted=lambda i: ()))
    assert names(found) == {"no_speedup"}
    first = found[0]
    assert first.iteration == WARM_UP + IN_A_ROW * WINDOW
    assert first.numbers["bytes_saved"] == pytest.approx(0.8)
    assert first.numbers["seconds"] > first.numbers["seconds_uncompressed"]
    # Where no byte is saved nobody expects a gain.
    same = healthy(seed, 12 * WINDOW, noise, compress=compress, predicted=lambda i: (), bytes=lambda i: 100)
    assert findings(same) == []


def test_without_a_warm_up_the_measured_time_is_the_reference() -> None:
    changes: dict[str, Callable[[int], Any]] = {
        "ranks": lambda i: (8, 8),
        "bytes": lambda i: 20,
        "predicted": lambda i: (),
    }
    for uncompressed, expected in ((math.nan, set()), (DENSE, {"no_speedup"})):
        slow = healthy(5, 100, 0.05, **changes, communicate=lambda i: [0.2, 0.2])
        assert names(findings(slow, uncompressed=uncompressed)) == expected


@settings(max_examples=8, deadline=None)
@given(seed=SEED, noise=st.floats(0, 0.1), late=st.integers(0, 1))
def test_stages_out_of_step(seed: int, noise: float, late: int) -> None:
    def communicate(iteration: int) -> list[float]:
        times = [0.7 * (COMPRESSED if iteration > WARM_UP else DENSE)] * 2
        if iteration > WARM_UP:
            times[late] += 0.5 * COMPRESSED
        return times

    found = findings(healthy(seed, 12 * WINDOW, noise, communicate=communicate))
    assert names(found) == {"out_of_step"}
    assert {(f.numbers["stage_late"], f.numbers["stage_early"]) for f in found} == {(late, 1 - late)}
    # All off by as much still finish together.
    both = healthy(seed, 12 * WINDOW, noise, communicate=lambda i: [max(communicate(i))] * 2)
    assert "out_of_step" not in names(findings(both))


def test_skipped_and_disturbed_steps_are_no_evidence() -> None:
    """Every second step is skipped with absurd numbers, or timed in: nothing changes."""
    for changes in ({"skipped": True, "loss": math.nan}, {"disturbed": True}):
        watch = SignatureWatch(4 * WINDOW)
        for seen in healthy(7, 4000, 0.05):
            absurd = Observation(**{**vars(seen), **changes, "communicate": [9.0, 0.1]})
            assert watch.add(absurd if seen.iteration % 2 else seen) == []


@settings(max_examples=8, deadline=None)
@given(seed=SEED, at=st.integers(1, 199))
def test_a_resumed_watch_goes_on(seed: int, at: int) -> None:
    def run() -> list[Observation]:
        rising = random.Random(seed)
        loss = {i: 3.0 + rising.gauss(0, 0.05) + (i > 120) * 0.05 * (i - 120) for i in range(1, 201)}
        changes: dict[str, Callable[[int], Any]] = {
            "loss": loss.__getitem__,
            "compress": lambda i: [(i > WARM_UP) * (DENSE + 0.5 * (i > 150))] * 2,
        }
        return list(healthy(seed, 200, 0.05, **changes))

    whole = findings(iter(run()), uncompressed=DENSE)
    assert len(names(whole)) >= 2
    first, second = SignatureWatch(WINDOW, uncompressed=DENSE), SignatureWatch(WINDOW)
    found = [f for seen in run()[:at] for f in first.add(seen)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += [f for seen in run()[at:] for f in second.add(seen)]
    assert found == whole
