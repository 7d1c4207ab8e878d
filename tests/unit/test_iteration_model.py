"""The model of an iteration: known lengths of the schedules, no step before its input, slower is never quicker."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.simulation.iteration_model import Bucket, Iteration, Stage, Step, iterate, order

seconds = st.floats(0.01, 5)


@given(stages=st.integers(1, 6), micro_batches=st.integers(1, 12), forward=seconds, backward=seconds)
def test_equal_stages_take_the_known_time(stages: int, micro_batches: int, forward: float, backward: float) -> None:
    found = iterate([Stage(forward=forward, backward=backward)] * stages, micro_batches)
    assert found.seconds == pytest.approx((micro_batches + stages - 1) * (forward + backward))
    # Stage i ends i backward times before stage 0: what DAC gives it to communicate longer.
    assert [found.computed[0] - end for end in found.computed] == pytest.approx(
        [index * backward for index in range(stages)]
    )


@given(stages=st.integers(1, 4), micro_batches=st.integers(1, 6), forward=seconds, backward=seconds)
def test_stages_on_one_machine_do_each_others_work_one_after_another(
    stages: int, micro_batches: int, forward: float, backward: float
) -> None:
    """Somebody always computes, and all together no faster than one."""
    found = iterate([Stage(forward=forward, backward=backward)] * stages, micro_batches, one_machine=True)
    assert found.seconds == pytest.approx(stages * micro_batches * (forward + backward))


def test_a_step_on_one_machine_counted_by_hand() -> None:
    # Forward until 1, sent until 11; forward of both until 13. The second activations go alone until 15, while stage 1
    # computes, then against gradients at half the speed until 31; these have 2 s left, until 33. Stage 1's forward pass
    # ends at 35, stage 0's backward at 37, stage 1's at 38; gradients until 48, and stage 0 ends at 50.
    staged = Stage(forward=1.0, backward=2.0, to_next=10.0, to_previous=10.0)
    found = iterate([staged, staged], 2, one_machine=True)
    assert found.seconds == pytest.approx(50)
    assert [line[-1].end for line in found.spans] == pytest.approx([50, 48]), "a span ends when its result has gone"
    # Complete at 2; half a second of the message by 3, when backward ends, and the rest after it.
    bucket = Bucket(share=0.5, messages=((0.5, 1.0),))
    stage = Stage(forward=1.0, backward=2.0, buckets=(bucket,))
    assert iterate([stage], 1, overlap=True, one_machine=True).seconds == pytest.approx(4.0)
    assert iterate([stage], 1, overlap=True).seconds == pytest.approx(3.5)
    assert iterate([stage], 1, one_machine=True).seconds == pytest.approx(4.5), "nothing beside it after backward"


def test_order_of_two_stages() -> None:
    def text(steps: list[Step]) -> str:
        return " ".join(f"{s.kind[0]}{s.micro_batch}" for s in steps)

    assert text(order(0, 2, 3)) == "f0 f1 b0 f2 b1 b2"
    assert text(order(1, 2, 3)) == "f0 b0 f1 b1 f2 b2"


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Stage], int, bool]:
    """Stages, micro-batches, and whether reductions overlap."""
    stages = []
    for _ in range(draw(st.integers(1, 4))):
        a, b, c, d = draw(st.tuples(*[seconds] * 4))
        buckets = (Bucket(share=0.5, compress=a, messages=((0.0, b),)), Bucket(decompress=c, messages=((d, 0.0),)))
        stages.append(Stage(forward=a, backward=b, to_next=c, to_previous=d, buckets=buckets))
    return stages, draw(st.integers(1, 3)) * len(stages), draw(st.booleans())


@given(steps(), st.booleans())
def test_every_step_once_and_never_before_its_input(case: tuple[list[Stage], int, bool], one_machine: bool) -> None:
    stages, micro_batches, overlap = case
    found = iterate(stages, micro_batches, overlap=overlap, one_machine=one_machine)
    ends = {(index, span.step): span.end for index, line in enumerate(found.spans) for span in line}
    assert len(ends) == 2 * len(stages) * micro_batches == sum(map(len, found.spans))
    for index, line in enumerate(found.spans):
        assert all(after.start >= before.end for before, after in pairwise(line))
        for span in line:
            forward = span.step.kind == "forward"
            source = index + (-1 if forward else 1)
            if 0 <= source < len(stages):
                travel = stages[source].to_next if forward else stages[source].to_previous
                travel *= not one_machine  # there it is part of the step
                assert span.start >= ends[source, span.step] + travel - 1e-9
            elif not forward:
                assert span.start >= ends[index, Step("forward", span.step.micro_batch)]
    assert all(exposed >= 0 for exposed in found.exposed)


@given(steps(), st.integers(0, 3), st.floats(0.1, 3))
def test_a_slower_part_never_makes_the_iteration_shorter(
    case: tuple[list[Stage], int, bool], which: int, more: float
) -> None:
    stages, micro_batches, overlap = case
    slower = list(stages)
    old = slower[index := which % len(stages)]
    buckets = tuple(replace(bucket, messages=(*bucket.messages, (0.0, more))) for bucket in old.buckets)
    slower[index] = replace(old, backward=old.backward + more, to_next=old.to_next + more, buckets=buckets)
    seconds = [iterate(what, micro_batches, overlap=overlap).seconds for what in (slower, stages)]
    assert seconds[0] >= seconds[1] - 1e-9


def ends(buckets: tuple[Bucket, ...], micro_batches: int, *, overlap: bool) -> tuple[float, float, float]:
    """Of one stage: end of its last step, of its reduction, and of the iteration."""
    stages = [Stage(forward=1.0, backward=2.0, buckets=buckets)]
    found: Iteration = iterate(stages, micro_batches, overlap=overlap, after=0.1)
    return found.computed[0], found.reduced[0], found.seconds


def test_buckets_in_numbers() -> None:
    # Two pauses; beside backward they lengthen it. After a last message there is none.
    pauses = (Bucket(share=0.5, between=0.25, messages=((0.0, 1.0),) * 3), Bucket(between=9.0, messages=((0.0, 0.5),)))
    assert ends(pauses, 1, overlap=True) == pytest.approx((3.0 + 0.5, 2.0 + 3.5 + 0.5, 6.1))
    assert ends(pauses, 1, overlap=False) == pytest.approx((3.0, 3.0 + 3.5 + 0.5, 7.1))
    buckets = (
        Bucket(share=1.0, compress=0.5, decompress=0.25, messages=((0.0, 1.0), (0.5, 0.0))),
        Bucket(share=0.5, compress=0.5, messages=((0.0, 3.0),)),
    )
    # Steps end at 6; one after another: 0.5 + 1 + 0.5, 0.5 beside them + 3, 0.25.
    assert ends(buckets, 2, overlap=False) == pytest.approx((6.0, 11.25, 11.35))
    # The later bucket of the model is complete at 5, is sent from 5.5 to 8.5; the other waits for the link.
    assert ends(buckets, 2, overlap=True) == pytest.approx((7.0, 8.5 + 1.5 + 0.25, 10.35))
