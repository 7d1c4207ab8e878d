"""The order in which several reductions in flight take their steps, and the thread that drives it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgc import buckets as buckets_module
from edgc.buckets import Bucket, BucketWorker
from edgc.compressors import Gradient
from edgc.errors import UserError
from edgc.runtime.device import masked_path


@dataclass
class FakeEngine:
    """Writes down what is asked of it, and takes a random time for it."""

    waits: int = 2
    delay: random.Random | None = None
    fail_at: str = ""
    log: list[Any] = field(default_factory=list)
    iteration: int = 1
    decision: None = None
    last: Any = None
    given_up: bool = False
    closes_at_once: bool = False
    compresses: bool = True
    open: set[str] = field(default_factory=set)

    def exchange(self, gradients: Sequence[Gradient], group: Any, **how: Any) -> Generator[None, None, None]:
        self.open.update(gradient.name for gradient in gradients)
        names = tuple(gradient.name for gradient in gradients)
        try:
            for step in range(self.waits):
                if self.fail_at in names:
                    raise ConnectionError("peer is\nlost")
                self.log.append((names, step))
                if self.delay is not None:
                    time.sleep(self.delay.random() * 2e-3)
                yield
        finally:
            self.open -= set(names)
        for gradient in gradients:
            gradient.tensor.mul_(2)
        self.log.append((names, self.waits))

    def rescale(self, scale: float) -> None:
        self.log.append(scale)

    def end_iteration(self, *, skipped: bool) -> None:
        self.log.append("skipped" if skipped else "end")
        self.last = SimpleNamespace(iteration=self.iteration, statistics=SimpleNamespace(skipped=1))
        self.iteration += 1


def backward(
    worker: BucketWorker,
    layout: Sequence[Sequence[str]],
    delay: random.Random | None = None,
    says_last: bool = True,
) -> list[Bucket]:
    """Put one iteration's buckets, as a backward would."""
    buckets = []
    for index, names in enumerate(layout):
        if delay is not None:
            time.sleep(delay.random() * 3e-3)
        buffer = torch.ones(len(names))
        gradients = [Gradient(name, buffer[i : i + 1]) for i, name in enumerate(names)]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        buckets.append(Bucket(says_last and index == len(layout) - 1, gradients, buffer, future))
        worker.put(buckets[-1])
    return buckets


def new_worker(engine: FakeEngine, parameters: int = 99, **options: bool) -> BucketWorker:
    return BucketWorker(engine, None, torch.device("cpu"), parameters, **options)  # type: ignore[arg-type]


# --------------------------------------------------------------------- the order


class Counted(FakeEngine):
    """Every bucket waits as often as its name says."""

    counts: Sequence[int] = ()
    ahead: Sequence[int] = ()
    begun = 0

    def exchange(self, gradients: Sequence[Gradient], group: Any, **how: Any) -> Generator[None, None, None]:
        key = int(gradients[0].name)
        self.waits = self.ahead[key] + 1 if self.ahead else 1
        self.begun += 1
        return self.steps(key)

    def steps(self, key: int) -> Generator[None, None, None]:
        for step in range(self.counts[key]):
            self.log.append((key, step))
            yield
        self.log.append((key, self.counts[key]))


def order_of(waits: Sequence[int], ahead: Sequence[int] = ()) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Every (bucket, step) in the order taken, and which buckets were handed over after each one came."""
    engine = Counted()
    engine.counts, engine.ahead = waits, ahead
    with masked_path():
        worker = new_worker(engine, parameters=len(waits) + 1)
    log, handed, open_buckets = engine.log, [], []
    for key in range(len(waits)):
        tensor = torch.ones(1)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        open_buckets.append((key, future))
        worker.put(Bucket(False, [Gradient(str(key), tensor)], tensor, future))
        handed.append([k for k, f in open_buckets if f.done()])
        open_buckets = [(k, f) for k, f in open_buckets if not f.done()]
        assert len(worker._running) == len(open_buckets)
    worker.flush()
    handed.append([k for k, f in open_buckets if f.done()])
    assert not worker._running
    worker.stop()
    return log, handed


def test_the_order_written_out() -> None:
    """Also with all waits but the last passed at once."""
    log, handed = order_of([2, 1, 2])
    assert log == [(0, 0), (1, 0), (0, 1), (2, 0), (0, 2), (1, 1), (2, 1), (2, 2)]
    assert handed == [[], [], [0, 1], [2]]
    log, handed = order_of([2, 1, 2], [1, 0, 1])
    assert log == [(0, 0), (0, 1), (1, 0), (0, 2), (2, 0), (1, 1), (2, 1), (2, 2)]
    assert handed == [[], [0], [1], [2]]


@settings(deadline=None)
@given(data=st.data(), waits=st.lists(st.integers(0, 5), max_size=12))
def test_everything_finishes_once_and_in_its_own_order(data: st.DataObject, waits: list[int]) -> None:
    ahead = data.draw(st.lists(st.integers(0, 6), min_size=len(waits), max_size=len(waits)))
    log, handed = order_of(waits, ahead)
    for key, count in enumerate(waits):
        assert [step for other, step in log if other == key] == list(range(count + 1))
    assert sorted(key for keys in handed for key in keys) == list(range(len(waits)))
    # What has started before the k-th start cannot depend on buckets that come later.
    for length in range(len(waits)):
        prefix, _ = order_of(waits[:length], ahead[:length])
        started = [item for item in log if item[0] < length]
        before = log.index((length, 0))
        assert log[:before] == prefix[:before] and set(started) == set(prefix)


# --------------------------------------------------------------------- the thread


@settings(max_examples=15, deadline=None)
@given(buckets=st.integers(1, 6), waits=st.integers(0, 3), seed=st.integers(0, 1000))
def test_the_threads_order_does_not_depend_on_timing(buckets: int, waits: int, seed: int) -> None:
    layout = [[f"p{i}", f"q{i}"] for i in range(buckets)]
    logs = []
    for delay in (None, random.Random(seed), random.Random(seed + 1)):
        engine = FakeEngine(waits=waits, delay=delay)
        worker = new_worker(engine)
        for _ in range(2):
            for bucket in backward(worker, layout, delay):
                assert torch.equal(bucket.future.wait(), torch.full((2,), 2.0))
            assert not worker.busy, "an iteration must be over before its last future is set"
        worker.stop()
        logs.append(engine.log)
    assert logs[0] == logs[1] == logs[2]
    assert logs[0].count("end") == 2 and worker.skipped == 0


def test_early_buckets_are_finished_before_the_last_one_has_come() -> None:
    """Which is known by the number of gradients where DDP does not say so."""
    worker = new_worker(FakeEngine(waits=2), parameters=4)
    buckets = backward(worker, [["a"], ["b"], ["c"]], says_last=False)
    for bucket in buckets[:2]:  # would hang if the thread waited for the end of backward
        assert bool((bucket.future.wait() == 2).all())
    assert worker.busy and not buckets[2].future.done()
    for bucket in [*buckets, *backward(worker, [["d"]], says_last=False)]:
        bucket.future.wait()
    assert not worker.busy
    worker.stop()


def test_the_first_iterations_after_loading_keep_the_saved_groups() -> None:
    saved = [["a"], ["b", "c"], ["d"]]
    for arriving in (saved, [["a", "b", "c", "d"]], [["a"], ["d", "c", "b"]], [["d"], ["c"], ["b"], ["a"]]):
        engine = FakeEngine()
        worker = new_worker(engine)
        worker.replay(saved)
        buckets = backward(worker, arriving)
        assert all(bool((bucket.future.wait() == 2).all()) for bucket in buckets)
        assert worker.layout == saved
        # The order of steps is that of an undisturbed run, too.
        reference = FakeEngine()
        other = new_worker(reference)
        backward(other, saved)[-1].future.wait()
        assert engine.log == reference.log
        for layout in (saved, arriving, arriving):  # a static graph settles in the second iteration
            backward(worker, arriving)[-1].future.wait()
            assert worker.layout == layout
        worker.stop()
        other.stop()


@pytest.mark.parametrize("fail_at", ["a", "c"])
def test_an_error_reaches_every_future_and_ends_the_order(fail_at: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 3)
    engine = FakeEngine(fail_at=fail_at)
    worker = new_worker(engine)
    for bucket in backward(worker, [["a"], ["b"], ["c"]]):
        if fail_at == "a" or bucket.last:
            with pytest.raises(RuntimeError, match=r"on rank 3 in iteration 1.*ConnectionError: peer is lost$"):
                bucket.future.wait()
    assert not worker.busy and not engine.open
    with pytest.raises(RuntimeError, match="peer is lost"):
        backward(worker, [["x"]])[0].future.wait()
    assert ("x",) not in [item[0] for item in engine.log]
    worker.stop()


@pytest.mark.parametrize("saved", [[["a"], ["b"]], [["a"], ["b"], ["x"]], [["b"], ["c"], ["a", "x"]]])
def test_a_saved_state_of_other_parameters_is_refused(saved: list[list[str]]) -> None:
    engine = FakeEngine()
    worker = new_worker(engine)
    worker.replay(saved)
    with pytest.raises(UserError, match="other parameters"):
        backward(worker, [["a"], ["b", "c"]])[1].future.wait()
    worker.stop()


def test_stop_ends_the_thread_and_a_later_bucket_is_an_error() -> None:
    worker = new_worker(FakeEngine())
    backward(worker, [["a"]])[0].future.wait()
    worker.stop()
    assert not worker._thread.is_alive() and worker._thread.daemon
    with pytest.raises(RuntimeError, match="after the reductions were ended"):
        backward(worker, [["a"]])[0].future.wait()
    worker.flush()


def test_a_step_is_given_up_as_a_whole_where_the_engine_waits_with_its_state() -> None:
    engine = FakeEngine(given_up=True)
    worker = new_worker(engine)
    backward(worker, [["a"], ["b"]])[-1].future.wait()
    assert engine.log[-1] == "skipped" and worker.skipped == 1
    worker.stop()


# --------------------------------------------------------------------- without a thread, as on a GPU


def test_without_a_thread_the_order_is_that_with_one() -> None:
    layout = [["a"], ["b", "c"], ["d"]]
    logs = []
    for masked in (False, True):
        engine = FakeEngine()
        with masked_path(masked):
            worker = new_worker(engine)
            assert worker.inline == masked
            before = threading.active_count()
            for _ in range(2):
                for bucket in backward(worker, layout):
                    assert bool((bucket.future.wait() == 2).all())
            assert threading.active_count() == before
        worker.settle()
        worker.stop()
        logs.append(engine.log)
    assert logs[0] == logs[1]


def test_without_a_thread_an_iteration_is_closed_when_the_next_one_begins_or_somebody_asks() -> None:
    engine = FakeEngine()
    with masked_path():
        worker = new_worker(engine)
        backward(worker, [["a"]])
        assert not worker.busy and "end" not in engine.log
        backward(worker, [["a"]])
        assert engine.log.count("end") == 1 and engine.log.index("end") == engine.log.index((("a",), 2)) + 1
        worker.settle()
        worker.settle()
        assert engine.log.count("end") == 2
        # What all ranks have to do together is done at once.
        engine.closes_at_once = True
        backward(worker, [["a"]])
        assert engine.log.count("end") == 3


def test_the_loss_scale_is_told_before_the_first_bucket_and_after_the_iteration_before() -> None:
    for masked in (False, True):
        engine = FakeEngine(waits=0)
        with masked_path(masked):
            worker = new_worker(engine)
            for scale in (8.0, 4.0):
                tensors = [torch.ones(1), torch.ones(1)]
                futures = [torch.futures.Future[torch.Tensor]() for _ in tensors]
                for i, (tensor, future) in enumerate(zip(tensors, futures, strict=True)):
                    gradients = [Gradient(f"p{i}", tensor)]
                    worker.put(Bucket(i == 1, gradients, tensor, future, scale=scale))
                futures[-1].wait()
        worker.settle()
        worker.stop()
        step = [(("p0",), 0), (("p1",), 0), "end"]
        assert engine.log == [8.0, *step, 4.0, *step]


# --------------------------------------------------------------------- gathered, as on a GPU


LAYOUT = [["a"], ["b"], ["c", "d"], ["e"], ["f"], ["g"]]
GATHERED = [("a", "b"), ("c", "d", "e", "f"), ("g",)]  # of 4 bytes each, by 8 and then 16


def groups_of(engine: FakeEngine) -> list[tuple[str, ...]]:
    """What was reduced together, in the order in which it was begun."""
    return list(dict.fromkeys(entry[0] for entry in engine.log if isinstance(entry, tuple)))


def test_buckets_are_gathered_where_launching_costs_and_something_is_compressed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buckets_module, "GATHER", (8, 16))
    alone, cases = [tuple(names) for names in LAYOUT], ([True] * 3, [True, True, False], [True, False, True])
    for masked, gathers, compresses in (*cases, [False, True, True]):
        engine = FakeEngine(compresses=compresses)
        with masked_path(masked):
            worker = new_worker(engine, gathers=gathers)
            for _ in range(2):
                engine.log.clear()
                buckets = backward(worker, LAYOUT)
                assert all(bool((bucket.future.wait() == 2).all()) for bucket in buckets)
                assert all(bucket.future.value() is bucket.buffer for bucket in buckets)
                assert groups_of(engine) == (GATHERED if masked and gathers and compresses else alone)
                assert worker.layout == LAYOUT
        worker.stop()


def test_a_group_that_is_full_does_not_wait_for_the_end_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets_module, "GATHER", (8, 16))
    engine = FakeEngine(waits=1)
    with masked_path():
        worker = new_worker(engine, parameters=7, gathers=True)
        buckets = backward(worker, LAYOUT[:5], says_last=False)
        assert groups_of(engine) == GATHERED[:2]
        assert [bucket.future.done() for bucket in buckets] == [True, True, False, False, False]
        buckets += backward(worker, LAYOUT[5:], says_last=False)
        assert all(bucket.future.done() for bucket in buckets) and not worker.busy
    worker.stop()


def test_what_is_gathered_is_reduced_when_it_is_flushed() -> None:
    engine = FakeEngine()
    with masked_path():
        worker = new_worker(engine, gathers=True)
        [bucket] = backward(worker, [["a"]], says_last=False)
        assert not bucket.future.done() and not engine.log
        worker.flush()
        assert bool((bucket.future.wait() == 2).all())
    worker.stop()


@pytest.mark.parametrize("arriving", [LAYOUT, LAYOUT[::-1], [["c", "b"], ["a"], ["g", "f", "e", "d"]]])
def test_a_resumed_run_gathers_what_the_saved_one_did(
    arriving: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets_module, "GATHER", (8, 16))
    logs = []
    for layout, saved in ((LAYOUT, []), (arriving, LAYOUT)):
        engine = FakeEngine()
        with masked_path():
            worker = new_worker(engine, gathers=True)
            worker.replay(saved)
            buckets = backward(worker, layout)
            assert all(bool((bucket.future.wait() == 2).all()) for bucket in buckets)
            assert worker.layout == LAYOUT
        worker.stop()
        logs.append(engine.log)
    assert logs[0] == logs[1]
